"""Making room in the local tier: which entries go, and how, without taking one from a process that uses it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_neuron.cache import folders, in_use, steps
from vllm_neuron.cache.entry import EntryState, complete_keys, examine
from vllm_neuron.cache.local import LocalTier
from vllm_neuron.cache.lock import KernelLock
from vllm_neuron.cache.metadata import COMPLETE_MARKER, Metadata
from vllm_neuron.cache.scratch import Scratch, sweep
from vllm_neuron.cache.steps import Step
from vllm_neuron.errors import CacheError

_LEFTOVERS = ("quarantine", "misses")


@dataclass(frozen=True)
class Policy:
    """What is to go: an entry goes where any of these says so.

    ``max_bytes`` is the most that all entries together may take: the oldest go first. ``max_age`` is in seconds since
    an entry was stored here; what lies in quarantine goes by it too. ``keep`` are the only keys that stay.
    ``other_version`` says of an entry's metadata that another release made it.
    """

    max_bytes: int | None = None
    max_age: float | None = None
    keep: Collection[str] | None = None
    other_version: Callable[[Metadata], bool] | None = None


@dataclass(frozen=True)
class Candidate:
    """An entry that was looked at. ``reason`` says why it goes; '' where it stays; ``kept`` why it stays after all.

    ``failed`` says that it stays because it could not be removed.
    """

    key: str
    bytes: int
    stored: float
    reason: str = ""
    kept: str = ""
    failed: bool = False


def collect(local: LocalTier, policy: Policy, *, dry_run: bool = False) -> list[Candidate]:
    """Remove from ``local`` what ``policy`` says, except what is in use; return what was to go, oldest first.

    Raises ``CacheError`` where a process is just starting on this tier: what it will use is not known yet.
    """
    found = (_look(local.root / key, policy) for key in _keys(local.root))
    chosen = [one for one in judge((one for one in found if one is not None), policy) if one.reason]
    used = in_use.claimed(local)
    if used is None and chosen and not dry_run:
        raise CacheError(f"a process is just starting on {local.root}, and may use any entry; try again in a moment")
    steps.reached(Step.CHOSEN)
    done = []
    for candidate in chosen:
        kept = "in use" if used is None or candidate.key in used else ""
        if not kept and not dry_run:
            kept = _remove(local, candidate.key)
        done.append(replace(candidate, kept=kept))
    if not dry_run:
        _trim(local, policy.max_age)
    return done


def judge(candidates: Iterable[Candidate], policy: Policy) -> list[Candidate]:
    """All candidates, oldest first, where those that are too many have a reason to go too."""
    found = sorted(candidates, key=lambda one: one.stored)
    if policy.max_bytes is None:
        return found
    left = sum(one.bytes for one in found if not one.reason)
    judged = []
    for one in found:
        if not one.reason and left > policy.max_bytes:
            left -= one.bytes
            one = replace(one, reason="the oldest, and there are too many bytes")
        judged.append(one)
    return judged


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


def reason_for(key: str, stored: float, policy: Policy, is_of_other_version: Callable[[], bool]) -> str:
    """Why ``policy`` lets an entry go, apart from its bytes; '' where it does not. The version is asked for at need."""
    if policy.keep is not None and key not in policy.keep:
        return "not in the plan"
    if policy.max_age is not None and time.time() - stored > policy.max_age:
        return "too old"
    if policy.other_version is not None and is_of_other_version():
        return "of another version"
    return ""


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
    path = local.root / key
    try:
        path.rename(aside)
    except FileNotFoundError:
        return ""
    steps.reached(Step.REMOVING)
    # A process that has come since we looked has either found the entry, and said so, or will not find it.
    used = in_use.claimed(local)
    if used is None or key in used:
        with suppress(OSError):  # Someone has stored it again in the meantime. Then that one stays.
            aside.rename(path)
        return "in use"
    steps.reached(Step.CLAIMS_READ_AGAIN)
    return ""


def _trim(local: LocalTier, max_age: float | None) -> None:
    """Remove what nobody waits for: temporary folders and locks of the dead, and old things in quarantine."""
    sweep(local.root / ".staging")
    steps.reached(Step.REMOVED)
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
