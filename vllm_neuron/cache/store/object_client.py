"""The few operations of an object store that the cache needs, through fsspec, with errors that are ``OSError``."""

from __future__ import annotations

import errno
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from vllm_neuron.cache.store.base import Stored
from vllm_neuron.cache.store.proxies import s3_proxies
from vllm_neuron.errors import ConfigError, NeuronError

_CONNECT_SECONDS, _READ_SECONDS = 5, 20
_S3_ENDPOINT = "https://s3.amazonaws.com"
_S3 = ("s3", "s3a")
_BEYOND_THE_END = "InvalidRange"
_CHANGED = ("PreconditionFailed", "ConditionalRequestConflict")
# By scheme, the package that fsspec needs for it, and the extra of this package that installs it.
_PACKAGES = {"s3": ("s3fs", "s3"), "s3a": ("s3fs", "s3"), "gs": ("gcsfs", ""), "gcs": ("gcsfs", ""),
             "az": ("adlfs", ""), "abfs": ("adlfs", ""), "oss": ("ossfs", ""), "memory": ("fsspec", "")}  # fmt: skip

SCHEMES = tuple(_PACKAGES)

T = TypeVar("T")


class ConflictError(NeuronError, OSError):
    """Something else is at a path than a write counts on: another process was there first."""

    code = "store-conflict"


class ObjectClient:
    """Objects by path below a URL such as ``s3://bucket/prefix``.

    Credentials and endpoint are those of the store's own library: for S3 its usual variables and files, such as
    ``AWS_ENDPOINT_URL``. Raises ``ConfigError`` where the library is not installed.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._scheme = parts.scheme.lower()
        self._root = f"{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")
        self.name = f"{self._scheme}://{self._root}"
        package, extra = _PACKAGES[self._scheme]
        try:
            importlib.import_module(package)
        except ImportError as error:
            wanted = f"'vllm-neuron[{extra}]'" if extra else package
            raise ConfigError(f"the remote cache {self.name} needs {package}; run `pip install {wanted}`") from error

    def read(self, path: str, start: int, stop: int) -> bytes:
        """The bytes from ``start`` to ``stop``, or as far as the object goes. ``FileNotFoundError``: there is none."""
        try:
            return bytes(self._call(lambda store: store.cat_file(self._full(path), start=start, end=stop)))
        except OSError as error:
            if _code(error) == _BEYOND_THE_END:
                return b""
            raise

    def version(self, path: str) -> str:
        """The store's name for the content that is there now; '' where it has no such names."""
        return str(self._call(lambda store: store.info(self._full(path))).get("ETag", ""))

    def upload(self, file: Path, path: str) -> None:
        """Store a file's content."""
        self._call(lambda store: store.put_file(str(file), self._full(path)))

    def create(self, path: str, data: bytes) -> None:
        """Store ``data`` where nothing is, in one step; ``ConflictError`` where something is."""
        self._call(lambda store: store.pipe_file(self._full(path), data, mode="create"))

    def put(self, path: str, data: bytes) -> None:
        """Store ``data``, whatever was there."""
        self._call(lambda store: store.pipe_file(self._full(path), data))

    def replace(self, path: str, data: bytes, version: str) -> None:
        """Store ``data`` in place of the content ``version``: in one step where the store can, else in two.

        ``ConflictError`` where something else is there.
        """
        if version and self._scheme in _S3:
            self._call(lambda store: store.pipe_file(self._full(path), data, IfMatch=version))
            return
        self.remove(path)
        self.create(path, data)

    def remove(self, path: str) -> None:
        """Remove an object, or all below ``path``. Nothing there: nothing done."""
        try:
            self._call(lambda store: store.rm(self._full(path), recursive=True))
        except FileNotFoundError:
            return

    def find(self) -> dict[str, Stored]:
        """Every object by its path. A time is 0, and a version is '', where the store does not tell them."""
        try:
            found = self._call(lambda store: store.find(self._root, detail=True))
        except FileNotFoundError:
            return {}
        base = len(self._full(""))
        return {path.lstrip("/")[base:]: _stored(info) for path, info in found.items()}

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _call(self, call: Callable[[Any], T]) -> T:
        try:
            return call(self._store())
        except OSError as error:
            if isinstance(error, FileExistsError) or _code(error) in _CHANGED:
                raise ConflictError(errno.EEXIST, str(error)) from error
            raise
        except Exception as error:  # Each library has errors of its own for a network that fails.
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error

    def _store(self) -> Any:
        # At each use: fsspec keeps one per process, and a forked child must not share its parent's connections.
        import fsspec

        if self._scheme not in _S3:
            return fsspec.filesystem(self._scheme)
        limits = {
            "connect_timeout": _CONNECT_SECONDS,
            "read_timeout": _READ_SECONDS,
            "retries": {"max_attempts": 1},
            **s3_proxies(os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or _S3_ENDPOINT),
        }
        store = fsspec.filesystem("s3", config_kwargs=limits, use_listings_cache=False)
        store.retries = 1  # Who calls asks again, for every kind of store alike.
        return store


def _code(error: OSError) -> str:
    """The S3 error code behind an error; '' where there is none."""
    response = getattr(error.__cause__, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def _stored(info: dict[str, Any]) -> Stored:
    when = info.get("LastModified") or info.get("created") or info.get("updated") or info.get("last_modified")
    seconds = float(when.timestamp()) if when is not None else 0.0
    return Stored(int(info.get("size") or 0), seconds, str(info.get("ETag", "")))
