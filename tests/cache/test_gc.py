"""Making room: what goes, what stays, and that nothing goes that a process uses."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from entries import ARTIFACT, KEY, OTHER, fill, fill_other
from processes import Actor
from test_entry import flip
from test_local import names

from vllm_neuron.cache.entry import EntryState, examine
from vllm_neuron.cache.local.gc import collect
from vllm_neuron.cache.local.pins import Pin, pinned
from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.cache.retention import Policy
from vllm_neuron.errors import CacheError

Start = Callable[..., Actor]
DAY = 86400.0


@pytest.fixture
def local(tmp_path: Path) -> LocalTier:
    """A tier with KEY, stored ten days ago, and OTHER, stored now."""
    tier = LocalTier(tmp_path / "root")
    tier.build(KEY, fill)
    tier.build(OTHER.digest, fill_other)
    then = time.time() - 10 * DAY
    os.utime(tier.root / KEY / ".compilation_complete", (then, then))
    return tier


@pytest.mark.parametrize(
    ("policy", "gone"),
    [
        (Policy(max_age=5 * DAY), [KEY]),
        (Policy(max_age=20 * DAY), []),
        (Policy(max_bytes=0), [KEY, OTHER.digest]),
        (Policy(max_bytes=2 * len(ARTIFACT)), [KEY]),
        (Policy(max_bytes=1 << 30), []),
        (Policy(keep=[OTHER.digest]), [KEY]),
        (Policy(keep=[KEY]), [OTHER.digest]),
        (Policy(other_version=lambda metadata: metadata.level == 3), [OTHER.digest]),
    ],
)
def test_what_goes(local: LocalTier, policy: Policy, gone: list[str]) -> None:
    planned = collect(local, policy, dry_run=True)
    assert [one.key for one in planned] == gone
    assert local.keys() == sorted([KEY, OTHER.digest]), "a dry run removes nothing"
    assert collect(local, policy) == planned
    assert local.keys() == sorted({KEY, OTHER.digest} - set(gone))
    assert names(local.root / ".staging") == []
    assert all(one.reason and one.bytes > len(ARTIFACT) for one in planned)


def test_what_a_process_uses_stays(local: LocalTier, actor: Start) -> None:
    user = actor("use", local.root, KEY)
    assert user.hear() == "in use"
    (kept, gone) = collect(local, Policy(keep=()))
    assert (kept.key, kept.kept, gone.key, gone.kept) == (KEY, "in use", OTHER.digest, "")
    assert local.keys() == [KEY]
    user.process.kill()
    user.process.wait()
    assert [one.kept for one in collect(local, Policy(keep=()))] == [""]
    assert local.keys() == []
    assert names(local.root / ".in-use") == []


def test_nothing_goes_while_a_process_starts(local: LocalTier) -> None:
    claim = Pin(local)
    assert pinned(local) is None
    with pytest.raises(CacheError, match="a process is just starting"):
        collect(local, Policy(keep=()))
    assert [one.kept for one in collect(local, Policy(keep=()), dry_run=True)] == ["in use", "in use"]
    claim.restrict([OTHER.digest])
    assert pinned(local) == {OTHER.digest}
    claim.close()
    assert pinned(local) == set()
    assert len(collect(local, Policy(keep=()))) == 2


def test_several_at_once_and_a_builder(local: LocalTier) -> None:
    """Each removes what it finds, and none stumbles over what another has just removed."""
    done = threading.Event()

    def remove() -> int:
        gone = 0
        while not done.is_set():
            gone += sum(not one.kept for one in collect(LocalTier(local.root), Policy(keep=())))
        return gone

    with ThreadPoolExecutor(3) as pool:
        removers = [pool.submit(remove) for _ in range(2)]
        for _ in range(30):
            tier = LocalTier(local.root)
            with tier.lock(KEY):
                if tier.lookup(KEY) is None:
                    tier.build(KEY, fill)
        done.set()
        assert sum(remover.result() for remover in removers) > 1
    for key in local.keys():
        assert examine(local.root / key, key).state is EntryState.COMPLETE
    assert names(local.root / ".staging") == []


def test_entry_that_is_being_worked_on_stays(local: LocalTier, actor: Start) -> None:
    holder = actor("hold", local.root / ".locks" / f"{KEY}.lock") if (local.root / ".locks").exists() else None
    if holder is None:
        with local.lock(KEY):
            pass
        holder = actor("hold", local.root / ".locks" / f"{KEY}.lock")
    assert holder.hear() == "HELD"
    assert [one.kept for one in collect(local, Policy(keep=[OTHER.digest]))] == ["being worked on"]
    holder.tell()
    assert holder.hear() == "released"
    assert [one.kept for one in collect(local, Policy(keep=[OTHER.digest]))] == [""]


def test_locks_that_nobody_holds_and_old_quarantine_go(local: LocalTier) -> None:
    with local.lock(KEY):
        flip(local.root / KEY / "graph.vmfb")
        assert LocalTier(local.root).lookup(KEY) is None
    assert len(names(local.root / ".quarantine")) == 2
    collect(local, Policy(max_age=DAY))
    assert names(local.root / ".locks") == []
    assert len(names(local.root / ".quarantine")) == 2
    for path in (local.root / ".quarantine").iterdir():
        os.utime(path, (0, 0))
    collect(local, Policy(max_age=DAY))
    assert names(local.root / ".quarantine") == []


def test_waiter_finds_a_lock_again_whose_file_was_removed(local: LocalTier, actor: Start) -> None:
    with local.lock(KEY):
        pass
    collect(local, Policy(max_age=100 * DAY))
    with local.lock(KEY) as state:
        assert state.held
        other = actor("wait", local.root / ".locks" / f"{KEY}.lock", 60)
        assert other.hear() == "waiting"
    assert other.hear() == "HELD"
