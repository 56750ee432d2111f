"""Keys of artifacts and of traces: a digest over named parts, kept by name so that a miss can be explained."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from vllm_neuron.errors import CacheError

if TYPE_CHECKING:
    from vllm_neuron.abi import Abi
    from vllm_neuron.lowering.module import ModuleIdentity

logger = logging.getLogger("vllm.neuron.cache")

FORMAT_VERSION = 1
"""Version of what an entry holds. Part of every key: a release that writes another format looks elsewhere."""

_DIGITS = 32
_KEY = re.compile(rf"[0-9a-f]{{{_DIGITS}}}")


@dataclass(frozen=True)
class Key:
    """``digest`` is the first 32 hexadecimal digits of a SHA-256 over ``parts``, in whatever order they are given."""

    digest: str
    parts: Mapping[str, str] = field(compare=False, repr=False)

    def __str__(self) -> str:
        return self.digest

    @classmethod
    def from_parts(cls, parts: Mapping[str, str]) -> Self:
        """The key over ``parts``. Each is hashed on its own, so no two sets of parts read as the same bytes."""
        hashed = {name: sha256(value.encode()) for name, value in parts.items()}
        digest = sha256(canonical_json(hashed).encode())[:_DIGITS]
        if logger.isEnabledFor(logging.DEBUG):
            for name in sorted(parts):
                logger.debug("key %s: %s %s = %s", digest, name, hashed[name][:12], parts[name])
        return cls(digest, dict(parts))


class ArtifactKey(Key):
    """What a compiled artifact is made of.

    Parts, each a string: ``module`` and ``abi`` are digests; ``module_format``, ``compiler``,
    ``compiler_version``, ``flags`` (a JSON list, in the order of the command line, where the last may win),
    ``target``, ``level`` (``O2``) and ``format`` are values that a person can read. Where the compiler is given the
    module in another form, ``converted`` is a digest of that.
    """


class TraceKey(Key):
    """What a captured graph is made of. The parts are those of ``graphs.trace_key``."""


def artifact_key(
    module: ModuleIdentity,
    compiler: str,
    compiler_version: str,
    flags: Sequence[str],
    target: str,
    level: int,
    *,
    converted: ModuleIdentity | None = None,
) -> ArtifactKey:
    """The key of what ``compiler`` makes of ``module``, or of ``converted``, which was made from it.

    Left out on purpose, because the artifact does not depend on them: weights, names of parameters, paths, host,
    user, rank, and the sources of this package (an edit that matters changes the module's bytes).
    """
    return ArtifactKey.from_parts(
        {
            "module": module.sha256,
            "module_format": module.format,
            "abi": abi_digest(module.abi),
            "compiler": compiler,
            "compiler_version": compiler_version,
            "flags": canonical_json(list(flags)),
            "target": target,
            "level": f"O{level}",
            "format": str(FORMAT_VERSION),
            **({} if converted is None else {"converted": converted.sha256}),
        }
    )


def is_key(text: str) -> bool:
    """Whether ``text`` has the form of a key, and so is safe to use as a file name."""
    return _KEY.fullmatch(text) is not None


def checked_key(text: str) -> str:
    """``text``, if it has the form of a key. Raises ``CacheError``."""
    if not is_key(text):
        raise CacheError(f"{text!r} is not a key; a key is {_DIGITS} hexadecimal digits, in lower case")
    return text


def abi_digest(abi: Abi) -> str:
    """SHA-256 over dtypes, shapes, order and aliasing."""
    return sha256(canonical_json(abi.to_json()).encode())


def canonical_json(value: Any) -> str:
    """One text per value: sorted names, no blanks, ASCII only. Raises ``ValueError`` on NaN and infinities."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def sha256(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()
