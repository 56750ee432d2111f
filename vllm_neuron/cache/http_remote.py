"""A remote tier behind a web server: a remote folder as it is, read-only, with a published index for listing."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from vllm_neuron import digests
from vllm_neuron.cache import files, steps, transfer
from vllm_neuron.cache.entry import Entry, marker_of, parse_metadata
from vllm_neuron.cache.key import checked_key, is_key
from vllm_neuron.cache.manifest import MAX_MANIFEST_BYTES
from vllm_neuron.cache.manifest_folder import manifest_path
from vllm_neuron.cache.metadata import (
    COMPLETE_MARKER,
    MAX_MARKER_BYTES,
    MAX_METADATA_BYTES,
    MAX_SIGNATURE_BYTES,
    METADATA_FILE,
    SIGNATURE_FILE,
    FileRecord,
    Metadata,
)
from vllm_neuron.cache.progress import Progress
from vllm_neuron.cache.retry import retried
from vllm_neuron.cache.steps import Step
from vllm_neuron.cache.stored import Stored
from vllm_neuron.errors import CacheError, DamagedEntryError

logger = logging.getLogger("vllm.neuron.cache")

INDEX = "index.json"
_MAX_INDEX_BYTES = 64 << 20
_STREAMS = 8
_CONNECT_SECONDS, _READ_SECONDS = 5, 20
_THERE = 200
_ABSENT = (404, 410)
_REFUSED = (401, 403)


class HttpRemote:
    """Entries below an ``http://`` or ``https://`` URL: ``<url>/<key>/<file>``. Nothing can be published to it.

    User and password in the URL are sent as basic authentication, to that server only.
    """

    read_only = True

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        user, _, host = parts.netloc.rpartition("@")
        self._auth = unquote(user) or None
        self._pools: dict[int, Any] = {}
        self.name = urlunsplit((parts.scheme.lower(), host, parts.path.rstrip("/"), "", ""))

    def exists(self) -> bool:
        """See ``RemoteTier``."""
        return True

    def metadata(self, key: str) -> Metadata | None:
        """See ``RemoteTier``."""
        found = self._described(checked_key(key))
        return found[0] if found else None

    def fetch(self, key: str, into: Path, progress: Progress | None = None) -> bool:
        """See ``RemoteTier``. Files come on several connections at once."""
        found = self._described(checked_key(key))
        if found is None:
            return False
        metadata, data = found
        transfer.check_bounds(metadata, f"{self.name}/{key}")
        moved = progress or Progress()
        with ThreadPoolExecutor(_STREAMS, thread_name_prefix="cache-fetch") as pool:
            try:
                records = metadata.files.items()
                list(pool.map(lambda item: self._download(key, item[0], item[1], into, moved), records))
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
        signature = self._small(f"{key}/{SIGNATURE_FILE}", MAX_SIGNATURE_BYTES)
        transfer.finish_copy(into, metadata, data, marker_of(data), signature, sync=False)
        return True

    def publish(self, entry: Entry, progress: Progress | None = None) -> bool:
        """Raises ``CacheError``."""
        raise CacheError(f"the remote cache {self.name} is read-only")

    def keys(self) -> list[str]:
        """Keys in the published index. Raises ``CacheError`` where there is none."""
        return sorted(key for key in self._index("keys") if is_key(key))

    def read_manifest(self, key: str) -> bytes | None:
        """See ``RemoteTier``."""
        return self._small(manifest_path(key), MAX_MANIFEST_BYTES)

    def write_manifest(self, key: str, data: bytes) -> None:
        """Raises ``CacheError``."""
        raise CacheError(f"the remote cache {self.name} is read-only")

    def manifest_keys(self) -> list[str]:
        """Trace keys in the published index. Raises ``CacheError`` where there is none."""
        return [key for key in self._index("manifests") if is_key(key)]

    def stored(self, progress: Progress | None = None) -> dict[str, Stored]:
        """Raises ``CacheError``."""
        raise CacheError(f"the remote cache {self.name} does not tell what its entries take")

    def remove(self, key: str, seen: Stored) -> bool:
        """Raises ``CacheError``."""
        raise CacheError(f"the remote cache {self.name} is read-only")

    def trim(self) -> int:
        """Nothing can be removed here."""
        return 0

    def _index(self, name: str) -> list[str]:
        text = self._small(INDEX, _MAX_INDEX_BYTES)
        if text is None:
            raise CacheError(
                f"{self.name} has no {INDEX}; run `vllm-neuron cache index` over the folder that the server shows"
            )
        try:
            return [key for key in json.loads(text)[name] if isinstance(key, str)]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CacheError(f"{self.name}/{INDEX} is damaged: {error!r}") from error

    def _described(self, key: str) -> tuple[Metadata, bytes] | None:
        """The metadata of a finished entry, and the bytes that hold them."""
        marker = self._small(f"{key}/{COMPLETE_MARKER}", MAX_MARKER_BYTES)
        if marker is None:
            return None
        try:
            data = self._small(f"{key}/{METADATA_FILE}", MAX_METADATA_BYTES)
            if data is None:
                raise files.NotAsExpected(f"{METADATA_FILE} is missing")
            if marker != marker_of(data):
                raise files.NotAsExpected(f"{COMPLETE_MARKER} does not hold the digest of {METADATA_FILE}")
            return parse_metadata(data, key), data
        except files.NotAsExpected as problem:
            logger.warning("The entry %s/%s is damaged (%s), and is passed over.", self.name, key, problem)
            return None

    def _small(self, path: str, limit: int) -> bytes | None:
        with self._open(path) as response:
            if response.status in _ABSENT:
                return None
            data = bytes(response.read(limit + 1))
        if len(data) > limit:
            raise CacheError(f"{self.name}/{path} is larger than {limit} bytes")
        return data

    def _download(self, key: str, name: str, record: FileRecord, into: Path, progress: Progress) -> None:
        def once() -> str:
            (into / name).unlink(missing_ok=True)
            with self._open(f"{key}/{name}") as response, files.NewFile(into / name) as target:
                if response.status in _ABSENT:
                    raise DamagedEntryError(f"the cache entry {self.name}/{key} is damaged: {name} is missing")
                found = [self._piece(response, target, start, stop, progress)
                         for start, stop in digests.pieces(record.size)]  # fmt: skip
                if sum(size for size, _ in found) != record.size or response.read(1):
                    raise DamagedEntryError(
                        f"the cache entry {self.name}/{key} is damaged: {name} is not of {record.size} bytes"
                    )
            return digests.of_pieces([piece for _, piece in found])

        if retried(once, f"{self.name}/{key}/{name}") != record.digest:
            raise DamagedEntryError(f"the cache entry {self.name}/{key} is damaged: the digest of {name} differs")
        steps.reached(Step.FETCHED_FILE)

    @staticmethod
    def _piece(response: Any, target: files.NewFile, start: int, stop: int, progress: Progress) -> tuple[int, bytes]:
        data = response.read(stop - start)
        progress.add(len(data))
        return len(data), target.put(start, data)

    @contextmanager
    def _open(self, path: str) -> Iterator[Any]:
        """The answer to a GET: what is there, or that nothing is. Everything else is an ``OSError``."""
        import urllib3

        headers = urllib3.make_headers(basic_auth=self._auth) | {"Accept-Encoding": "identity"}
        try:
            response = self._pool().request("GET", f"{self.name}/{path}", headers=headers, preload_content=False)
            try:
                if response.status != _THERE and response.status not in _ABSENT:
                    kind = errno.EACCES if response.status in _REFUSED else errno.EIO
                    raise OSError(kind, f"HTTP status {response.status} {response.reason}", path)
                yield response
            finally:
                response.close()
        except urllib3.exceptions.HTTPError as error:
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", path) from error

    def _pool(self) -> Any:
        """Connections of this process: a forked child has its own."""
        import urllib3

        process = os.getpid()
        if process not in self._pools:
            # No retries but redirects: who calls asks again, for every kind of store alike.
            self._pools[process] = urllib3.PoolManager(
                maxsize=_STREAMS,
                timeout=urllib3.Timeout(connect=_CONNECT_SECONDS, read=_READ_SECONDS),
                retries=urllib3.Retry(connect=0, read=0, status=0, other=0, redirect=3),
            )
        return self._pools[process]
