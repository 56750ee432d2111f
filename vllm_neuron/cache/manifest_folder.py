"""Manifests in a folder, one JSON file per trace key: on this host, and inside a remote folder."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from vllm_neuron.cache import files, folders
from vllm_neuron.cache.key import is_key
from vllm_neuron.cache.manifest import MAX_MANIFEST_BYTES, ManifestError
from vllm_neuron.errors import CacheError

MANIFESTS = ".manifests"
"""The folder of the manifests in a remote store."""

_SUFFIX = ".json"


class ManifestFolder:
    """``<root>/<trace key>.json``. The folder is made, with the mode of the one above it, when something is stored."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, key: str) -> bytes | None:
        """The bytes of a manifest, unchecked; None where there is none.

        Raises :class:`ManifestError` for something that is no plain file, or too large; ``OSError`` where the file
        system refuses.
        """
        try:
            folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            return files.read_small(_name(key), MAX_MANIFEST_BYTES, folder)
        except FileNotFoundError:
            return None
        except files.NotAsExpected as problem:
            raise ManifestError(str(problem)) from None
        finally:
            os.close(folder)

    def write(self, key: str, data: bytes) -> None:
        """Store a manifest: written aside and renamed, whatever was there. Raises ``OSError``, or ``CacheError``."""
        folders.make_folder(self.root.parent)
        if self.root.exists() and not self.root.is_dir():
            raise CacheError(f"{self.root} is not a folder: remove it, and it will be made anew")
        folders.make_inner(self.root)
        if (self.root / _name(key)).is_dir():
            folders.remove(self.root / _name(key))
        aside = self.root / f".{key}.{secrets.token_hex(8)}"
        try:
            files.write_synced(aside, data)
            aside.chmod(0o600 | (folders.mode_of(self.root) & 0o044))
            aside.rename(self.root / _name(key))
        finally:
            with suppress(OSError):
                aside.unlink()

    def keys(self) -> list[str]:
        """Keys of all manifests, those that were written last first. Nothing is read."""
        try:
            found = [entry for entry in os.scandir(self.root) if is_key(entry.name.removesuffix(_SUFFIX))]
            found.sort(key=lambda entry: entry.stat(follow_symlinks=False).st_mtime, reverse=True)
        except OSError:
            return []
        return [entry.name.removesuffix(_SUFFIX) for entry in found]


def manifest_path(key: str) -> str:
    """Where a remote store that is no folder has the manifest of ``key``."""
    return f"{MANIFESTS}/{_name(key)}"


def manifest_key(path: str) -> str | None:
    """The trace key of what is at ``path`` in such a store; None for something else."""
    name = path.removeprefix(f"{MANIFESTS}/").removesuffix(_SUFFIX)
    return name if is_key(name) and path == manifest_path(name) else None


def _name(key: str) -> str:
    if not is_key(key):
        raise CacheError(f"{key!r} is not a key; a key is 32 hexadecimal digits, in lower case")
    return f"{key}{_SUFFIX}"
