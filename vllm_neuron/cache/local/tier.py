"""The local tier: a folder of entries on this host, shared by this user's processes.

::

    <root>/<key>/            whole entries; nothing else ever has such a name
    <root>/.locks/           one lock file per key, never unlinked
    <root>/.staging/         entries in the making, each with its owner's lock
    <root>/.quarantine/      damaged entries, each beside a text that says why

A hit writes nothing and takes no lock. Where the tier can't be written to, its entries are still used, and new ones go
to a temporary folder of this process.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_neuron import envs
from vllm_neuron.cache import failpoint
from vllm_neuron.cache.disk import folders
from vllm_neuron.cache.disk.scratch import Scratch, sweep
from vllm_neuron.cache.entry import Entry, EntryState, Examined, complete_keys, examine, read_entry
from vllm_neuron.cache.failpoint import Failpoint
from vllm_neuron.cache.key import checked_key
from vllm_neuron.cache.local.key_lock import KeyLock, LockState
from vllm_neuron.cache.metadata import COMPLETE_MARKER
from vllm_neuron.cache.store import publish
from vllm_neuron.cache.transfer import copy_entry
from vllm_neuron.cache.verified import still_trusted
from vllm_neuron.errors import CacheError

logger = logging.getLogger("vllm.neuron.cache")

_PRIVATE_PREFIX = "vllm-neuron"


class LocalTier:
    """Entries below ``root``, which need not exist yet: it is made, for this user only, when something is stored.

    Raises ``ConfigError`` where ``root`` is no folder, or lies where another user could have put something in it.
    A root that exists keeps its mode, and what is made in it follows that mode: this is how several users share one.
    """

    name = "local"

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        folders.check_trusted(self.root)
        self._refusal: str | None = None
        self._privates: dict[int, PrivateTier] = {}
        self._warned: set[tuple[str, str]] = set()
        self._nested = threading.local()

    @property
    def writable(self) -> bool:
        """Whether new entries would be stored here, as far as can be told without trying."""
        place = self.root
        while not place.exists():
            place = place.parent
        return self._refusal is None and os.access(place, os.W_OK | os.X_OK)

    def lookup(self, key: str) -> Entry | None:
        """The whole entry of ``key``, or None. A damaged one goes to quarantine and counts as a miss."""
        path = self.root / checked_key(key)
        try:
            found = examine(path, key)
        except OSError as error:
            self._warn_once(key, f"The cache entry {path} can't be read, and is passed over: {error}")
            found = Examined(EntryState.ABSENT)
        if found.metadata is not None:
            return Entry(path, found.metadata)
        if found.state is EntryState.DAMAGED:
            try:
                self._quarantine(key, found)
            except OSError as error:
                self._warn_once(
                    key,
                    f"The cache entry {path} is passed over, and can't be moved away ({error}): "
                    f"it is {found.state.value} ({found.reason}).",
                )
        elif found.state is EntryState.FOREIGN:
            self._warn_once(key, f"The cache entry {path} is passed over: {found.reason}.")
        hits = (private.lookup(key) for private in self._privates.values())
        return next((entry for entry in hits if entry is not None), None)

    def keys(self) -> list[str]:
        """Keys of the entries that claim to be complete, sorted. Nothing is verified."""
        try:
            mine = complete_keys(self.root)
        except OSError:
            mine = []
        return sorted({*mine, *(key for private in self._privates.values() for key in private.keys())})

    @contextmanager
    def staging(self, key: str) -> Iterator[Path]:
        """An empty folder to make the entry of ``key`` in, for ``publish``. Removed afterwards, or after our death."""
        scratch = self._scratch(checked_key(key))
        if scratch is None:
            with self._fallback().staging(key) as path:
                yield path
            return
        failpoint.reached(Failpoint.STAGED)
        try:
            yield scratch.path
        finally:
            scratch.close()

    def publish(self, staged: Path, key: str, *, sync: bool = True) -> Entry:
        """Store the finished folder ``staged`` as the entry of ``key``; return the one that is there afterwards.

        ``sync`` waits until its name is on disk, and with it, on most file systems, all that is in it. Raises
        ``CacheError`` where ``staged`` is not whole.
        """
        if not staged.is_relative_to(self.root):
            return self._fallback().publish(staged, key, sync=sync)
        target = self.root / checked_key(key)
        try:
            with still_trusted(staged, key):
                folders.open_to_readers(staged, self.root)
            failpoint.reached(Failpoint.OPENED_TO_READERS)
            publish.place(staged, target, key, lambda found: self._quarantine(key, found), sync=sync)
            return read_entry(target, key)
        except OSError as error:
            self._refuse_or_raise(error)
            return self._fallback().adopt(read_entry(staged, key))

    def build(self, key: str, fill: Callable[[Path], object], *, sync: bool = True) -> Entry:
        """Let ``fill`` make the entry of ``key`` in an empty folder, and publish it.

        ``sync=False`` is for what can be fetched again after a loss of power. Where this tier turns out to be
        unwritable or full on the way, ``fill`` is called once more, with a folder elsewhere. Raises what ``fill``
        raises, and ``CacheError`` where what it leaves is not whole.
        """
        with self.staging(key) as folder:
            try:
                fill(folder)
                return self.publish(folder, key, sync=sync)
            except Exception as error:
                if not folder.is_relative_to(self.root) or not folders.refuses_writing(error, self.root):
                    raise
                self._refuse(str(error))
        return self._fallback().build(key, fill, sync=sync)

    def adopt(self, entry: Entry) -> Entry:
        """Store a copy of an entry from elsewhere."""
        return self.build(entry.key, lambda folder: copy_entry(entry.path, entry.metadata, folder))

    def check_kept(self, entry: Entry) -> None:
        """Raise ``CacheError`` where an entry that was to be stored here is this process's alone, and ends with it."""
        if not entry.path.is_relative_to(self.root):
            why = self._refusal or "it can't be written to"
            raise CacheError(f"entry {entry.key} can't be kept in {self.root}: {why}")

    @contextmanager
    def lock(self, key: str, timeout: float | None = None) -> Iterator[LockState]:
        """Be the only one on this host that works on ``key``, if that can be had: see what is yielded.

        Waits while the one who has it shows life and the entry is not there; ``timeout`` is the longest silence, in
        seconds (by default the variable's). A thread that is inside already gets its state again. Look ``key`` up
        once more inside, whatever the state.
        """
        states: dict[str, LockState] = self._nested.__dict__
        if checked_key(key) in states:
            yield states[key]
            return
        folder = self._inner("locks")
        if folder is None:
            lock, state = None, LockState.UNAVAILABLE
        else:
            lock = KeyLock(folder / f"{key}.lock", folders.mode_of(folder) & 0o666)
            marker = self.root / key / COMPLETE_MARKER
            state = lock.acquire(envs.COMPILATION_TIMEOUT.get() if timeout is None else timeout, marker.exists)
        states[key] = state
        try:
            yield state
        finally:
            del states[key]
            if lock is not None:
                lock.release()

    def shared_folder(self, name: str) -> Path | None:
        """A folder for other things that this host's processes share, such as slots; None where there is none."""
        return self._inner(name)

    def _inner(self, name: str) -> Path | None:
        """A folder inside the root, made at need; None where the tier can't be written to."""
        if self._refusal is not None:
            return None
        folder = self.root / f".{name}"
        try:
            if not folder.is_dir():
                folders.make_folder(self.root)
                folders.check_trusted(self.root)
                folders.make_inner(folder)
        except OSError as error:
            self._refuse_or_raise(error)
            return None
        return folder

    def _scratch(self, key: str) -> Scratch | None:
        """A new folder to make an entry in; None where the tier can't be written to."""
        folder = self._inner("staging")
        if folder is None:
            return None
        try:
            sweep(folder)
            if folders.is_full(folder):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
            return Scratch(folder, key)
        except OSError as error:
            self._refuse_or_raise(error)
            return None

    def _quarantine(self, key: str, found: Examined) -> None:
        """Move the entry of ``key`` away, unless it has become whole in the meantime; else raise ``OSError``."""
        path, folder = self.root / key, self._inner("quarantine")
        if folder is None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        aside = folder / f"{key}.{secrets.token_hex(8)}"
        if publish.move_out(path, aside, Failpoint.SET_ASIDE, lambda found: examine(found, key).metadata is not None):
            self._warn_once(key, f"The cache entry {path} is {found.state.value} ({found.reason}): moved to {aside}.")
            aside.with_name(f"{aside.name}.reason.txt").write_text(f"{found.state.value}: {found.reason}\n")

    def _refuse_or_raise(self, error: OSError) -> None:
        if not folders.refuses_writing(error, self.root):
            raise error
        self._refuse(str(error))

    def _refuse(self, reason: str) -> None:
        if self._refusal is None:
            self._refusal = reason
            logger.warning(
                "The cache folder %s can't be written to (%s). Its entries are used; new ones are kept in a temporary "
                "folder, for this process only.",
                self.root,
                reason,
            )

    def _fallback(self) -> PrivateTier:
        # By process id: what a forked child stores must not go when its parent ends, and its folder with it.
        process = os.getpid()
        if process not in self._privates:
            self._privates.setdefault(process, PrivateTier())
        return self._privates[process]

    def _warn_once(self, key: str, message: str) -> None:
        if (key, message) not in self._warned:
            self._warned.add((key, message))
            logger.warning("%s", message)


class PrivateTier(LocalTier):
    """A tier of this process alone, gone when it ends, without locks: what is used where there is no cache."""

    name = "private"

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        try:
            sweep(parent, _is_mine, f"{_PRIVATE_PREFIX}.*")
            scratch = Scratch(parent, _PRIVATE_PREFIX)
        except OSError as error:
            raise CacheError(
                f"nothing can be stored, neither in the cache nor in {parent} ({error}); "
                "name a folder that can be written to with VLLM_CACHE_ROOT or TMPDIR"
            ) from error
        atexit.register(scratch.close)
        super().__init__(scratch.path)

    @contextmanager
    def lock(self, key: str, timeout: float | None = None) -> Iterator[LockState]:
        """Nobody else can see this tier, so there is nobody to exclude."""
        yield LockState.UNAVAILABLE

    def shared_folder(self, name: str) -> Path | None:
        """None: nothing here is shared."""
        return None

    def _fallback(self) -> PrivateTier:
        raise CacheError(f"{self.root} can't be written to ({self._refusal}); name another folder with TMPDIR")


def _is_mine(folder: Path) -> bool:
    found = folder.lstat()
    return found.st_uid == os.geteuid() and folder.is_dir() and not folder.is_symlink()
