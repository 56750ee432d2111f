"""Folders that a cache keeps its things in: who may write to them, the mode they are made with, and full disks."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import shutil
import stat
from pathlib import Path

from vllm_neuron.cache.disk import files
from vllm_neuron.cache.disk.modes import set_mode
from vllm_neuron.errors import CacheError, ConfigError

PRIVATE_MODE = 0o700

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
FORBIDDEN = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})

_FIX = "remove it, or choose another folder with VLLM_CACHE_ROOT"
_LEAST_FREE_BYTES = 1 << 20


def check_trusted(folder: Path) -> None:
    """Raise ``ConfigError`` where ``folder`` is, or lies in, a place where another user could have put things.

    Below a folder that everyone may write to (such as ``/tmp``), each step must belong to this user or to root, and
    must not be writable by others unless everyone's things may again lie in it. ``folder`` itself must never be
    everyone's, nor a group's where it lies below such a folder.
    """
    for path in {folder, Path(os.path.realpath(folder))}:
        public = False
        for step in (*reversed(path.parents), path):
            try:
                found = step.lstat()
            except (FileNotFoundError, PermissionError):
                break
            except NotADirectoryError:
                raise ConfigError(f"the cache folder {folder}: {step.parent} is not a folder; {_FIX}") from None
            except OSError as error:
                raise ConfigError(f"the cache folder {folder} can't be used: {error.strerror}; {_FIX}") from None
            open_to_all = stat.S_ISDIR(found.st_mode) and bool(found.st_mode & stat.S_IWOTH)
            if public and found.st_uid not in (os.geteuid(), 0):
                raise ConfigError(f"the cache folder {folder} is unsafe: {step} belongs to user {found.st_uid}; {_FIX}")
            if (open_to_all and step == path) or (public and not open_to_all and _open_to_a_group(found)):
                raise ConfigError(
                    f"the cache folder {folder} is unsafe: other users can write to {step}; "
                    f"run `chmod go-w {step}` if its content can be trusted, or {_FIX}"
                )
            public = public or open_to_all
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"the cache folder {folder} is not a folder; {_FIX}")


def _open_to_a_group(found: os.stat_result) -> bool:
    """Whether a group may write, other than this user's own one, which many systems give to each user."""
    if stat.S_ISLNK(found.st_mode) or not found.st_mode & stat.S_IWGRP:
        return False
    try:
        group, user = grp.getgrgid(found.st_gid), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return True
    return group.gr_name != user or bool(set(group.gr_mem) - {user})


def make_folder(folder: Path) -> None:
    """Create ``folder`` and what lacks above it, for this user only. One that exists stays as it is."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(PRIVATE_MODE, exist_ok=True)


def make_inner(folder: Path) -> None:
    """Create a folder inside a tier's root, open to whom the root is open, whatever the umask."""
    try:
        folder.mkdir()
    except FileExistsError:
        return
    set_mode(folder, mode_of(folder.parent))


def mode_of(root: Path) -> int:
    """The mode bits of a tier's root folder: what is made in it follows them."""
    return stat.S_IMODE(root.stat().st_mode)


def open_to_readers(entry: Path, root: Path) -> None:
    """Let those who may read the root read the entry; nobody but its owner may write to it."""
    mode = mode_of(root)
    for path in entry.iterdir():
        found = path.lstat()
        # The mode of a link is that of what it points to. A change that changes nothing would touch the file's times.
        if stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) != 0o600 | (mode & 0o044):
            set_mode(path, 0o600 | (mode & 0o044))
    set_mode(entry, 0o700 | (mode & 0o055))


def put_file(path: Path, data: bytes) -> None:
    """Store a file in a folder inside a tier, in place of whatever was there; it is open to whom its folder is.

    Raises ``CacheError`` where the folder can't be one, ``OSError`` where nothing can be written.
    """
    folder = path.parent
    make_folder(folder.parent)
    if folder.exists() and not folder.is_dir():
        raise CacheError(f"{folder} is not a folder: remove it, and it will be made anew")
    make_inner(folder)
    if path.is_dir():
        remove(path)
    with files.replacing(path) as aside:
        files.write_synced(aside, data)
        set_mode(aside, 0o600 | (mode_of(folder) & 0o044))


def newest_first(folder: Path) -> list[str]:
    """Names in a folder but for dotted ones, those that were written last first; none where it can't be read."""
    try:
        found = [one for one in os.scandir(folder) if not one.name.startswith(".")]
        found.sort(key=lambda one: one.stat(follow_symlinks=False).st_mtime, reverse=True)
    except OSError:
        return []
    return [one.name for one in found]


def is_full(folder: Path) -> bool:
    """Whether the file system of an existing folder has next to nothing left for this user."""
    try:
        return shutil.disk_usage(folder).free < _LEAST_FREE_BYTES
    except OSError:
        return False


def refuses_writing(error: BaseException, folder: Path) -> bool:
    """Whether an error, or what it came from, says that nothing can be written to ``folder``."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError):
            if seen.errno in FULL:
                return True
            named = [Path(name) for name in (seen.filename, seen.filename2) if isinstance(name, str | os.PathLike)]
            # Above the folder: where it, or what lacks above it, was to be made.
            if seen.errno in FORBIDDEN and any(p.is_relative_to(folder) or folder.is_relative_to(p) for p in named):
                return True
            if seen.errno in (errno.ENOENT, errno.ENOTDIR) and any(folder.is_relative_to(path) for path in named):
                return True  # No folder can be made there: /proc and its like, or something below a file.
        seen = seen.__cause__ or seen.__context__
    return folder.exists() and is_full(folder)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
