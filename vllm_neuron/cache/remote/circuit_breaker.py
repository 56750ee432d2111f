"""What stands between this process and a store that is slow, sick or gone: seconds, and one warning."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from vllm_neuron.cache.disk.progress import Progress
from vllm_neuron.cache.store.retry import may_pass, retried
from vllm_neuron.errors import CacheError

logger = logging.getLogger("vllm.neuron.cache")

SILENCE_SECONDS = 30.0
REST_SECONDS = 60.0
_REPORT_SECONDS = 10.0

T = TypeVar("T")


class RemoteDownError(CacheError):
    """A store that failed a moment ago is not asked again yet."""

    code = "remote-down"


class CircuitBreaker:
    """Lets calls to the store ``name`` through, but for three things.

    A call that fails for a reason that may pass is made again, a few times. One that makes no progress for
    ``silence`` seconds, as on a mount whose server is gone, is given up: its thread may hang, this one goes on. After
    either the store is left alone for ``rest`` seconds: every call raises ``RemoteDownError`` at once.
    """

    def __init__(self, name: str, silence: float = SILENCE_SECONDS, rest: float = REST_SECONDS) -> None:
        self._name = name
        self._silence = silence
        self._rest = rest
        self._down: tuple[float, str] | None = None

    @property
    def trouble(self) -> str:
        """Why the store is left alone at the moment; '' where it is not."""
        return self._down[1] if self._down and time.monotonic() < self._down[0] else ""

    def call(self, call: Callable[[], T], progress: Progress, what: str) -> T:
        """What ``call`` returns; ``progress`` shows that it moves, ``what`` names it in messages.

        Raises what it raises, ``RemoteDownError``, and ``TimeoutError`` where it is given up.
        """
        if self.trouble:
            raise RemoteDownError(f"it is left alone for a while, because {self.trouble}")
        try:
            return self._watched(lambda: retried(call, f"{self._name}: {what}"), progress, what)
        except OSError as error:
            if may_pass(error):
                self._down = (time.monotonic() + self._rest, f"{what} failed: {error}")
            raise

    def _watched(self, call: Callable[[], T], progress: Progress, what: str) -> T:
        outcome: list[T] = []
        failure: list[BaseException] = []

        def work() -> None:
            try:
                outcome.append(call())
            except BaseException as error:
                failure.append(error)

        # A daemon, so that a thread that hangs in the kernel does not keep the process from ending.
        thread = threading.Thread(target=work, name="cache-remote", daemon=True)
        thread.start()
        self._wait(thread, progress, what)
        if failure:
            raise failure[0]
        return outcome[0]

    def _wait(self, thread: threading.Thread, progress: Progress, what: str) -> None:
        start = last = time.monotonic()
        moved, report = progress.bytes, start + _REPORT_SECONDS
        while True:
            thread.join(min(1.0, self._silence))
            if not thread.is_alive():
                return
            now = time.monotonic()
            if progress.bytes != moved:
                moved, last = progress.bytes, now
            if now - last > self._silence:
                progress.abandon()
                raise TimeoutError(f"nothing came for {self._silence:.0f} s")
            if moved and now >= report:
                logger.info("%s: %s, %.1f MiB so far", self._name, what, moved / 2**20)
                report = now + _REPORT_SECONDS
