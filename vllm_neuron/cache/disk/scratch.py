"""Temporary folders that do not outlive their owner: whoever comes next removes those of the dead."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from vllm_neuron.cache.disk.folders import PRIVATE_MODE
from vllm_neuron.cache.disk.lock import NO_LOCKS, KernelLock
from vllm_neuron.errors import CacheError

_LOCK = "owner.lock"
_CONTENT = "content"
_ATTEMPTS = 16


class Scratch:
    """A new folder ``path``, at ``parent/prefix.<random>/content``, beside a kernel lock that this process holds.

    While the lock is held the owner lives. Raises ``OSError`` where nothing can be written.
    """

    def __init__(self, parent: Path, prefix: str) -> None:
        self._owner = os.getpid()
        for _ in range(_ATTEMPTS):
            self._folder = parent / f"{prefix}.{secrets.token_hex(8)}"
            self._lock = KernelLock(self._folder / _LOCK)
            self.path = self._folder / _CONTENT
            self._folder.mkdir(PRIVATE_MODE)
            try:
                if self._own():
                    self.path.mkdir(PRIVATE_MODE)
                    return
            except FileNotFoundError:
                continue  # A sweep saw the folder before its lock was there, and took it for abandoned.
            except OSError:
                self._remove()
                raise
        raise CacheError(f"no temporary folder can be kept in {parent}: something removes them at once")

    def _own(self) -> bool:
        try:
            return self._lock.try_acquire()
        except OSError as error:
            if error.errno in NO_LOCKS:
                return True  # Still ours alone; but no sweep can tell when we are dead, and each leaves it.
            raise

    def beside(self, name: str) -> Path:
        """The path of a further thing that is to go when this folder goes."""
        return self._folder / name

    def close(self) -> None:
        """Remove everything. Does nothing in a forked child, which owns nothing of its parent's."""
        if self._owner == os.getpid():
            self._remove()

    def _remove(self) -> None:
        _remove(self._folder, self._lock)


def sweep(parent: Path, may_remove: Callable[[Path], bool] = lambda _: True, pattern: str = "*") -> None:
    """Remove the temporary folders in ``parent`` whose owner is dead. What can't be removed now is left for later."""
    for folder in parent.glob(pattern):
        with suppress(OSError):
            if not may_remove(folder):
                continue
            lock_file = folder / _LOCK
            if not lock_file.exists():
                folder.rmdir()  # Only an empty one goes; anything else is not known to be abandoned.
                continue
            lock = KernelLock(lock_file)
            try:
                if lock.try_acquire():
                    _remove(folder, lock)
            finally:
                lock.release()


def _remove(folder: Path, lock: KernelLock) -> None:
    # The lock goes last: as long as anything is left, a later sweep can tell that its owner is dead.
    with suppress(OSError):
        for path in folder.iterdir():
            if path.name != _LOCK:
                shutil.rmtree(path, ignore_errors=True)
        if [path.name for path in folder.iterdir()] == [_LOCK]:
            lock.path.unlink()
        folder.rmdir()
    lock.release()
