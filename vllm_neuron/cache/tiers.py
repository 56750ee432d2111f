"""The cache as everything above it sees it: one lookup over the local tier and the remote ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_neuron import envs
from vllm_neuron.cache import failpoint, trust
from vllm_neuron.cache.disk.progress import Progress
from vllm_neuron.cache.disk.threads import in_threads
from vllm_neuron.cache.entry import Entry
from vllm_neuron.cache.explain import Neighbour, nearest
from vllm_neuron.cache.failpoint import Failpoint
from vllm_neuron.cache.local.key_lock import LockState
from vllm_neuron.cache.local.tier import LocalTier, PrivateTier
from vllm_neuron.cache.metadata import Metadata
from vllm_neuron.cache.remote.circuit_breaker import RemoteDownError
from vllm_neuron.cache.remote.tier import RemoteTier
from vllm_neuron.cache.remote.urls import open_remotes
from vllm_neuron.cache.source import Source
from vllm_neuron.cache.store.base import STREAMS
from vllm_neuron.errors import CacheError, ConfigError

logger = logging.getLogger("vllm.neuron.cache")


@dataclass(frozen=True)
class Found:
    """An entry that is now in the local tier. ``tier`` is where this lookup had it from; ``source`` names the store."""

    entry: Entry
    tier: Source
    source: str


@dataclass
class TierCounters:
    """What one tier did for this process. A miss is counted once per key, however often it is looked up.

    ``bytes`` were fetched from the tier; ``seconds`` were spent on lookups in it.
    """

    hits: int = 0
    misses: int = 0
    fetches: int = 0
    bytes: int = 0
    failures: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, float]:
        """Plain numbers by name."""
        return asdict(self)

    def __str__(self) -> str:
        fetched = f", {self.bytes / 2**20:.1f} MiB fetched" if self.fetches else ""
        failures = f", {self.failures} failures" if self.failures else ""
        return f"{self.hits} hits, {self.misses} misses{fetched}{failures}, {self.seconds:.2f} s"


class TieredCache:
    """A local tier before any number of remote ones, asked in order; the first that has an entry serves it."""

    def __init__(
        self,
        local: LocalTier,
        remotes: Sequence[RemoteTier] = (),
        on_bytes: Callable[[int], object] = lambda amount: None,
    ) -> None:
        """``on_bytes`` is called with amounts of bytes as they are fetched, on any thread."""
        self.local = local
        self._on_bytes = on_bytes
        self.remotes = list(remotes)
        self._missed: set[tuple[str, str]] = set()
        self.failures: dict[str, str] = {}
        """By key: why the remote tier that was asked last for it could not give it, where that was a failure."""
        self.counters = {name: TierCounters() for name in (local.name, *(remote.name for remote in self.remotes))}

    @classmethod
    def from_environment(cls, on_bytes: Callable[[int], object] = lambda amount: None) -> TieredCache:
        """The cache that the variables describe. With the cache disabled: a store of this process alone, no remotes.

        ``on_bytes`` is as for the class. Raises ``ConfigError`` where a tier can't be what a variable says.
        """
        if envs.DISABLE_COMPILE_CACHE.get():
            return cls(PrivateTier())
        trust.check_variables()
        local = LocalTier(Path(envs.get_neuron_compile_cache_dir()))
        return cls(local, open_remotes(envs.REMOTE_CACHE.get()), on_bytes)

    def lookup(self, *keys: str) -> Found | None:
        """The entry of the first of ``keys`` that there is, verified, from the first tier that has it; else None.

        From a remote tier it is fetched into the local one, by one process per host; others wait for that one.
        A remote tier that fails is passed over with a warning. All keys together are one look-up: a tier that was
        asked for them, and did not serve any, has missed once, however often they are looked up.
        """
        found = next(filter(None, map(self._find, keys)), None)
        names = list(self.counters)
        for name in names if found is None else names[: names.index(found.source)]:
            asked = {(name, key) for key in keys}
            if not asked & self._missed:
                self.counters[name].misses += 1
            self._missed |= asked
        return found

    def where(self, key: str) -> list[str]:
        """Names of the tiers that have a finished entry of ``key``. Fetches nothing, waits for nobody."""
        names = [self.local.name] if self.local.lookup(key) is not None else []
        return names + [remote.name for remote in self.remotes if _metadata(remote, key) is not None]

    @staticmethod
    def keys_of(remote: RemoteTier) -> list[str]:
        """Keys of a remote tier's entries; none, and a warning, where it can't be listed."""
        try:
            return remote.keys()
        except (OSError, CacheError) as error:
            logger.warning("The entries of the remote cache %s can't be listed: %s", remote.name, error)
            return []

    def metadata_of(self, remote: RemoteTier) -> dict[str, Metadata | None]:
        """What a remote tier's entries say of themselves, by key; None, and a warning, for what can't be read."""
        keys = self.keys_of(remote)
        return dict(zip(keys, in_threads(lambda key: _metadata(remote, key), keys, STREAMS), strict=True))

    def check_publishable(self) -> None:
        """Raises ``ConfigError`` where there are remote tiers, and none takes any entry."""
        if self._all_read_only:
            raise ConfigError(
                f"nothing can be published: {self._all_read_only}. Name one that can be written "
                "to; to see whether everything is there, run vllm-neuron plan with --check"
            )

    def publish_remote(self, entry: Entry) -> bool:
        """Store an entry in every remote tier that takes any. True if ours landed in one; False if all had it.

        Does nothing without a remote tier. Raises ``CacheError`` where it can't.
        """
        if self._all_read_only:
            raise CacheError(f"entry {entry.key} can't be published: {self._all_read_only}")
        landed = [self._to_remote(remote, entry) for remote in self.remotes if not remote.read_only]
        return any(landed)

    def lock(self, key: str) -> AbstractContextManager[LockState]:
        """Be the only one on this host that works on ``key``. See ``LocalTier.lock``."""
        return self.local.lock(key)

    def describe(self) -> list[str]:
        """One line per tier, in the order in which they are asked."""
        kind = self.local.name if self.local.writable else f"{self.local.name}, read-only"
        lines = [f"{self.local.root} ({kind})"]
        return lines + [f"{remote.name} ({', '.join(_facts(remote))})" for remote in self.remotes]

    def nearest(self, parts: Mapping[str, str], provenance: Mapping[str, object], limit: int = 3) -> list[Neighbour]:
        """The entries of all tiers that differ least from what is looked for, and in what, best first."""
        local = [self.local.lookup(key) for key in self.local.keys()]
        candidates = [(self.local.name, entry.metadata) for entry in local if entry is not None]
        for remote in self.remotes:
            found = self.metadata_of(remote).values()
            candidates.extend((remote.name, metadata) for metadata in found if metadata is not None)
        return nearest(parts, provenance, candidates, limit)

    @property
    def _all_read_only(self) -> str:
        """What is wrong where there are remote tiers, and none takes any entry; else ''."""
        if not self.remotes or not all(remote.read_only for remote in self.remotes):
            return ""
        return f"every remote cache is read-only ({', '.join(remote.name for remote in self.remotes)})"

    def _find(self, key: str) -> Found | None:
        entry = self._from_local(key)
        if entry is not None:
            return Found(entry, Source.LOCAL, self.local.name)
        if not self.remotes:
            return None
        with self.lock(key):
            if (entry := self.local.lookup(key)) is not None:
                return Found(entry, Source.LOCAL, self.local.name)
            for remote in self.remotes:
                if (entry := self._from_remote(remote, key)) is not None:
                    return Found(entry, Source.REMOTE, remote.name)
        return None

    def _from_local(self, key: str) -> Entry | None:
        counters = self.counters[self.local.name]
        start = time.perf_counter()
        entry = self.local.lookup(key)
        counters.seconds += time.perf_counter() - start
        if entry is not None:
            counters.hits += 1
        return entry

    def _from_remote(self, remote: RemoteTier, key: str) -> Entry | None:
        counters = self.counters[remote.name]
        start = time.perf_counter()
        try:
            metadata = remote.metadata(key)
            if metadata is None:
                return None
            failpoint.reached(Failpoint.FOUND)
            entry = self.local.build(
                key, lambda folder: _fetch(remote, key, folder, Progress(self._on_bytes)), sync=False
            )
        except (OSError, CacheError) as error:
            counters.failures += 1
            self.failures[key] = f"{remote.name}: {error}"
            # One warning for a store that is down, not one for every key.
            level = logging.DEBUG if isinstance(error, RemoteDownError) else logging.WARNING
            logger.log(level, "Key %s can't be had from the remote cache %s: %s", key, remote.name, error)
            return None
        finally:
            counters.seconds += time.perf_counter() - start
        self.failures.pop(key, None)
        counters.hits += 1
        counters.fetches += 1
        counters.bytes += metadata.size
        return entry

    def _to_remote(self, remote: RemoteTier, entry: Entry) -> bool:
        try:
            return remote.publish(entry)
        except (OSError, CacheError) as error:
            self.counters[remote.name].failures += 1
            raise CacheError(f"entry {entry.key} can't be published to {remote.name}: {error}") from error


def _fetch(remote: RemoteTier, key: str, into: Path, progress: Progress) -> None:
    if not remote.fetch(key, into, progress):
        raise CacheError("the entry went away while it was to be fetched")
    failpoint.reached(Failpoint.FETCHED)
    trust.check_folder(into, key)


def _facts(remote: RemoteTier) -> list[str]:
    try:
        absent = not remote.exists()
    except (OSError, CacheError):
        absent = False  # What is wrong with it is told below.
    facts = {
        "no such folder": absent,
        "read-only": remote.read_only,
        f"not asked: {remote.trouble}": bool(remote.trouble),
    }
    return ["remote", *(fact for fact, holds in facts.items() if holds)]


def _metadata(remote: RemoteTier, key: str) -> Metadata | None:
    try:
        return remote.metadata(key)
    except (OSError, CacheError) as error:
        logger.warning("The remote cache %s can't be asked for key %s: %s", remote.name, key, error)
        return None
