"""The manifests of this host: a folder with one JSON file per trace key."""

from __future__ import annotations

from pathlib import Path

from vllm_neuron.cache.disk import files, folders
from vllm_neuron.cache.store.layout import MAX_MANIFEST_BYTES, manifest_key, manifest_name


class ManifestFolder:
    """``<root>/<trace key>.json``. The folder is made, with the mode of the one above it, when something is stored.

    Manifests go in and out by the methods of the same names that a remote tier has.
    """

    def __init__(self, root: Path) -> None:
        self.name = str(root)
        self._root = root

    def read_manifest(self, key: str) -> bytes | None:
        """The bytes of a manifest, unchecked; None where there is none.

        Raises ``NotAsExpected`` for something that is no plain file, or too large; ``OSError`` where the file system
        refuses.
        """
        return files.read_file(self._root / manifest_name(key), MAX_MANIFEST_BYTES)

    def write_manifest(self, key: str, data: bytes) -> None:
        """Store a manifest: written aside and renamed, whatever was there. Raises ``OSError``, or ``CacheError``."""
        folders.put_file(self._root / manifest_name(key), data)

    def manifest_keys(self) -> list[str]:
        """Keys of all manifests, those that were written last first. Nothing is read."""
        names = folders.newest_first(self._root)
        return [key for name in names if (key := manifest_key(name)) is not None]
