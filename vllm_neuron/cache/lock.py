"""Single flight per key: a kernel lock, and a sign of life that is a counter.

The kernel frees the lock when its holder ends, however it ends, so there are no stale locks and nothing is judged by
process ids or clocks. ``fcntl.flock`` is used directly: the ``filelock`` library falls back to locks by process id
where a file system has no kernel locks, and some of its releases truncate or unlink the file, which here carries the
counter and may have waiters.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path

logger = logging.getLogger("vllm.neuron.cache")

HEARTBEAT_SECONDS = 0.5
LEAST_TIMEOUT_SECONDS = 4 * HEARTBEAT_SECONDS

NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL})
"""What ``flock`` says on a file system without kernel locks."""

_FIRST_POLL_SECONDS = 0.01
_LAST_POLL_SECONDS = 0.1
_FIRST_REPORT_SECONDS = 10.0
_REPORT_SECONDS = 60.0
_COUNTER_LIMIT = 1 << 20
_CONTENDED = frozenset({errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES})

_guard = threading.Lock()
_open_locks: set[KernelLock] = set()

# Where a holder was last found silent: as long as it has not counted since, there is no point in waiting again.
_silent: dict[Path, int] = {}


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
        with _guard:
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
        # Under the guard, a fork on another thread sees either no descriptor or one that it knows to close.
        with _guard:
            if self._descriptor is None:
                flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
                try:
                    self._descriptor = os.open(self.path, flags | os.O_CREAT | os.O_EXCL, self._mode)
                    os.fchmod(self._descriptor, self._mode)
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
    _guard.release()


os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_close_in_child)


class LockState(Enum):
    """How an attempt to be the only one ended. Only HELD excludes others; with the rest, work goes on privately."""

    HELD = "held"
    DONE = "not held: what it was wanted for has been done by another process"
    SILENT = "not held: the holder lives but shows no sign of life"
    UNAVAILABLE = "not held: no lock can be had here"

    @property
    def held(self) -> bool:
        """Whether this process is the only one on this host."""
        return self is LockState.HELD


class KeyLock:
    """The lock of one key on this host. The holder counts; waiters go on as long as they see it count.

    A thread that takes several must take them in sorted order, like every other thread, or two can wait for each
    other for ever.
    """

    def __init__(self, path: Path, mode: int = 0o600) -> None:
        self._lock = KernelLock(path, mode)
        self._stop = threading.Event()
        self._heart: threading.Thread | None = None

    def acquire(self, timeout: float, done: Callable[[], bool] = lambda: False) -> LockState:
        """Wait until the lock is ours, or until its holder has been silent for ``timeout`` seconds (at least 2).

        ``done`` is asked while we wait: once it is true, all who wait go on at once, instead of one after the other.
        """
        try:
            state = self._wait(max(timeout, LEAST_TIMEOUT_SECONDS), done)
        except OSError as error:
            logger.debug("No lock at %s: %s", self._lock.path, error)
            state = LockState.UNAVAILABLE
        if state.held:
            self._start_heart()
        else:
            self._lock.release()
        if state is LockState.SILENT:
            logger.warning(
                "The process that holds %s lives but has shown no sign of life for %.0f s. Working without it; "
                "`fuser %s` names it.", self._lock.path, timeout, self._lock.path,
            )  # fmt: skip
        return state

    def release(self) -> None:
        """Let the next one in. Does nothing where the lock is not held."""
        if self._heart is not None:
            self._stop.set()
            # In a forked child the thread does not exist; only the parent has one to wait for.
            if self._lock.held:
                self._heart.join()
            self._heart = None
        self._lock.release()

    def _wait(self, timeout: float, done: Callable[[], bool]) -> LockState:
        if self._lock.try_acquire():
            return LockState.HELD
        pause, waited, next_report = _FIRST_POLL_SECONDS, 0.0, _FIRST_REPORT_SECONDS
        seen = self._lock.count()
        silence = timeout if _silent.get(self._lock.path) == seen else 0.0
        while silence < timeout:
            before = time.monotonic()
            time.sleep(pause)
            if self._lock.try_acquire():
                return LockState.HELD
            if done():
                return LockState.DONE
            # A pause that took far longer than asked for is this process's own (it was stopped, the machine slept),
            # and the holder may have been stopped along with it.
            elapsed = min(time.monotonic() - before, pause + HEARTBEAT_SECONDS)
            count = self._lock.count()
            silence = 0.0 if count != seen else silence + elapsed
            seen, waited, pause = count, waited + elapsed, min(2 * pause, _LAST_POLL_SECONDS)
            if waited >= next_report:
                logger.info("Waited %.0f s for another process that works on %s", waited, self._lock.path.stem)
                next_report = waited + _REPORT_SECONDS
        _silent[self._lock.path] = seen
        return LockState.SILENT

    def _start_heart(self) -> None:
        self._stop.clear()
        self._lock.beat()
        self._heart = threading.Thread(target=self._run_heart, name="cache-lock-heartbeat", daemon=True)
        self._heart.start()

    def _run_heart(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            with suppress(OSError):  # An error of the file system now may be gone by the next beat.
                self._lock.beat()
