"""A remote tier: a store that many hosts share. Correctness comes from atomic publishing alone; there are no locks.

Everything that a tier does is here, once, over the few verbs of a store: see ``store/base.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from vllm_neuron.cache import failpoint, transfer, trust
from vllm_neuron.cache.disk import files, folders
from vllm_neuron.cache.disk.progress import Progress
from vllm_neuron.cache.disk.threads import in_threads
from vllm_neuron.cache.entry import Entry, EntryState, Examined
from vllm_neuron.cache.failpoint import Failpoint
from vllm_neuron.cache.key import checked_key, is_key
from vllm_neuron.cache.metadata import MAX_SIGNATURE_BYTES, METADATA_FILE, Metadata, marker_of
from vllm_neuron.cache.remote.circuit_breaker import REST_SECONDS, SILENCE_SECONDS, CircuitBreaker
from vllm_neuron.cache.store.base import Head, Store, Stored
from vllm_neuron.cache.store.layout import MANIFESTS, MAX_MANIFEST_BYTES, manifest_key, manifest_path
from vllm_neuron.errors import DamagedEntryError

logger = logging.getLogger("vllm.neuron.cache")

T = TypeVar("T")


class RemoteTier:
    """The entries and manifests of ``store``, which is asked through a circuit breaker.

    Every method raises ``OSError`` or ``CacheError`` where the store fails, and none hangs: one that makes no progress
    for ``silence`` seconds is given up, and the store is then left alone for ``rest`` seconds.
    """

    def __init__(self, store: Store, silence: float = SILENCE_SECONDS, rest: float = REST_SECONDS) -> None:
        self._store = store
        self._breaker = CircuitBreaker(store.name, silence, rest)
        self.name = store.name
        """What messages call it: a path or a URL, without credentials."""
        self.read_only = store.read_only
        """Whether nothing is ever published here."""

    @property
    def trouble(self) -> str:
        """Why the store is left alone at the moment; '' where it is not."""
        return self._breaker.trouble

    def exists(self) -> bool:
        """False for a folder that is not there: it is made with the first entry. A store that is asked is there."""
        return self._call("looking for it", self._store.exists)

    def metadata(self, key: str) -> Metadata | None:
        """What the entry of ``key`` says of itself, or None where there is no finished one. No file is verified."""
        checked_key(key)
        return self._call(f"asking for {key}", lambda: _metadata(self._head(key)))

    def fetch(self, key: str, into: Path, progress: Progress | None = None) -> bool:
        """Copy the finished entry of ``key`` into the empty folder ``into``; False where there is none.

        Files are hashed on their way; who publishes the copy verifies the rest.
        """
        moved = progress or Progress()

        def fetch() -> bool:
            for path in into.iterdir():  # What an earlier attempt left.
                folders.remove(path)
            head = self._head(checked_key(key))
            if head is None or head.found.metadata is None:
                return False
            self._copy(key, head, head.found.metadata, into, moved)
            marker, signature = marker_of(head.data), self._signature(head)
            transfer.finish_copy(into, head.found.metadata, head.data, marker, signature, sync=False)
            return True

        return self._call(f"fetching {key}", fetch, moved)

    def verify(self, key: str) -> Examined:
        """The state of the entry of ``key``, of which every file is read. Writes nothing here.

        Raises ``UntrustedEntryError`` where it is whole, and nobody who is trusted has signed it.
        """
        moved = Progress()

        def verify() -> Examined:
            head = self._store.head(checked_key(key))
            if head is None:
                return Examined(EntryState.ABSENT, reason="there is no such entry")
            if head.found.metadata is not None:
                try:
                    self._copy(key, head, head.found.metadata, None, moved)
                except DamagedEntryError as problem:
                    return Examined(EntryState.DAMAGED, reason=str(problem))
                trust.check(key, head.data, self._signature(head))
            return head.found

        return self._call(f"verifying {key}", verify, moved)

    def publish(self, entry: Entry) -> bool:
        """Store a verified entry. True: ours landed. False: a whole one was there. One that is not is replaced.

        It is signed, and one that is not trusted here is replaced too, where the variables of ``trust`` say so.
        """
        moved = Progress()

        def is_acceptable(head: Head) -> bool:
            metadata = head.found.metadata
            if metadata is None or not trust.suffices(entry.key, head.data, self._signature(head)):
                return False
            try:
                self._copy(entry.key, head, metadata, None, moved)
            except DamagedEntryError:
                return False
            return True

        return self._call(f"publishing {entry.key}", lambda: self._store.publish(entry, is_acceptable, moved), moved)

    def keys(self) -> list[str]:
        """Keys of the entries that claim to be complete, sorted."""
        return self._call("listing", lambda: sorted(key for key in self._store.names("") if is_key(key)))

    def read_manifest(self, key: str) -> bytes | None:
        """The stored bytes of the manifest of a trace key, at most ``MAX_MANIFEST_BYTES``, unchecked; None for none.

        Raises ``NotAsExpected`` for something that is no plain file, or too large.
        """
        path = manifest_path(key)
        return self._call(f"asking for the manifest {key}", lambda: self._store.read(path, MAX_MANIFEST_BYTES))

    def write_manifest(self, key: str, data: bytes) -> None:
        """Store a manifest in place of any that is there, all of it or nothing."""
        path = manifest_path(key)
        self._call(f"publishing the manifest {key}", lambda: self._store.put(path, data))

    def manifest_keys(self) -> list[str]:
        """Trace keys of the manifests, the newest first where the store can tell."""
        names = self._call("listing manifests", lambda: self._store.names(MANIFESTS))
        return [key for name in names if (key := manifest_key(name)) is not None]

    def stored(self) -> dict[str, Stored]:
        """What there is of each finished entry, by key."""
        moved = Progress()
        return self._call("listing", lambda: self._store.stored(moved), moved)

    def remove(self, key: str, seen: Stored) -> bool:
        """Remove an entry: out of sight in one step, then its files. False where it is not the one that was seen."""
        checked_key(key)
        return self._call(f"removing {key}", lambda: self._store.remove(key, seen))

    def trim(self) -> int:
        """Remove what publishers who died left behind, where that can be told; return how many things went."""
        return self._call("trimming", self._store.trim)

    def _call(self, what: str, call: Callable[[], T], progress: Progress | None = None) -> T:
        return self._breaker.call(call, progress or Progress(), what)

    def _head(self, key: str) -> Head | None:
        """As the store says; what can't be used is told in the log."""
        head = self._store.head(key)
        if head is not None and head.found.state is not EntryState.COMPLETE:
            state, reason = head.found.state.value, head.found.reason
            logger.warning("The entry %s/%s is %s (%s), and is passed over.", self.name, key, state, reason)
        return head

    def _signature(self, head: Head) -> bytes | None:
        return self._store.read(head.signature_path, MAX_SIGNATURE_BYTES) if head.signature_path else head.signature

    def _copy(self, key: str, head: Head, metadata: Metadata, into: Path | None, progress: Progress) -> None:
        """Copy every file of an entry, None: read it. Raises ``DamagedEntryError`` where one is not as listed."""
        transfer.check_bounds(metadata, f"{self.name}/{key}")

        def one(name: str) -> None:
            record, to = metadata.files[name], None if into is None else into / name
            try:
                if self._store.copy(f"{head.place}/{name}", record.size, to, progress) != record.digest:
                    raise files.NotAsExpected(f"the digest of {name} is not the one in {METADATA_FILE}")
            except files.NotAsExpected as problem:
                raise DamagedEntryError(f"the cache entry {self.name}/{key} is damaged: {problem}") from problem
            if into is not None:
                failpoint.reached(Failpoint.FETCHED_FILE)

        in_threads(one, list(metadata.files), self._store.streams)


def _metadata(head: Head | None) -> Metadata | None:
    return None if head is None else head.found.metadata
