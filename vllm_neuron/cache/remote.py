"""Remote tiers: stores that many hosts share. Correctness comes from atomic publishing alone; there are no locks."""

from __future__ import annotations

import logging
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from vllm_neuron.cache import folders, publish
from vllm_neuron.cache.entry import Entry, EntryState, complete_keys, copy_entry, examine
from vllm_neuron.cache.key import is_key
from vllm_neuron.cache.manifest_folder import ManifestFolder
from vllm_neuron.cache.metadata import Metadata
from vllm_neuron.cache.scratch import Scratch, sweep
from vllm_neuron.errors import CacheError, ConfigError

logger = logging.getLogger("vllm.neuron.cache")

SEPARATOR = ","
"""Between several remotes in one variable or option. In a path, write it as ``%2C`` in a ``file://`` URL."""

_ACCEPTED = f"accepted: a path, or a file:// URL; several are separated by {SEPARATOR!r}"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_ABANDONED_SECONDS = 24 * 3600


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

    def metadata(self, key: str) -> Metadata | None:
        """What the entry of ``key`` says of itself, or None where there is no finished one. Nothing is verified."""

    def fetch(self, key: str, into: Path) -> bool:
        """Copy the finished entry of ``key`` into the empty folder ``into``; False where there is none.

        The caller verifies what has arrived.
        """

    def publish(self, entry: Entry) -> bool:
        """Store a verified entry. True: ours landed. False: a whole one was there. One that is not is replaced."""

    def keys(self) -> list[str]:
        """Keys of the entries that claim to be complete, sorted."""

    def read_manifest(self, key: str) -> bytes | None:
        """The stored bytes of the manifest of a trace key, at most ``MAX_MANIFEST_BYTES``, unchecked; None for none."""

    def write_manifest(self, key: str, data: bytes) -> None:
        """Store a manifest in place of any that is there, all of it or nothing."""

    def manifest_keys(self) -> list[str]:
        """Trace keys of the manifests, the newest first where the store can tell."""


class FolderRemote:
    """Any folder that hosts can mount: NFS, FSx, a disk. It is made when something is first published."""

    def __init__(self, root: Path, *, read_only: bool = False) -> None:
        self.root = root.expanduser().absolute()
        self._read_only = read_only
        # A dotted name, so that no listing of entries takes it for one.
        self._manifests = ManifestFolder(self.root / ".manifests")
        if self.root.exists() and not self.root.is_dir():
            raise ConfigError(f"the remote cache {self.root} is not a folder; {_ACCEPTED}")

    @property
    def name(self) -> str:
        """Its path."""
        return str(self.root)

    @property
    def read_only(self) -> bool:
        """As it was told."""
        return self._read_only

    def metadata(self, key: str) -> Metadata | None:
        """See ``RemoteTier``."""
        path = self._path(key)
        found = examine(path, key, digests=False)
        if found.state in (EntryState.DAMAGED, EntryState.FOREIGN):
            logger.warning("The entry %s is %s (%s), and is passed over.", path, found.state.value, found.reason)
        return found.metadata

    def fetch(self, key: str, into: Path) -> bool:
        """See ``RemoteTier``."""
        metadata = self.metadata(key)
        if metadata is None:
            return False
        copy_entry(self._path(key), metadata, into)
        return True

    def publish(self, entry: Entry) -> bool:
        """See ``RemoteTier``. Written aside, verified where it has landed, and renamed."""
        if self.read_only:
            raise CacheError(f"the remote cache {self.name} is read-only")
        target = self._path(entry.key)
        if examine(target, entry.key).state is EntryState.COMPLETE:
            return False
        staging = self._staging()
        scratch = Scratch(staging, f"{entry.key}.{_this_boot()}")
        try:
            copy_entry(entry.path, entry.metadata, scratch.path)
            folders.open_to_readers(scratch.path, self.root)
            asides = (scratch.beside(f"aside-{n}") for n in range(publish.ATTEMPTS))
            return publish.place(
                scratch.path, target, entry.key, lambda _: publish.move_aside(target, next(asides), entry.key)
            )
        finally:
            scratch.close()

    def keys(self) -> list[str]:
        """See ``RemoteTier``."""
        return complete_keys(self.root) if self.root.exists() else []

    def read_manifest(self, key: str) -> bytes | None:
        """See ``RemoteTier``."""
        return self._manifests.read(key)

    def write_manifest(self, key: str, data: bytes) -> None:
        """See ``RemoteTier``."""
        if self.read_only:
            raise CacheError(f"the remote cache {self.name} is read-only")
        self._manifests.write(key, data)

    def manifest_keys(self) -> list[str]:
        """See ``RemoteTier``."""
        return self._manifests.keys()

    def _path(self, key: str) -> Path:
        if not is_key(key):
            raise CacheError(f"{key!r} is not a key; a key is 32 hexadecimal digits, in lower case")
        return self.root / key

    def _staging(self) -> Path:
        staging = self.root / ".staging"
        if not staging.is_dir():
            self.root.mkdir(parents=True, exist_ok=True)
            folders.make_inner(staging)
        sweep(staging, _is_abandoned)
        return staging


def _is_abandoned(folder: Path) -> bool:
    """Whether a free lock means that the owner of a temporary folder is dead.

    Between hosts, not every network file system carries locks, and clocks differ: there, only great age tells.
    """
    made_on = folder.name.split(".")[1:2]
    return made_on == [_this_boot()] or time.time() - folder.stat().st_mtime > _ABANDONED_SECONDS


def _this_boot() -> str:
    """Names this machine from its start on; processes that give the same name see each other's kernel locks."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().split("-")[0]
    return "unknown"


def open_remote(url: str) -> RemoteTier:
    """The remote tier that a path or URL names. Raises ``ConfigError`` for a form that is not supported."""
    text = url.strip()
    if not _URL.match(text):
        if not text:
            raise ConfigError(f"the remote cache {url!r} is empty; {_ACCEPTED}")
        return FolderRemote(Path(text))
    parts = urlsplit(text)
    if parts.scheme.lower() != "file":
        raise ConfigError(f"the remote cache {_without_secrets(text)}: {parts.scheme}:// is not supported; {_ACCEPTED}")
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not parts.path:
        raise ConfigError(f"the remote cache {text!r} does not name a local path (file:///path); {_ACCEPTED}")
    return FolderRemote(Path(unquote(parts.path)))


def open_remotes(urls: str | None) -> list[RemoteTier]:
    """The remotes of a list in one text, in its order: the first that has an entry serves it."""
    return [open_remote(url) for url in urls.split(SEPARATOR)] if urls and urls.strip() else []


def _without_secrets(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//", url.split("?")[0])
