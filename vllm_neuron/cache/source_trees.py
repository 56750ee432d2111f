"""Digests of source trees: equal as long as no Python file of the tree changes, wherever the tree lies.

Reading every file of a large package takes a quarter of a second, so a digest is remembered with the sizes, times and
inodes of the files that it was taken from, and taken again when any of these differs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_neuron.cache.disk import files, folders
from vllm_neuron.cache.metadata import Sha256

logger = logging.getLogger("vllm.neuron.cache")

_MAX_BYTES = 1 << 20
# A file that was written this shortly before may be written again without a change of its times.
_SETTLED_SECONDS = 2.0


class _Index(BaseModel):
    """By folder: the digest of its files' sizes, times and inodes, and that of their contents."""

    model_config = ConfigDict(strict=True, extra="forbid")

    trees: dict[str, tuple[Sha256, Sha256]] = Field(default={}, max_length=1000)


class SourceDigests:
    """Digests of source trees, remembered in the file ``index``, or not where that can't be read or written."""

    def __init__(self, index: Path) -> None:
        self._path = index
        self._index = self._read()

    def digest(self, root: Path) -> str:
        """SHA-256 over relative paths and contents of the ``*.py`` files below ``root``, in hexadecimal.

        Raises ``OSError`` where a file can't be read.
        """
        found_files = sorted(_python_files(str(root), ""))
        fingerprint = hashlib.sha256()
        newest = 0
        for relative, found in found_files:
            state = (relative, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
            fingerprint.update(json.dumps(state).encode())
            newest = max(newest, found.st_mtime_ns, found.st_ctime_ns)
        known = self._index.trees.get(str(root))
        if known is not None and known[0] == fingerprint.hexdigest():
            return known[1]
        digest = _of_contents(root, [relative for relative, _ in found_files])
        if time.time() - newest / 1e9 > _SETTLED_SECONDS:
            self._remember(str(root), fingerprint.hexdigest(), digest)
        return digest

    def _remember(self, root: str, fingerprint: str, digest: str) -> None:
        self._index.trees[root] = (fingerprint, digest)
        try:
            folders.make_folder(self._path.parent)
            with files.replacing(self._path) as aside:
                aside.write_text(self._index.model_dump_json())
        except OSError as error:
            logger.debug("Digests of sources can't be remembered in %s: %s", self._path, error)

    def _read(self) -> _Index:
        try:
            if self._path.stat().st_size > _MAX_BYTES:
                return _Index()
            return _Index.model_validate_json(self._path.read_bytes())
        except (OSError, ValidationError):
            return _Index()


def _python_files(root: str, relative: str) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(os.path.join(root, relative)) as entries:  # noqa: PTH118 - a third of the time of pathlib
        for entry in entries:
            path = f"{relative}/{entry.name}" if relative else entry.name
            if entry.is_dir():
                if entry.name != "__pycache__":
                    yield from _python_files(root, path)
            elif entry.name.endswith(".py"):
                yield path, entry.stat()


def _of_contents(root: Path, relatives: list[str]) -> str:
    digest = hashlib.sha256()
    for relative in relatives:
        content = hashlib.sha256((root / relative).read_bytes()).hexdigest()
        digest.update(json.dumps([relative, content]).encode())
    return digest.hexdigest()
