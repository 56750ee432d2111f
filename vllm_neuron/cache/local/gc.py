"""Making room in the local tier: which entries go, and how, without taking one from a process that uses it."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from vllm_neuron.cache import failpoint
from vllm_neuron.cache.disk import folders
from vllm_neuron.cache.disk.lock import KernelLock
from vllm_neuron.cache.disk.scratch import Scratch, sweep
from vllm_neuron.cache.entry import EntryState, complete_keys, examine
from vllm_neuron.cache.failpoint import Failpoint
from vllm_neuron.cache.local.pins import pinned
from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.cache.metadata import COMPLETE_MARKER
from vllm_neuron.cache.retention import Candidate, Policy, judge, reason_for
from vllm_neuron.cache.store import publish
from vllm_neuron.errors import CacheError

_LEFTOVERS = ("quarantine", "misses")


def collect(local: LocalTier, policy: Policy, *, dry_run: bool = False) -> list[Candidate]:
    """Remove from ``local`` what ``policy`` says, except what is in use; return what was to go, oldest first.

    Raises ``CacheError`` where a process is just starting on this tier: what it will use is not known yet.
    """
    found = (_look(local.root / key, policy) for key in _keys(local.root))
    chosen = [one for one in judge((one for one in found if one is not None), policy) if one.reason]
    used = pinned(local)
    if used is None and chosen and not dry_run:
        raise CacheError(f"a process is just starting on {local.root}, and may use any entry; try again in a moment")
    failpoint.reached(Failpoint.CHOSEN)
    done = []
    for candidate in chosen:
        kept = "in use" if used is None or candidate.key in used else ""
        if not kept and not dry_run:
            kept = _remove(local, candidate.key)
        done.append(replace(candidate, kept=kept))
    if not dry_run:
        _trim(local, policy.max_age)
    return done


def _look(path: Path, policy: Policy) -> Candidate | None:
    """An entry, and why it is to go; None where it has just gone by itself."""
    try:
        found = examine(path, path.name, digests=False)
        size = sum(file.lstat().st_size for file in path.iterdir())
        stored = (path / COMPLETE_MARKER).stat().st_mtime
    except FileNotFoundError:
        return None

    def other() -> bool:
        if found.metadata is None or policy.other_version is None:
            return found.state is EntryState.FOREIGN
        return policy.other_version(found.metadata)

    return Candidate(path.name, size, stored, reason_for(path.name, stored, policy, other))


def _keys(root: Path) -> list[str]:
    return complete_keys(root) if root.is_dir() else []


def _remove(local: LocalTier, key: str) -> str:
    """Remove an entry. Returns why it was not removed, or ''."""
    locks, staging = local.shared_folder("locks"), local.shared_folder("staging")
    if locks is None or staging is None:
        raise CacheError(f"nothing can be removed from {local.root}: it can't be written to")
    lock = KernelLock(locks / f"{key}.lock", folders.mode_of(locks) & 0o666)
    try:
        if not lock.try_acquire():
            return "being worked on"
        scratch = Scratch(staging, f"{key}.removed")
        try:
            return _move_out(local, key, scratch.beside("entry"))
        finally:
            scratch.close()
    finally:
        lock.release()


def _move_out(local: LocalTier, key: str, aside: Path) -> str:
    def in_use(_: Path) -> bool:
        # A process that has come since we looked has either found the entry, and said so, or will not find it.
        used = pinned(local)
        return used is None or key in used

    path = local.root / key
    moved = publish.move_out(path, aside, Failpoint.REMOVING, in_use)
    failpoint.reached(Failpoint.PINS_READ_AGAIN)
    return "in use" if not moved and path.exists() else ""


def _trim(local: LocalTier, max_age: float | None) -> None:
    """Remove what nobody waits for: temporary folders and locks of the dead, and old things in quarantine."""
    sweep(local.root / ".staging")
    failpoint.reached(Failpoint.REMOVED)
    for path in (local.root / ".locks").glob("*.lock"):
        lock = KernelLock(path)
        with suppress(OSError):
            # Only while it is held: who opens it later finds that it is no longer in its place, and makes another.
            if lock.try_acquire():
                path.unlink()
        lock.release()
    if max_age is None:
        return
    for path in (path for name in _LEFTOVERS for path in (local.root / f".{name}").glob("*")):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > max_age:
                folders.remove(path)
