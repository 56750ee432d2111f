"""Reading and writing single files where others may have put something else: no links followed, no size trusted."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import TypeAlias

from vllm_neuron import digests
from vllm_neuron.cache.disk import hashing
from vllm_neuron.cache.disk.progress import Progress
from vllm_neuron.errors import NeuronError

Identity: TypeAlias = tuple[int, int, int, int, int]
"""Device, inode, size, and times of last change of content and of inode: equal means that it is the same file."""

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class NotAsExpected(NeuronError):
    """A file is missing, of another size, or not a plain file. The message names the file, for a person."""

    code = "unexpected-file"


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


def read_file(path: Path, limit: int) -> bytes | None:
    """As ``read_if_there``, by path; None too where its folder is missing."""
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return read_if_there(path.name, limit, folder)
    finally:
        os.close(folder)


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


def copy_exactly(
    name: str, size: int, folder: int, to: Path | None = None, *, sync: bool = False, progress: Progress | None = None
) -> str:
    """Copy ``size`` bytes of a plain file to the new file ``to``; return the digest of what was copied.

    None: copy nowhere, for the digest alone. ``sync`` waits until the bytes are on disk. Raises ``NotAsExpected`` where
    the file is missing or of another size.
    """
    moved = progress or Progress()
    with ExitStack() as stack:
        try:
            source = stack.enter_context(open_plain(name, folder))
        except FileNotFoundError as error:
            raise NotAsExpected(f"{name} is missing") from error
        target = None if to is None else stack.enter_context(NewFile(to))
        found = os.fstat(source.fileno()).st_size
        if found != size:
            raise NotAsExpected(f"{name} has {found} bytes instead of {size}")

        def move(span: tuple[int, int]) -> bytes:
            place, hashed = span[0], hashlib.sha256()
            for data in hashing.read_span(source.fileno(), *span):
                hashed.update(data)
                if target is not None:
                    target.write_at(place, data)
                place += len(data)
                moved.add(len(data))
            if place != span[1]:
                raise NotAsExpected(f"{name} ended {size - place} bytes before its {size}")
            return hashed.digest()

        content = digests.of_pieces(hashing.over(move, digests.pieces(size)))
        if sync and target is not None:
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
def replacing(path: Path) -> Iterator[Path]:
    """A name beside ``path`` for a new file, which then takes the place of ``path`` in one step.

    A reader finds the old content or the new one, whole. Where the block raises, ``path`` stays as it was.
    """
    # A name may have 255 bytes; and one that begins with a dot is in no listing of entries.
    aside = path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}")
    try:
        yield aside
        aside.replace(path)
    finally:
        with suppress(OSError):
            aside.unlink()


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
