"""A remote tier in an object store. A conditional put decides who publishes.

::

    <key>/<upload>/<file>       the files of one upload; every publisher makes up a name for its own
    <key>/complete.json         which upload is the entry, with the text of its metadata.json; written last

Objects can't be renamed, but one can be put only where none is: an entry is there from that put on, whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_neuron import digests
from vllm_neuron.cache import files, steps, transfer, trust
from vllm_neuron.cache.entry import Entry, marker_of, parse_metadata
from vllm_neuron.cache.key import checked_key, is_key
from vllm_neuron.cache.manifest import MAX_MANIFEST_BYTES
from vllm_neuron.cache.manifest_folder import manifest_key, manifest_path
from vllm_neuron.cache.metadata import MAX_METADATA_BYTES, METADATA_FILE, Metadata
from vllm_neuron.cache.object_store import ConflictError, ObjectStore
from vllm_neuron.cache.progress import Progress
from vllm_neuron.cache.retry import retried
from vllm_neuron.cache.steps import Step
from vllm_neuron.cache.stored import Stored
from vllm_neuron.errors import CacheError, DamagedEntryError

logger = logging.getLogger("vllm.neuron.cache")

MARKER = "complete.json"
_MAX_MARKER_BYTES = 2 * MAX_METADATA_BYTES
_STREAMS = 8
_ATTEMPTS = 8
_ABANDONED_SECONDS = 24 * 3600


@dataclass(frozen=True)
class Marker:
    """What is in the place of a marker: ``version`` is the store's name for it; the rest is '' where it is damaged."""

    version: str
    upload: str = ""
    data: bytes = b""
    signature: bytes | None = None
    metadata: Metadata | None = None


class ObjectRemote:
    """Entries below a URL such as ``s3://bucket/prefix``. Raises as ``ObjectStore`` does."""

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        self._store = ObjectStore(url)
        self._read_only = read_only

    @property
    def name(self) -> str:
        """Its URL, without credentials."""
        return self._store.name

    @property
    def read_only(self) -> bool:
        """As it was told."""
        return self._read_only

    def exists(self) -> bool:
        """See ``RemoteTier``."""
        return True

    def metadata(self, key: str) -> Metadata | None:
        """See ``RemoteTier``."""
        marker = self._marker(checked_key(key))
        return marker.metadata if marker else None

    def fetch(self, key: str, into: Path, progress: Progress | None = None) -> bool:
        """See ``RemoteTier``. Pieces come on several connections at once."""
        marker = self._marker(checked_key(key))
        if marker is None or marker.metadata is None:
            return False
        transfer.check_bounds(marker.metadata, f"{self.name}/{key}")
        for name in marker.metadata.files:
            with files.NewFile(into / name) as target:
                self._read(key, marker, name, target.put, progress or Progress())
            steps.reached(Step.FETCHED_FILE)
        data = marker.data
        transfer.finish_copy(into, marker.metadata, data, marker_of(data), marker.signature, sync=False)
        return True

    def publish(self, entry: Entry, progress: Progress | None = None) -> bool:
        """See ``RemoteTier``."""
        if self.read_only:
            raise CacheError(f"the remote cache {self.name} is read-only")
        progress = progress or Progress()
        seen = self._marker(entry.key)
        if seen is not None and self._may_stay(entry.key, seen, progress):
            return False
        upload = secrets.token_hex(8)
        steps.reached(Step.UPLOADING)
        landed = False
        try:
            data, signature = self._upload(entry, upload, progress)
            steps.reached(Step.UPLOADED)
            landed = self._mark(entry.key, upload, data, signature, progress)
            steps.reached(Step.MARKED)
        finally:
            if not landed:
                self.discard(f"{entry.key}/{upload}")
        return landed

    def keys(self) -> list[str]:
        """See ``RemoteTier``."""
        found = (path.split("/") for path in self._store.find())
        return sorted(parts[0] for parts in found if len(parts) == 2 and parts[1] == MARKER and is_key(parts[0]))

    def read_manifest(self, key: str) -> bytes | None:
        """See ``RemoteTier``."""
        try:
            data = self._store.read(manifest_path(key), 0, MAX_MANIFEST_BYTES + 1)
        except FileNotFoundError:
            return None
        if len(data) > MAX_MANIFEST_BYTES:
            raise CacheError(f"the manifest {key} in {self.name} is larger than {MAX_MANIFEST_BYTES} bytes")
        return data

    def write_manifest(self, key: str, data: bytes) -> None:
        """See ``RemoteTier``."""
        if self.read_only:
            raise CacheError(f"the remote cache {self.name} is read-only")
        self._store.put(manifest_path(key), data)

    def manifest_keys(self) -> list[str]:
        """See ``RemoteTier``."""
        found = sorted(self._store.find().items(), key=lambda item: item[1].when, reverse=True)
        return [key for path, _ in found if (key := manifest_key(path)) is not None]

    def abandoned(self) -> dict[str, float]:
        """Uploads that no marker names, as ``key/upload``, with the time of their last object in Unix seconds."""
        uploads: dict[str, float] = {}
        for path, one in self._store.find().items():
            parts = path.split("/")
            if len(parts) == 3 and is_key(parts[0]):
                name = f"{parts[0]}/{parts[1]}"
                uploads[name] = max(uploads.get(name, 0.0), one.when)
        markers = {key: self._marker(key) for key in {name.split("/")[0] for name in uploads}}
        named = {f"{key}/{marker.upload}" for key, marker in markers.items() if marker is not None}
        return {name: when for name, when in uploads.items() if name not in named}

    def discard(self, name: str) -> None:
        """Remove an upload, named as by ``abandoned``."""
        key, _, upload = name.partition("/")
        self._store.remove(f"{checked_key(key)}/{upload}")

    def stored(self, progress: Progress | None = None) -> dict[str, Stored]:
        """See ``RemoteTier``. Bytes are those of all uploads of a key."""
        sizes: dict[str, int] = {}
        markers: dict[str, Stored] = {}
        for path, one in self._store.find().items():
            key, _, rest = path.partition("/")
            sizes[key] = sizes.get(key, 0) + one.bytes
            if rest == MARKER and is_key(key):
                markers[key] = one
        return {key: replace(one, bytes=sizes[key]) for key, one in sorted(markers.items())}

    def remove(self, key: str, seen: Stored) -> bool:
        """See ``RemoteTier``. A publisher who replaces the marker between the last look and its removal loses it."""
        if self.read_only:
            raise CacheError(f"the remote cache {self.name} is read-only")
        marker = self._marker(checked_key(key))
        if marker is None or marker.version != seen.version:
            return False
        self._store.remove(f"{key}/{MARKER}")
        steps.reached(Step.HIDDEN)
        if marker.upload:
            self.discard(f"{key}/{marker.upload}")
        steps.reached(Step.REMOTE_REMOVED)
        return True

    def trim(self) -> int:
        """See ``RemoteTier``. An upload that no marker names is a dead publisher's once it is a day old."""
        old = [name for name, when in self.abandoned().items() if time.time() - when > _ABANDONED_SECONDS]
        for name in old:
            self.discard(name)
        return len(old)

    def _marker(self, key: str) -> Marker | None:
        path = f"{key}/{MARKER}"
        try:
            version = self._store.version(path)
            text = self._store.read(path, 0, _MAX_MARKER_BYTES + 1)
        except FileNotFoundError:
            return None
        try:
            return _parse(text, key, version)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, files.NotAsExpected) as problem:
            logger.warning("The entry %s/%s is damaged (%s: %s), and is passed over.", self.name, key, MARKER, problem)
            return Marker(version)

    def _may_stay(self, key: str, marker: Marker, progress: Progress) -> bool:
        """Whether an entry is whole to the last byte, and one that would be accepted here."""
        if marker.metadata is None or not trust.suffices(key, marker.data, marker.signature):
            return False
        try:
            for name in marker.metadata.files:
                self._read(key, marker, name, lambda _, data: hashlib.sha256(data).digest(), progress)
        except DamagedEntryError:
            return False
        return True

    def _read(
        self, key: str, marker: Marker, name: str, use: Callable[[int, bytes], bytes], progress: Progress
    ) -> None:
        """Hand every piece of a file to ``use``, which returns its SHA-256; raise where they don't give the digest."""
        assert marker.metadata is not None, "a marker that has been read"
        record, path = marker.metadata.files[name], f"{key}/{marker.upload}/{name}"

        def one(span: tuple[int, int]) -> bytes:
            start, stop = span
            # One byte more than is listed, so that a longer object is seen.
            asked = stop + (stop == record.size)
            try:
                data = retried(lambda: self._store.read(path, start, asked), path)
            except FileNotFoundError as error:
                raise DamagedEntryError(f"the cache entry {self.name}/{key} is damaged: {name} is missing") from error
            progress.add(len(data))
            if len(data) != stop - start:
                raise DamagedEntryError(
                    f"the cache entry {self.name}/{key} is damaged: {name} is not of {record.size} bytes"
                )
            return use(start, data)

        with ThreadPoolExecutor(_STREAMS, thread_name_prefix="cache-fetch") as pool:
            try:
                found = digests.of_pieces(list(pool.map(one, digests.pieces(record.size))))
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
        if found != record.digest:
            raise DamagedEntryError(f"the cache entry {self.name}/{key} is damaged: the digest of {name} differs")

    def _upload(self, entry: Entry, upload: str, progress: Progress) -> tuple[bytes, bytes | None]:
        with files.folder(entry.path) as folder:
            data = files.read_small(METADATA_FILE, MAX_METADATA_BYTES, folder)
            signature = transfer.signature_to_publish(entry.key, data, folder)
            for name, record in entry.metadata.files.items():
                files.check_size(name, record.size, folder)
                self._store.upload(entry.path / name, f"{entry.key}/{upload}/{name}")
                progress.add(record.size)
                steps.reached(Step.UPLOADED_FILE)
        return data, signature

    def _mark(self, key: str, upload: str, data: bytes, signature: bytes | None, progress: Progress) -> bool:
        text = json.dumps(
            {"upload": upload, "metadata": data.decode(), "signature": signature.decode() if signature else None}
        ).encode()
        path, seen = f"{key}/{MARKER}", self._marker(key)
        for _ in range(_ATTEMPTS):
            if seen is not None and seen.upload == upload:
                return True  # Put, though the answer was lost on its way.
            if seen is not None and self._may_stay(key, seen, progress):
                return False
            try:
                if seen is None:
                    self._store.create(path, text)
                else:
                    self._store.replace(path, text, seen.version)
                return True
            except ConflictError:
                seen = self._marker(key)
            except OSError:
                before, seen = seen, self._marker(key)
                if seen == before:
                    raise
        raise CacheError(f"{self.name}/{path} can't be published: something that is not whole comes back each time")


def _parse(text: bytes, key: str, version: str) -> Marker:
    if len(text) > _MAX_MARKER_BYTES:
        raise ValueError(f"it has more than {_MAX_MARKER_BYTES} bytes")
    document = json.loads(text)
    upload, data, signature = document["upload"], document["metadata"].encode(), document["signature"]
    if not is_key(2 * upload):
        raise ValueError("it names no upload")
    return Marker(version, upload, data, signature.encode() if signature else None, parse_metadata(data, key))
