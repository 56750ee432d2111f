"""Single flight per key: a kernel lock, and a sign of life that is a counter."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path

from vllm_neuron.cache.disk.lock import KernelLock
from vllm_neuron.cache.disk.recent import Recent

logger = logging.getLogger("vllm.neuron.cache")

HEARTBEAT_SECONDS = 0.5
LEAST_TIMEOUT_SECONDS = 4 * HEARTBEAT_SECONDS

_FIRST_POLL_SECONDS = 0.01
_LAST_POLL_SECONDS = 0.1
_FIRST_REPORT_SECONDS = 10.0
_REPORT_SECONDS = 60.0

# Where a holder was last found silent: as long as it has not counted since, there is no point in waiting again.
_silent: Recent[Path, int] = Recent(1000)


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
                "`fuser %s` names it.",
                self._lock.path,
                timeout,
                self._lock.path,
            )
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
