"""Reading and writing single files where others may have put something else: no links followed, no size trusted."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from io import FileIO
from pathlib import Path
from typing import TypeAlias

Identity: TypeAlias = tuple[int, int, int, int, int]
"""Device, inode, size, and times of last change of content and of inode: equal means that it is the same file."""

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CHUNK = 4 << 20


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


def digest(file: FileIO) -> str:
    """SHA-256 of the rest of an open file, in hexadecimal."""
    return hashlib.file_digest(file, "sha256").hexdigest()


def copy_exactly(name: str, size: int, folder: int, to: Path) -> None:
    """Copy ``size`` bytes of a plain file to the new file ``to`` and to disk; another size is ``NotAsExpected``."""
    try:
        source = open_plain(name, folder)
    except FileNotFoundError as error:
        raise NotAsExpected(f"{name} is missing") from error
    with source, to.open("xb", buffering=0) as target:
        found = os.fstat(source.fileno()).st_size
        if found != size:
            raise NotAsExpected(f"{name} has {found} bytes instead of {size}")
        left = size
        while left and (sent := os.sendfile(target.fileno(), source.fileno(), None, min(left, _CHUNK))):
            left -= sent
        if left:
            raise NotAsExpected(f"{name} ended {left} bytes before its {size}")
        os.fsync(target.fileno())


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and wait until it is on disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk, where its file system can."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems have no such operation for folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)
