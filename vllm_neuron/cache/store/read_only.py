"""A store that is only read, whatever its kind."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from vllm_neuron.cache.disk.progress import Progress
from vllm_neuron.cache.entry import Entry
from vllm_neuron.cache.store.base import Head, IsAcceptable, Reader, Stored
from vllm_neuron.errors import CacheError


class ReadOnly:
    """``reader`` as a store to which nothing can be written: what writes raises ``CacheError``."""

    read_only = True

    def __init__(self, reader: Reader) -> None:
        self.name = reader.name
        self.streams = reader.streams
        self._reader = reader

    def exists(self) -> bool:
        """See ``Reader``."""
        return self._reader.exists()

    def head(self, key: str) -> Head | None:
        """See ``Reader``."""
        return self._reader.head(key)

    def read(self, path: str, limit: int) -> bytes | None:
        """See ``Reader``."""
        return self._reader.read(path, limit)

    def copy(self, path: str, size: int, to: Path | None, progress: Progress) -> str:
        """See ``Reader``."""
        return self._reader.copy(path, size, to, progress)

    def names(self, folder: str) -> list[str]:
        """See ``Reader``."""
        return self._reader.names(folder)

    def put(self, path: str, data: bytes) -> None:
        """Raises ``CacheError``."""
        self._refuse()

    def publish(self, entry: Entry, is_acceptable: IsAcceptable, progress: Progress) -> bool:
        """Raises ``CacheError``."""
        self._refuse()

    def stored(self, progress: Progress) -> dict[str, Stored]:
        """Raises ``CacheError``: only who removes entries asks for it."""
        self._refuse()

    def remove(self, key: str, seen: Stored) -> bool:
        """Raises ``CacheError``."""
        self._refuse()

    def trim(self) -> int:
        """Nothing is removed here."""
        return 0

    def _refuse(self) -> NoReturn:
        raise CacheError(f"the remote cache {self.name} is read-only")
