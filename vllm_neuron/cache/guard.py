"""What stands between this process and a store that is slow, sick or gone: seconds, and one warning."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from vllm_neuron.cache import folders
from vllm_neuron.cache.entry import Entry
from vllm_neuron.cache.metadata import Metadata
from vllm_neuron.cache.progress import Progress
from vllm_neuron.cache.retry import may_pass, retried
from vllm_neuron.cache.stored import Stored
from vllm_neuron.errors import CacheError

if TYPE_CHECKING:
    from vllm_neuron.cache.remote import RemoteTier

logger = logging.getLogger("vllm.neuron.cache")

SILENCE_SECONDS = 30.0
REST_SECONDS = 60.0
_REPORT_SECONDS = 10.0

T = TypeVar("T")


class RemoteDownError(CacheError):
    """A store that failed a moment ago is not asked again yet."""


class Guarded:
    """A remote tier as it is, but for three things.

    A call that fails for a reason that may pass is made again, a few times. One that makes no progress for
    ``silence`` seconds, as on a mount whose server is gone, is given up: its thread may hang, this one goes on. After
    either the store is left alone for ``rest`` seconds: every call raises ``RemoteDownError`` at once.
    """

    def __init__(self, remote: RemoteTier, silence: float = SILENCE_SECONDS, rest: float = REST_SECONDS) -> None:
        self._remote = remote
        self._silence = silence
        self._rest = rest
        self._down: tuple[float, str] | None = None

    @property
    def name(self) -> str:
        """The store's own."""
        return self._remote.name

    @property
    def read_only(self) -> bool:
        """As the store says."""
        return self._remote.read_only

    @property
    def trouble(self) -> str:
        """Why the store is left alone at the moment; '' where it is not."""
        return self._down[1] if self._down and time.monotonic() < self._down[0] else ""

    def exists(self) -> bool:
        """See ``RemoteTier``."""
        return self._call(self._remote.exists, Progress(), "looking for it")

    def metadata(self, key: str) -> Metadata | None:
        """See ``RemoteTier``."""
        return self._call(lambda: self._remote.metadata(key), Progress(), f"asking for {key}")

    def fetch(self, key: str, into: Path, progress: Progress | None = None) -> bool:
        """See ``RemoteTier``."""
        moved = progress or Progress()

        def again() -> bool:
            for path in into.iterdir():
                folders.remove(path)
            return self._remote.fetch(key, into, moved)

        return self._call(again, moved, f"fetching {key}")

    def publish(self, entry: Entry, progress: Progress | None = None) -> bool:
        """See ``RemoteTier``."""
        moved = progress or Progress()
        return self._call(lambda: self._remote.publish(entry, moved), moved, f"publishing {entry.key}")

    def keys(self) -> list[str]:
        """See ``RemoteTier``."""
        return self._call(self._remote.keys, Progress(), "listing")

    def read_manifest(self, key: str) -> bytes | None:
        """See ``RemoteTier``."""
        return self._call(lambda: self._remote.read_manifest(key), Progress(), f"asking for the manifest {key}")

    def write_manifest(self, key: str, data: bytes) -> None:
        """See ``RemoteTier``."""
        self._call(lambda: self._remote.write_manifest(key, data), Progress(), f"publishing the manifest {key}")

    def manifest_keys(self) -> list[str]:
        """See ``RemoteTier``."""
        return self._call(self._remote.manifest_keys, Progress(), "listing manifests")

    def stored(self, progress: Progress | None = None) -> dict[str, Stored]:
        """See ``RemoteTier``."""
        moved = progress or Progress()
        return self._call(lambda: self._remote.stored(moved), moved, "listing")

    def remove(self, key: str, seen: Stored) -> bool:
        """See ``RemoteTier``."""
        return self._call(lambda: self._remote.remove(key, seen), Progress(), f"removing {key}")

    def trim(self) -> int:
        """See ``RemoteTier``."""
        return self._call(self._remote.trim, Progress(), "trimming")

    def _call(self, call: Callable[[], T], progress: Progress, what: str) -> T:
        if self.trouble:
            raise RemoteDownError(f"it is left alone for a while, because {self.trouble}")
        try:
            return self._watched(lambda: retried(call, f"{self.name}: {what}"), progress, what)
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
                logger.info("%s: %s, %.1f MiB so far", self.name, what, moved / 2**20)
                report = now + _REPORT_SECONDS
