"""Reading and writing single files where others may have put something else: no links followed, no size trusted."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import TypeAlias

from vllm_neuron import digests
from vllm_neuron.cache import digest
from vllm_neuron.cache.progress import Progress

Identity: TypeAlias = tuple[int, int, int, int, int]
"""Device, inode, size, and times of last change of content and of inode: equal means that it is the same file."""

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class NotAsExpected(Exception):
    """A file is missing, of another size, or not a plain file. The message names the file, for a person."""


def open_plain(path: str | Path, folder: int | None = None) -> FileIO:
    """Open a regular file for reading. A link, a pipe or a folder in its place raises ``NotAsExpected``."""
    name = Path(path).name
    try:
        # Non-blocking, because a pipe in place of the file would hang this process for good.
        descriptor = os.open(path, _READ_FLAGS, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise NotAsExpected(f"{name} is a symbolic link or not a plain file") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotAsExpected(f"{name} is not a plain file")
    return FileIO(descriptor, "r")


def read_small(name: str, limit: int, folder: int) -> bytes:
    """The content of a file of at most ``limit`` bytes."""
    with open_plain(name, folder) as file:
        data = _read_up_to(file, limit + 1)
    if len(data) > limit:
        raise NotAsExpected(f"{name} is larger than {limit} bytes")
    return data


def read_if_there(name: str, limit: int, folder: int) -> bytes | None:
    """The content of a file of at most ``limit`` bytes, or None where there is none."""
    try:
        return read_small(name, limit, folder)
    except FileNotFoundError:
        return None


def _read_up_to(file: FileIO, limit: int) -> bytes:
    size = os.fstat(file.fileno()).st_size
    pieces = []
    left = limit
    while left and (piece := file.read(min(left, max(size + 1, 4096)))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def check_size(name: str, size: int, folder: int) -> Identity:
    """The identity of a file that must be a plain one of ``size`` bytes, else ``NotAsExpected``."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError as error:
        raise NotAsExpected(f"{name} is missing") from error
    if not stat.S_ISREG(found.st_mode):
        raise NotAsExpected(f"{name} is a symbolic link or not a plain file")
    if found.st_size != size:
        raise NotAsExpected(f"{name} has {found.st_size} bytes instead of {size}")
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def copy_exactly(name: str, size: int, folder: int, to: Path, *, sync: bool, progress: Progress) -> str:
    """Copy ``size`` bytes of a plain file to the new file ``to``; return the digest of what was copied.

    ``sync`` waits until they are on disk. Raises ``NotAsExpected`` where the file is of another size.
    """
    try:
        source = open_plain(name, folder)
    except FileNotFoundError as error:
        raise NotAsExpected(f"{name} is missing") from error
    with source, NewFile(to) as target:
        found = os.fstat(source.fileno()).st_size
        if found != size:
            raise NotAsExpected(f"{name} has {found} bytes instead of {size}")

        def move(span: tuple[int, int]) -> bytes:
            place, hashed = span[0], hashlib.sha256()
            for data in digest.read_span(source.fileno(), *span):
                hashed.update(data)
                target.write_at(place, data)
                place += len(data)
                progress.add(len(data))
            if place != span[1]:
                raise NotAsExpected(f"{name} ended {size - place} bytes before its {size}")
            return hashed.digest()

        content = digests.of_pieces(digest.over(move, digests.pieces(size)))
        if sync:
            os.fsync(target.descriptor)
    return content


class NewFile:
    """A new file of this user's alone, filled piece by piece in any order."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self.descriptor = os.open(path, flags, 0o600)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self.descriptor)

    def put(self, start: int, data: bytes) -> bytes:
        """Write ``data`` at ``start``; return its SHA-256."""
        self.write_at(start, data)
        return hashlib.sha256(data).digest()

    def write_at(self, start: int, data: bytes | memoryview) -> None:
        """Write ``data`` at ``start``."""
        view = memoryview(data)
        while view:
            written = os.pwrite(self.descriptor, view, start)
            view, start = view[written:], start + written


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and wait until it is on disk."""
    write(path, data, sync=True)


def write(path: Path, data: bytes, *, sync: bool) -> None:
    """Write a new file; ``sync`` waits until it is on disk."""
    with NewFile(path) as file:
        file.put(0, data)
        if sync:
            os.fsync(file.descriptor)


@contextmanager
def folder(path: Path) -> Iterator[int]:
    """A descriptor of a folder that is no link, to find files relative to it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk, where its file system can."""
    with folder(path) as descriptor:
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network and FUSE file systems have no such operation for folders.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.ENOSYS):
                raise
