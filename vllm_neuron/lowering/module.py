"""What lowering hands to a device compiler."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_neuron.abi import Abi

_FILE_NAMES = {"stablehlo": "graph.mlir", "hlo": "graph.hlo"}


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

    @property
    def file_name(self) -> str:
        """The name of the module's file in a cache entry. Constant, because compilers put it in their output."""
        return _FILE_NAMES[self.format]
