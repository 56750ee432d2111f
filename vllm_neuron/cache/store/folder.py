"""A store in a folder that many hosts mount: NFS, FSx, a disk. A rename decides who publishes.

::

    <root>/<key>/<file>          whole entries, laid out as in a local tier: ``cp -r`` moves one
    <root>/.staging/             entries in the making, each with its owner's lock
    <root>/.manifests/           see ``manifests``
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from vllm_neuron.cache import failpoint
from vllm_neuron.cache.disk import files, folders
from vllm_neuron.cache.disk.progress import Progress
from vllm_neuron.cache.disk.scratch import Scratch, sweep
from vllm_neuron.cache.entry import Entry, EntryState, Examined, complete_keys, examine
from vllm_neuron.cache.failpoint import Failpoint
from vllm_neuron.cache.metadata import (
    COMPLETE_MARKER,
    MAX_METADATA_BYTES,
    MAX_SIGNATURE_BYTES,
    METADATA_FILE,
    SIGNATURE_FILE,
)
from vllm_neuron.cache.store import publish
from vllm_neuron.cache.store.base import Head, IsAcceptable, Stored
from vllm_neuron.cache.transfer import copy_entry
from vllm_neuron.errors import ConfigError

_ABANDONED_SECONDS = 24 * 3600


class FolderStore:
    """Entries in the folder ``root``, which is made when something is first published."""

    read_only = False
    streams = 1

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()
        self.name = str(self.root)
        if self.root.exists() and not self.root.is_dir():
            raise ConfigError(f"the remote cache {self.root} is not a folder: name another one")

    def exists(self) -> bool:
        """See ``Reader``."""
        return self.root.is_dir()

    def head(self, key: str) -> Head | None:
        """See ``Reader``."""
        return self._head(self.root / key, key)

    def read(self, path: str, limit: int) -> bytes | None:
        """See ``Reader``."""
        return files.read_file(self.root / path, limit)

    def copy(self, path: str, size: int, to: Path | None, progress: Progress) -> str:
        """See ``Reader``."""
        source = self.root / path
        try:
            with files.folder(source.parent) as folder:
                return files.copy_exactly(source.name, size, folder, to, progress=progress)
        except FileNotFoundError as error:
            raise files.NotAsExpected(f"{source.name} is missing") from error

    def names(self, folder: str) -> list[str]:
        """See ``Reader``."""
        if folder:
            return folders.newest_first(self.root / folder)
        return complete_keys(self.root) if self.root.exists() else []

    def put(self, path: str, data: bytes) -> None:
        """See ``Store``. Written aside and renamed."""
        folders.put_file(self.root / path, data)

    def publish(self, entry: Entry, is_acceptable: IsAcceptable, progress: Progress) -> bool:
        """See ``Store``. Written aside, verified where it has landed, and renamed."""

        def stays(path: Path) -> bool:
            head = self._head(path, entry.key)
            return head is not None and is_acceptable(head)

        target, staging = self.root / entry.key, self._staging()
        if stays(target):
            return False
        scratch = Scratch(staging, f"{entry.key}.{_this_boot()}")
        failpoint.reached(Failpoint.REMOTE_STAGED)
        try:
            copy_entry(entry.path, entry.metadata, scratch.path, sign=True, progress=progress)
            failpoint.reached(Failpoint.REMOTE_COPIED)
            folders.open_to_readers(scratch.path, self.root)
            asides = (scratch.beside(f"aside-{n}") for n in range(publish.ATTEMPTS))
            return publish.place(
                scratch.path,
                target,
                entry.key,
                lambda _: publish.move_out(target, next(asides), Failpoint.SET_ASIDE, stays),
                stays,
            )
        finally:
            scratch.close()

    def stored(self, progress: Progress) -> dict[str, Stored]:
        """See ``Store``."""
        found = {}
        for key in complete_keys(self.root):
            one = _stored(self.root / key)
            if one is not None:
                found[key] = one
                progress.add(one.bytes)
        return found

    def remove(self, key: str, seen: Stored) -> bool:
        """See ``Store``. Renamed, looked at once more where nobody else finds it, and removed."""
        target, scratch = self.root / key, Scratch(self._staging(), f"{key}.{_this_boot()}")
        try:
            removed = scratch.beside("removed")
            return publish.move_out(target, removed, Failpoint.HIDDEN, lambda aside: _stored(aside) != seen)
        finally:
            scratch.close()
            failpoint.reached(Failpoint.REMOTE_REMOVED)

    def trim(self) -> int:
        """See ``Store``."""
        staging = self.root / ".staging"
        before = set(staging.glob("*"))
        sweep(staging, _is_abandoned)
        return len(before - set(staging.glob("*")))

    def _head(self, path: Path, key: str) -> Head | None:
        """What describes the entry of ``key`` that is at ``path``, a folder below the root."""
        found = examine(path, key, digests=False)
        if found.state in (EntryState.ABSENT, EntryState.IN_PROGRESS):
            return None
        place = path.relative_to(self.root).as_posix()
        if found.metadata is None:
            return Head(found, place)
        try:
            with files.folder(path) as folder:
                data = files.read_small(METADATA_FILE, MAX_METADATA_BYTES, folder)
                signature = files.read_if_there(SIGNATURE_FILE, MAX_SIGNATURE_BYTES, folder)
        except FileNotFoundError:  # Someone has just removed it.
            return None
        except files.NotAsExpected as problem:
            return Head(Examined(EntryState.DAMAGED, reason=str(problem)), place)
        return Head(found, place, data, signature)

    def _staging(self) -> Path:
        staging = self.root / ".staging"
        if not staging.is_dir():
            self.root.mkdir(parents=True, exist_ok=True)
            folders.make_inner(staging)
        sweep(staging, _is_abandoned)
        return staging


def _stored(path: Path) -> Stored | None:
    """What there is of the entry at ``path``; None where it has just gone."""
    try:
        marker = (path / COMPLETE_MARKER).lstat()
        size = sum(file.lstat().st_size for file in path.iterdir())
    except FileNotFoundError:
        return None
    return Stored(size, marker.st_mtime, f"{marker.st_ino}.{marker.st_mtime_ns}")


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
