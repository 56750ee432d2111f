"""A remote tier in a folder that many hosts mount: NFS, FSx, a disk. A rename decides who publishes."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from pathlib import Path

from vllm_neuron.cache import files, folders, publish, steps, trust
from vllm_neuron.cache.entry import Entry, EntryState, complete_keys, examine
from vllm_neuron.cache.key import checked_key
from vllm_neuron.cache.manifest_folder import MANIFESTS, ManifestFolder
from vllm_neuron.cache.metadata import (
    COMPLETE_MARKER,
    MAX_METADATA_BYTES,
    MAX_SIGNATURE_BYTES,
    METADATA_FILE,
    SIGNATURE_FILE,
    Metadata,
)
from vllm_neuron.cache.progress import Progress
from vllm_neuron.cache.scratch import Scratch, sweep
from vllm_neuron.cache.steps import Step
from vllm_neuron.cache.stored import Stored
from vllm_neuron.cache.transfer import copy_entry
from vllm_neuron.errors import CacheError, ConfigError

logger = logging.getLogger("vllm.neuron.cache")

_ABANDONED_SECONDS = 24 * 3600


class FolderRemote:
    """Any folder that hosts can mount: NFS, FSx, a disk. It is made when something is first published."""

    def __init__(self, root: Path, *, read_only: bool = False) -> None:
        self.root = root.expanduser().absolute()
        self._read_only = read_only
        # A dotted name, so that no listing of entries takes it for one.
        self._manifests = ManifestFolder(self.root / MANIFESTS)
        if self.root.exists() and not self.root.is_dir():
            raise ConfigError(f"the remote cache {self.root} is not a folder: name another one")

    @property
    def name(self) -> str:
        """Its path."""
        return str(self.root)

    @property
    def read_only(self) -> bool:
        """As it was told."""
        return self._read_only

    def exists(self) -> bool:
        """See ``RemoteTier``."""
        return self.root.is_dir()

    def metadata(self, key: str) -> Metadata | None:
        """See ``RemoteTier``."""
        path = self._path(key)
        found = examine(path, key, digests=False)
        if found.state in (EntryState.DAMAGED, EntryState.FOREIGN):
            logger.warning("The entry %s is %s (%s), and is passed over.", path, found.state.value, found.reason)
        return found.metadata

    def fetch(self, key: str, into: Path, progress: Progress | None = None) -> bool:
        """See ``RemoteTier``."""
        metadata = self.metadata(key)
        if metadata is None:
            return False
        copy_entry(self._path(key), metadata, into, sync=False, progress=progress)
        return True

    def publish(self, entry: Entry, progress: Progress | None = None) -> bool:
        """See ``RemoteTier``. Written aside, verified where it has landed, and renamed."""
        if self.read_only:
            raise CacheError(f"the remote cache {self.name} is read-only")
        target, staging = self._path(entry.key), self._staging()
        if self._may_stay(target, entry.key):
            return False
        scratch = Scratch(staging, f"{entry.key}.{_this_boot()}")
        steps.reached(Step.REMOTE_STAGED)
        try:
            copy_entry(entry.path, entry.metadata, scratch.path, sign=True, progress=progress)
            steps.reached(Step.REMOTE_COPIED)
            folders.open_to_readers(scratch.path, self.root)
            asides = (scratch.beside(f"aside-{n}") for n in range(publish.ATTEMPTS))
            return publish.place(
                scratch.path,
                target,
                entry.key,
                lambda _: publish.move_aside(target, next(asides), entry.key, self._may_stay),
                self._may_stay,
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

    def stored(self, progress: Progress | None = None) -> dict[str, Stored]:
        """See ``RemoteTier``."""
        found = {}
        for key in complete_keys(self.root):
            one = self._stored(self._path(key))
            if one is not None:
                found[key] = one
                (progress or Progress()).add(one.bytes)
        return found

    def remove(self, key: str, seen: Stored) -> bool:
        """See ``RemoteTier``. Renamed, looked at once more where nobody else finds it, and removed."""
        if self.read_only:
            raise CacheError(f"the remote cache {self.name} is read-only")
        target, scratch = self._path(key), Scratch(self._staging(), f"{key}.{_this_boot()}")
        try:
            aside = scratch.beside("removed")
            try:
                target.rename(aside)
            except FileNotFoundError:
                return False
            steps.reached(Step.HIDDEN)
            if self._stored(aside) == seen:
                return True
            with suppress(OSError):  # A third one may have been stored in the meantime. Then that one stands.
                aside.rename(target)
            return False
        finally:
            scratch.close()
            steps.reached(Step.REMOTE_REMOVED)

    @staticmethod
    def _stored(path: Path) -> Stored | None:
        """What there is of the entry at ``path``; None where it has just gone."""
        try:
            marker = (path / COMPLETE_MARKER).lstat()
            size = sum(file.lstat().st_size for file in path.iterdir())
        except FileNotFoundError:
            return None
        return Stored(size, marker.st_mtime, f"{marker.st_ino}.{marker.st_mtime_ns}")

    def trim(self) -> int:
        """See ``RemoteTier``."""
        staging = self.root / ".staging"
        before = set(staging.glob("*"))
        sweep(staging, _is_abandoned)
        return len(before - set(staging.glob("*")))

    def _path(self, key: str) -> Path:
        return self.root / checked_key(key)

    def _may_stay(self, path: Path, key: str) -> bool:
        """Whether what is at ``path`` is a whole entry, and one that would be accepted here."""
        if examine(path, key).state is not EntryState.COMPLETE:
            return False
        try:
            with files.folder(path) as folder:
                data = files.read_small(METADATA_FILE, MAX_METADATA_BYTES, folder)
                return trust.suffices(key, data, files.read_if_there(SIGNATURE_FILE, MAX_SIGNATURE_BYTES, folder))
        except FileNotFoundError:  # Someone has just removed it.
            return False

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
