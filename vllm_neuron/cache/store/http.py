"""A store behind a web server: the folder of a remote tier as it is, with a published index for listing."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from vllm_neuron import digests
from vllm_neuron.cache.disk import files
from vllm_neuron.cache.disk.progress import Progress
from vllm_neuron.cache.entry import EntryState, Examined
from vllm_neuron.cache.metadata import (
    COMPLETE_MARKER,
    MAX_MARKER_BYTES,
    MAX_METADATA_BYTES,
    METADATA_FILE,
    SIGNATURE_FILE,
    ForeignFormat,
    marker_of,
    parse_metadata,
)
from vllm_neuron.cache.store import index
from vllm_neuron.cache.store.base import STREAMS, Head
from vllm_neuron.cache.store.index import INDEX
from vllm_neuron.cache.store.proxies import proxy_for, proxy_login, proxy_name
from vllm_neuron.cache.store.retry import retried
from vllm_neuron.errors import CacheError

_MAX_INDEX_BYTES = 64 << 20
_CONNECT_SECONDS, _READ_SECONDS = 5, 20
_THERE = 200
_ABSENT = (404, 410)
_UNAUTHORIZED, _FORBIDDEN, _NO_PROXY_LOGIN = 401, 403, 407
_UNTOLD = ": it is absent, or not to be read from here; a server that shows no lists does not tell which"


class HttpStore:
    """Entries below an ``http://`` or ``https://`` URL: ``<url>/<key>/<file>``. It can only be read.

    User and password in the URL are sent as basic authentication, to that server only.
    """

    streams = STREAMS

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        user, _, host = parts.netloc.rpartition("@")
        self._auth = unquote(user) or None
        self._pools: dict[int, Any] = {}
        self.name = urlunsplit((parts.scheme.lower(), host, parts.path.rstrip("/"), "", ""))
        self._proxy = proxy_for(self.name)

    def exists(self) -> bool:
        """See ``Reader``."""
        return True

    def head(self, key: str) -> Head | None:
        """See ``Reader``."""
        try:
            marker = self._small(f"{key}/{COMPLETE_MARKER}", MAX_MARKER_BYTES)
            if marker is None:
                return None
            data = self._small(f"{key}/{METADATA_FILE}", MAX_METADATA_BYTES)
            if data is None:
                raise files.NotAsExpected(f"{METADATA_FILE} is missing")
            if marker != marker_of(data):
                raise files.NotAsExpected(f"{COMPLETE_MARKER} does not hold the digest of {METADATA_FILE}")
            found = Examined(EntryState.COMPLETE, parse_metadata(data, key))
        except ForeignFormat as problem:
            return Head(Examined(EntryState.FOREIGN, reason=str(problem)))
        except files.NotAsExpected as problem:
            return Head(Examined(EntryState.DAMAGED, reason=str(problem)))
        return Head(found, key, data, signature_path=f"{key}/{SIGNATURE_FILE}")

    def read(self, path: str, limit: int) -> bytes | None:
        """See ``Reader``. What the server refuses counts as absent: nothing that is needed is read this way.

        Where it refuses everything, who looks for an entry is told.
        """
        return self._small(path, limit, optional=True)

    def _small(self, path: str, limit: int, *, optional: bool = False) -> bytes | None:
        with self._open(path, optional=optional) as response:
            if response.status != _THERE:
                return None
            data = bytes(response.read(limit + 1))
        if len(data) > limit:
            raise files.NotAsExpected(f"{path.rpartition('/')[2]} is larger than {limit} bytes")
        return data

    def copy(self, path: str, size: int, to: Path | None, progress: Progress) -> str:
        """See ``Reader``."""
        name = path.rpartition("/")[2]

        def once() -> str:
            if to is not None:
                to.unlink(missing_ok=True)
            with self._open(path) as response, nullcontext() if to is None else files.NewFile(to) as target:
                if response.status in _ABSENT:
                    raise files.NotAsExpected(f"{name} is missing")
                found = [_piece(response, target, start, stop, progress) for start, stop in digests.pieces(size)]
                if sum(length for length, _ in found) != size or response.read(1):
                    raise files.NotAsExpected(f"{name} is not of {size} bytes")
            return digests.of_pieces([piece for _, piece in found])

        return retried(once, f"{self.name}/{path}")

    def names(self, folder: str) -> list[str]:
        """See ``Reader``. As the published index says; raises ``CacheError`` where there is none."""
        text = self._small(INDEX, _MAX_INDEX_BYTES)
        if text is None:
            raise CacheError(
                f"{self.name} has no {INDEX}; run `vllm-neuron cache index` over the folder that the server shows"
            )
        try:
            return index.names(text, folder)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CacheError(f"{self.name}/{INDEX} is damaged: {error!r}") from error

    @contextmanager
    def _open(self, path: str, *, optional: bool = False) -> Iterator[Any]:
        """The answer to a GET: what is there, or that nothing is. Everything else is an ``OSError``.

        A store that must not be listed refuses what is absent as it does what is forbidden: with ``optional``, both are
        absent.
        """
        import urllib3

        headers = urllib3.make_headers(basic_auth=self._auth) | {"Accept-Encoding": "identity"}
        try:
            response = self._pool().request("GET", f"{self.name}/{path}", headers=headers, preload_content=False)
            try:
                accepted = (_THERE, *_ABSENT, *((_FORBIDDEN,) if optional else ()))
                if response.status not in accepted:
                    lasting = response.status in (_UNAUTHORIZED, _FORBIDDEN, _NO_PROXY_LOGIN)
                    kind = errno.EACCES if lasting else errno.EIO
                    more = _UNTOLD if response.status == _FORBIDDEN else ""
                    if response.status == _NO_PROXY_LOGIN and self._proxy:
                        more = f" by the proxy {proxy_name(self._proxy)}"
                    raise OSError(kind, f"HTTP status {response.status} {response.reason}{more}", path)
                yield response
            finally:
                response.close()
        except urllib3.exceptions.HTTPError as error:
            through = f" (through the proxy {proxy_name(self._proxy)})" if self._proxy else ""
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}{through}", path) from error

    def _pool(self) -> Any:
        """Connections of this process: a forked child has its own."""
        import urllib3

        process = os.getpid()
        if process not in self._pools:
            # No retries but redirects: who calls asks again, for every kind of store alike.
            limits: dict[str, Any] = {
                "maxsize": STREAMS,
                "timeout": urllib3.Timeout(connect=_CONNECT_SECONDS, read=_READ_SECONDS),
                "retries": urllib3.Retry(connect=0, read=0, status=0, other=0, redirect=3),
            }
            if self._proxy is None:
                self._pools[process] = urllib3.PoolManager(**limits)
            else:
                login = urllib3.make_headers(proxy_basic_auth=proxy_login(self._proxy))
                self._pools[process] = urllib3.ProxyManager(proxy_name(self._proxy), proxy_headers=login, **limits)
        return self._pools[process]


def _piece(response: Any, target: files.NewFile | None, start: int, stop: int, progress: Progress) -> tuple[int, bytes]:
    """Move one piece of an answer to ``target``; how long it was, and its SHA-256."""
    data = response.read(stop - start)
    progress.add(len(data))
    if target is None:
        return len(data), hashlib.sha256(data).digest()
    return len(data), target.put(start, data)
