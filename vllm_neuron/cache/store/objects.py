"""Entries in an object store. A conditional put decides who publishes.

::

    <key>/<upload>/<file>       the files of one upload; every publisher makes up a name for its own
    <key>/complete.json         which upload is the entry, with the text of its metadata.json; written last
    .manifests/                 see ``manifests``

Objects can't be renamed, but one can be put only where none is: an entry is there from that put on, whole.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from vllm_neuron import digests
from vllm_neuron.cache import failpoint, transfer
from vllm_neuron.cache.disk import files
from vllm_neuron.cache.disk.progress import Progress
from vllm_neuron.cache.disk.threads import in_threads
from vllm_neuron.cache.entry import Entry, EntryState, Examined
from vllm_neuron.cache.failpoint import Failpoint
from vllm_neuron.cache.key import is_key
from vllm_neuron.cache.metadata import MAX_METADATA_BYTES, METADATA_FILE, ForeignFormat, parse_metadata
from vllm_neuron.cache.store.base import STREAMS, Head, IsAcceptable, Stored
from vllm_neuron.cache.store.object_client import ConflictError, ObjectClient
from vllm_neuron.cache.store.retry import retried
from vllm_neuron.errors import CacheError

MARKER = "complete.json"
_MAX_MARKER_BYTES = 2 * MAX_METADATA_BYTES
_ATTEMPTS = 8
_ABANDONED_SECONDS = 24 * 3600


class ObjectStore:
    """Entries below a URL such as ``s3://bucket/prefix``. Raises as ``ObjectClient`` does."""

    read_only = False
    streams = 1  # The pieces of one file come at the same time.

    def __init__(self, url: str) -> None:
        self._client = ObjectClient(url)
        self.name = self._client.name

    def exists(self) -> bool:
        """See ``Reader``."""
        return True

    def head(self, key: str) -> Head | None:
        """See ``Reader``."""
        path = f"{key}/{MARKER}"
        try:
            version = self._client.version(path)
            text = self._client.read(path, 0, _MAX_MARKER_BYTES + 1)
        except FileNotFoundError:
            return None
        try:
            return _parse(text, key, version)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, files.NotAsExpected) as problem:
            state = EntryState.FOREIGN if isinstance(problem, ForeignFormat) else EntryState.DAMAGED
            return Head(Examined(state, reason=f"{MARKER}: {problem}"), version=version)

    def read(self, path: str, limit: int) -> bytes | None:
        """See ``Reader``."""
        try:
            data = self._client.read(path, 0, limit + 1)
        except FileNotFoundError:
            return None
        if len(data) > limit:
            raise files.NotAsExpected(f"{path.rpartition('/')[2]} is larger than {limit} bytes")
        return data

    def copy(self, path: str, size: int, to: Path | None, progress: Progress) -> str:
        """See ``Reader``. Pieces come on several connections at once."""
        name = path.rpartition("/")[2]
        with nullcontext() if to is None else files.NewFile(to) as target:

            def one(span: tuple[int, int]) -> bytes:
                start, stop = span
                # One byte more than is listed, so that a longer object is seen.
                asked = stop + (stop == size)
                try:
                    data = retried(lambda: self._client.read(path, start, asked), path)
                except FileNotFoundError as error:
                    raise files.NotAsExpected(f"{name} is missing") from error
                progress.add(len(data))
                if len(data) != stop - start:
                    raise files.NotAsExpected(f"{name} is not of {size} bytes")
                return hashlib.sha256(data).digest() if target is None else target.put(start, data)

            return digests.of_pieces(in_threads(one, digests.pieces(size), STREAMS))

    def names(self, folder: str) -> list[str]:
        """See ``Reader``."""
        found = self._client.find()
        if not folder:
            parts = (path.split("/") for path in found)
            return sorted(part[0] for part in parts if len(part) == 2 and part[1] == MARKER and is_key(part[0]))
        newest = sorted(found, key=lambda path: found[path].when, reverse=True)
        return [name for path in newest for above, _, name in [path.rpartition("/")] if above == folder]

    def put(self, path: str, data: bytes) -> None:
        """See ``Store``."""
        self._client.put(path, data)

    def publish(self, entry: Entry, is_acceptable: IsAcceptable, progress: Progress) -> bool:
        """See ``Store``."""
        seen = self.head(entry.key)
        if seen is not None and is_acceptable(seen):
            return False
        upload = secrets.token_hex(8)
        failpoint.reached(Failpoint.UPLOADING)
        landed = False
        try:
            data, signature = self._upload(entry, upload, progress)
            failpoint.reached(Failpoint.UPLOADED)
            landed = self._mark(entry.key, upload, data, signature, is_acceptable)
            failpoint.reached(Failpoint.MARKED)
        finally:
            if not landed:
                self._client.remove(f"{entry.key}/{upload}")
        return landed

    def stored(self, progress: Progress) -> dict[str, Stored]:
        """See ``Store``. Bytes are those of all uploads of a key."""
        sizes: dict[str, int] = {}
        markers: dict[str, Stored] = {}
        for path, one in self._client.find().items():
            key, _, rest = path.partition("/")
            sizes[key] = sizes.get(key, 0) + one.bytes
            if rest == MARKER and is_key(key):
                markers[key] = one
        return {key: replace(one, bytes=sizes[key]) for key, one in sorted(markers.items())}

    def remove(self, key: str, seen: Stored) -> bool:
        """See ``Store``. A publisher who replaces the marker between the last look and its removal loses it."""
        head = self.head(key)
        if head is None or head.version != seen.version:
            return False
        self._client.remove(f"{key}/{MARKER}")
        failpoint.reached(Failpoint.HIDDEN)
        if head.place:
            self._client.remove(head.place)
        failpoint.reached(Failpoint.REMOTE_REMOVED)
        return True

    def trim(self) -> int:
        """See ``Store``. An upload that no marker names is a dead publisher's once it is a day old."""
        uploads: dict[str, float] = {}
        for path, one in self._client.find().items():
            parts = path.split("/")
            if len(parts) == 3 and is_key(parts[0]):
                place = f"{parts[0]}/{parts[1]}"
                uploads[place] = max(uploads.get(place, 0.0), one.when)
        heads = [self.head(key) for key in {place.split("/")[0] for place in uploads}]
        named = {head.place for head in heads if head is not None}
        old = [one for one, when in uploads.items() if one not in named and time.time() - when > _ABANDONED_SECONDS]
        for place in old:
            self._client.remove(place)
        return len(old)

    def _upload(self, entry: Entry, upload: str, progress: Progress) -> tuple[bytes, bytes | None]:
        with files.folder(entry.path) as folder:
            data = files.read_small(METADATA_FILE, MAX_METADATA_BYTES, folder)
            signature = transfer.signature_to_publish(entry.key, data, folder)
            for name, record in entry.metadata.files.items():
                files.check_size(name, record.size, folder)
                self._client.upload(entry.path / name, f"{entry.key}/{upload}/{name}")
                progress.add(record.size)
                failpoint.reached(Failpoint.UPLOADED_FILE)
        return data, signature

    def _mark(self, key: str, upload: str, data: bytes, signature: bytes | None, is_acceptable: IsAcceptable) -> bool:
        text = json.dumps(
            {"upload": upload, "metadata": data.decode(), "signature": signature.decode() if signature else None}
        ).encode()
        path, seen = f"{key}/{MARKER}", self.head(key)
        for _ in range(_ATTEMPTS):
            if seen is not None and seen.place == f"{key}/{upload}":
                return True  # Put, though the answer was lost on its way.
            if seen is not None and is_acceptable(seen):
                return False
            try:
                if seen is None:
                    self._client.create(path, text)
                else:
                    self._client.replace(path, text, seen.version)
                return True
            except ConflictError:
                seen = self.head(key)
            except OSError:
                before, seen = seen, self.head(key)
                if seen == before:
                    raise
        raise CacheError(f"{self.name}/{path} can't be published: something that is not whole comes back each time")


def _parse(text: bytes, key: str, version: str) -> Head:
    if len(text) > _MAX_MARKER_BYTES:
        raise ValueError(f"it has more than {_MAX_MARKER_BYTES} bytes")
    document = json.loads(text)
    upload, data, signature = document["upload"], document["metadata"].encode(), document["signature"]
    if not is_key(2 * upload):
        raise ValueError("it names no upload")
    found = Examined(EntryState.COMPLETE, parse_metadata(data, key))
    return Head(found, f"{key}/{upload}", data, signature.encode() if signature else None, version=version)
