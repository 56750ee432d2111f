"""What lowering hands to a device compiler, and what is left of it where only its identity is known."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

from vllm_neuron import digests
from vllm_neuron.abi import Abi

_FILE_NAMES = {"stablehlo": "graph.mlir", "hlo": "graph.hlo"}


class ModuleIdentity(Protocol):
    """All of a module that its key depends on: its format, the SHA-256 of its bytes, its calling convention."""

    @property
    def format(self) -> str:
        """``stablehlo`` or ``hlo``."""

    @property
    def sha256(self) -> str:
        """The digest of the module's bytes, as ``digests`` defines it: of up to 4 MiB, their SHA-256."""

    @property
    def abi(self) -> Abi:
        """The calling convention of ``main``."""


@dataclass(frozen=True)
class KnownModule:
    """A :class:`ModuleIdentity` without the bytes: enough to look its artifact up, not to compile it."""

    format: str
    sha256: str
    abi: Abi


@dataclass(frozen=True)
class LoweredModule:
    """One graph as the compiler is given it, and as its key is taken from.

    ``format`` is ``stablehlo`` (``data`` is MLIR text, UTF-8, without locations) or ``hlo`` (``data`` is a
    serialized ``HloModuleProto``). The entry function is called ``main``; ``abi`` is its calling convention.
    """

    format: str
    data: bytes
    abi: Abi

    def __post_init__(self) -> None:
        if self.format not in _FILE_NAMES:
            raise ValueError(f"module format {self.format!r} is not one of {', '.join(_FILE_NAMES)}")

    @functools.cached_property
    def sha256(self) -> str:
        """The digest of ``data``: of more than 4 MiB, as ``digests`` defines it."""
        return digests.of_bytes(self.data)

    @property
    def file_name(self) -> str:
        """The name of the module's file in a cache entry. Constant, because compilers put it in their output."""
        return _FILE_NAMES[self.format]
