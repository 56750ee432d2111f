"""What a store does: whole entries by key, put where none is, read, listed and removed; and single files by path.

A kind of store has these verbs and no more. What an entry is, whether it is good, and how it is fetched, verified,
published and collected is the same for all of them: see ``remote/tier.py``.

Every verb raises ``OSError`` or ``CacheError`` where the store fails; none waits for another host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from vllm_neuron.cache.disk.progress import Progress
from vllm_neuron.cache.entry import Entry, Examined

STREAMS = 8
"""How many transfers from a store over a network run at the same time."""


@dataclass(frozen=True)
class Head:
    """What describes the entry that a store has under a key.

    ``found`` is its state, as far as can be told without reading its files. ``place`` is the path at which they are,
    ``data`` the bytes of its ``metadata.json``. ``signature`` is that of the metadata; ``signature_path`` says where it
    is read instead, if there is one. ``version`` is the store's name for just this entry, '' where it has none.
    """

    found: Examined
    place: str = ""
    data: bytes = b""
    signature: bytes | None = None
    signature_path: str = ""
    version: str = ""


IsAcceptable: TypeAlias = Callable[[Head], bool]
"""Whether an entry is whole, and one that would be accepted here, and so need not be replaced."""


@dataclass(frozen=True)
class Stored:
    """A finished entry: its bytes, when it was stored in Unix seconds, and the store's name for its marker.

    Equal means that nobody has stored another one in its place.
    """

    bytes: int
    when: float
    version: str


class Reader(Protocol):
    """The verbs of a store that can only be read."""

    @property
    def name(self) -> str:
        """What messages call it: a path or a URL, without credentials."""

    @property
    def streams(self) -> int:
        """How many files are to be copied from it at the same time."""

    def exists(self) -> bool:
        """False for a folder that is not there: it is made with the first entry. A store that is asked is there."""

    def head(self, key: str) -> Head | None:
        """What describes the finished entry of ``key``, damaged or not; None where there is none."""

    def read(self, path: str, limit: int) -> bytes | None:
        """A file of at most ``limit`` bytes, else ``NotAsExpected``; None where there is none."""

    def copy(self, path: str, size: int, to: Path | None, progress: Progress) -> str:
        """Copy a file of ``size`` bytes to the new file ``to`` (None: nowhere); return the digest of what came.

        Raises ``NotAsExpected`` where it is missing or of another size.
        """

    def names(self, folder: str) -> list[str]:
        """Names of the files in ``folder``, the newest first where the store can tell; in '', keys of the entries."""


class Store(Reader, Protocol):
    """The verbs of a store that can be written to as well."""

    @property
    def read_only(self) -> bool:
        """Whether nothing is ever written here."""

    def put(self, path: str, data: bytes) -> None:
        """Store a file in place of any that is there, all of it or nothing."""

    def publish(self, entry: Entry, is_acceptable: IsAcceptable, progress: Progress) -> bool:
        """Store a verified entry, signed, where none is that may stay; in one step. Whether ours landed."""

    def stored(self, progress: Progress) -> dict[str, Stored]:
        """What there is of each finished entry, by key. ``progress`` gets the bytes of what has been seen."""

    def remove(self, key: str, seen: Stored) -> bool:
        """Remove an entry: out of sight in one step, then its files. False where it is not the one that was seen."""

    def trim(self) -> int:
        """Remove what publishers who died left behind, where that can be told; return how many things went."""
