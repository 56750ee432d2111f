"""Remote tiers: stores that many hosts share. Correctness comes from atomic publishing alone; there are no locks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from vllm_neuron.cache.entry import Entry
from vllm_neuron.cache.folder_remote import FolderRemote
from vllm_neuron.cache.guard import Guarded
from vllm_neuron.cache.metadata import Metadata
from vllm_neuron.cache.progress import Progress
from vllm_neuron.cache.stored import Stored
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


class RemoteTier(Protocol):
    """A store of entries by key. Says nothing of how: renames and conditional puts are the store's own affair.

    Every method raises ``OSError`` or ``CacheError`` where the store fails; none waits for another host.
    """

    @property
    def name(self) -> str:
        """What messages call it: a path or a URL, without credentials."""

    @property
    def read_only(self) -> bool:
        """Whether nothing is ever published here."""

    def exists(self) -> bool:
        """False for a folder that is not there: it is made with the first entry. A store that is asked is there."""

    def metadata(self, key: str) -> Metadata | None:
        """What the entry of ``key`` says of itself, or None where there is no finished one. No file is verified."""

    def fetch(self, key: str, into: Path, progress: Progress | None = None) -> bool:
        """Copy the finished entry of ``key`` into the empty folder ``into``; False where there is none.

        Files are hashed on their way; who publishes the copy verifies the rest.
        """

    def publish(self, entry: Entry, progress: Progress | None = None) -> bool:
        """Store a verified entry. True: ours landed. False: a whole one was there. One that is not is replaced.

        It is signed, and one that is not trusted here is replaced too, where the variables of ``trust`` say so.
        """

    def keys(self) -> list[str]:
        """Keys of the entries that claim to be complete, sorted."""

    def read_manifest(self, key: str) -> bytes | None:
        """The stored bytes of the manifest of a trace key, at most ``MAX_MANIFEST_BYTES``, unchecked; None for none."""

    def write_manifest(self, key: str, data: bytes) -> None:
        """Store a manifest in place of any that is there, all of it or nothing."""

    def manifest_keys(self) -> list[str]:
        """Trace keys of the manifests, the newest first where the store can tell."""

    def stored(self, progress: Progress | None = None) -> dict[str, Stored]:
        """What there is of each finished entry, by key. ``progress`` gets the bytes of what has been seen."""

    def remove(self, key: str, seen: Stored) -> bool:
        """Remove an entry: out of sight in one step, then its files. False where it is not the one that was seen."""

    def trim(self) -> int:
        """Remove what publishers who died left behind, where that can be told; return how many things went."""


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
    return Guarded(_open(text.removeprefix(text[: len(READ_ONLY)]) if read_only else text, read_only))


def _open(text: str, read_only: bool) -> RemoteTier:
    if not _URL.match(text):
        if _NEARLY_URL.match(text):
            raise ConfigError(f"the remote cache {without_secrets(text)} is neither a URL nor a path; {_ACCEPTED}")
        return FolderRemote(Path(text), read_only=read_only)
    parts = urlsplit(text)
    scheme = parts.scheme.lower()
    if scheme == "file":
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not parts.path:
            raise ConfigError(f"the remote cache {text!r} does not name a local path (file:///path); {_ACCEPTED}")
        return FolderRemote(Path(unquote(parts.path)), read_only=read_only)
    if not parts.netloc or (parts.query or parts.fragment):
        raise ConfigError(f"the remote cache {without_secrets(text)} names no store, or more than one; {_ACCEPTED}")
    if scheme in ("http", "https"):
        from vllm_neuron.cache.http_remote import HttpRemote

        return HttpRemote(text)
    from vllm_neuron.cache.object_remote import ObjectRemote
    from vllm_neuron.cache.object_store import SCHEMES

    if scheme not in SCHEMES:
        raise ConfigError(f"the remote cache {without_secrets(text)}: {scheme}:// is not supported; {_ACCEPTED}")
    return ObjectRemote(text, read_only=read_only)


def open_remotes(urls: str | None) -> list[RemoteTier]:
    """The remotes of a list in one text, in its order: the first that has an entry serves it."""
    return [open_remote(url) for url in urls.split(SEPARATOR)] if urls and urls.strip() else []


def without_secrets(url: str) -> str:
    """A URL as it may be logged: no user, no password, no query."""
    return re.sub(r"//[^/@]*@", "//", url.split("?")[0])
