"""The one kind of lock between processes: a kernel lock on a file.

The kernel frees the lock when its holder ends, however it ends, so there are no stale locks and nothing is judged by
process ids or clocks. ``fcntl.flock`` is used directly: the ``filelock`` library falls back to locks by process id
where a file system has no kernel locks, and some of its releases truncate or unlink the file, which here carries the
counter and may have waiters.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path

from vllm_neuron.cache.disk.modes import set_mode

NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL})
"""What ``flock`` says on a file system without kernel locks."""

_COUNTER_LIMIT = 1 << 20
_CONTENDED = frozenset({errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES})

_opening = threading.Lock()
_open_locks: set[KernelLock] = set()


class KernelLock:
    """An exclusive ``flock`` on a file that is created at need and never unlinked here.

    The file's size is a counter, with no blocks behind it: a full disk can't stop a heartbeat.
    A forked child closes its copy of the lock at once: it must not keep alive what its parent held.
    """

    def __init__(self, path: Path, mode: int = 0o600) -> None:
        self.path = path
        self.held = False
        self._mode = mode
        self._descriptor: int | None = None

    def try_acquire(self) -> bool:
        """Take the lock if nobody has it. Raises ``OSError`` where no lock can be had in this place."""
        while True:
            descriptor = self._open()
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _CONTENDED:
                    self.release()
                    raise
                if self._is_in_place(descriptor):
                    return False
            else:
                if self._is_in_place(descriptor):
                    self.held = True
                    return True
            self.release()  # Someone removed the whole cache: the lock is that of a file nobody else can find.

    def release(self) -> None:
        """Give the lock up, if it is held, and close the file."""
        with _opening:
            _open_locks.discard(self)
            descriptor, self._descriptor, self.held = self._descriptor, None, False
            if descriptor is not None:
                os.close(descriptor)

    def beat(self) -> None:
        """Count one further. For the holder."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, (self.count() + 1) % _COUNTER_LIMIT)

    def count(self) -> int:
        """The counter, as far as the holder has come. For waiters."""
        return os.fstat(self._open()).st_size

    def _open(self) -> int:
        # Under this lock, a fork on another thread sees either no descriptor or one that it knows to close.
        with _opening:
            if self._descriptor is None:
                flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
                try:
                    self._descriptor = os.open(self.path, flags | os.O_CREAT | os.O_EXCL, self._mode)
                    set_mode(self._descriptor, self._mode)
                except FileExistsError:
                    self._descriptor = os.open(self.path, flags | os.O_CREAT, self._mode)
                _open_locks.add(self)
            return self._descriptor

    def _is_in_place(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self.path.lstat())
        except FileNotFoundError:
            return False


def _close_in_child() -> None:
    for lock in _open_locks:
        descriptor, lock._descriptor, lock.held = lock._descriptor, None, False
        if descriptor is not None:
            os.close(descriptor)
    _open_locks.clear()
    _opening.release()


os.register_at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_close_in_child)
