"""Remote tiers by the paths and URLs that name them."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from vllm_neuron.cache.remote.tier import RemoteTier
from vllm_neuron.cache.store.base import Store
from vllm_neuron.cache.store.folder import FolderStore
from vllm_neuron.cache.store.read_only import ReadOnly
from vllm_neuron.errors import ConfigError

SEPARATOR = ","
"""Between several remotes in one variable or option. In a path, write it as ``%2C`` in a ``file://`` URL."""

READ_ONLY = "ro+"
"""Before a URL: nothing is ever published there."""

_ACCEPTED = (
    f"accepted: a path, or a file://, s3:// or https:// URL, with {READ_ONLY} before it where nothing is to be "
    f"published there; several are separated by {SEPARATOR!r}"
)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_NEARLY_URL = re.compile(r"(file|https?|s3|gs|gcs|az|abfs)(:/|//)", re.IGNORECASE)


def open_remote(url: str) -> RemoteTier:
    """The remote tier that a path or URL names. Raises ``ConfigError`` for a form that is not supported.

    A store that fails is asked again a few times; one that hangs is given up, and left alone for a while.
    """
    text = url.strip()
    if not text:
        raise ConfigError(f"the remote cache {url!r} is empty; {_ACCEPTED}")
    read_only = text.lower().startswith(READ_ONLY)
    if read_only and not _URL.match(text):
        raise ConfigError(f"the remote cache {text!r} is not a URL: write {READ_ONLY}file:///path; {_ACCEPTED}")
    store = _open(text[len(READ_ONLY) :] if read_only else text)
    return RemoteTier(ReadOnly(store) if read_only and not store.read_only else store)


def _open(text: str) -> Store:
    if not _URL.match(text):
        if _NEARLY_URL.match(text):
            raise ConfigError(f"the remote cache {without_secrets(text)} is neither a URL nor a path; {_ACCEPTED}")
        return FolderStore(Path(text))
    parts = urlsplit(text)
    scheme = parts.scheme.lower()
    if scheme == "file":
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not parts.path:
            raise ConfigError(f"the remote cache {text!r} does not name a local path (file:///path); {_ACCEPTED}")
        return FolderStore(Path(unquote(parts.path)))
    if not parts.netloc or (parts.query or parts.fragment):
        raise ConfigError(f"the remote cache {without_secrets(text)} names no store, or more than one; {_ACCEPTED}")
    if scheme in ("http", "https"):
        from vllm_neuron.cache.store.http import HttpStore

        return ReadOnly(HttpStore(text))
    from vllm_neuron.cache.store.object_client import SCHEMES
    from vllm_neuron.cache.store.objects import ObjectStore

    if scheme not in SCHEMES:
        raise ConfigError(f"the remote cache {without_secrets(text)}: {scheme}:// is not supported; {_ACCEPTED}")
    return ObjectStore(text)


def open_remotes(urls: str | None) -> list[RemoteTier]:
    """The remotes of a list in one text, in its order: the first that has an entry serves it."""
    return [open_remote(url) for url in urls.split(SEPARATOR)] if urls and urls.strip() else []


def without_secrets(url: str) -> str:
    """A URL as it may be logged: no user, no password, no query."""
    return re.sub(r"//[^/@]*@", "//", url.split("?")[0])
