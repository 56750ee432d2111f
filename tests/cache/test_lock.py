"""One winner per key, with real processes and real signals."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import Actor

from vllm_neuron.cache.local.key_lock import LEAST_TIMEOUT_SECONDS, KeyLock, LockState

Start = Callable[..., Actor]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "key.lock"


def test_waiter_takes_over_from_a_killed_holder(actor: Start, path: Path) -> None:
    holder = actor("hold", path)
    assert holder.hear() == "HELD"
    waiter = actor("wait", path, 600)
    assert waiter.hear() == "waiting"
    inode = path.stat().st_ino
    holder.signal(signal.SIGKILL)
    # The waiter would wait for ten minutes for a sign of life; the limit of the test is shorter by far.
    assert waiter.hear() == "HELD"
    assert path.stat().st_ino == inode


def test_waiter_goes_on_as_long_as_the_holder_shows_life(actor: Start, path: Path) -> None:
    holder = actor("hold", path)
    assert holder.hear() == "HELD"
    waiter = actor("wait", path, LEAST_TIMEOUT_SECONDS)
    assert waiter.hear() == "waiting"
    time.sleep(2 * LEAST_TIMEOUT_SECONDS)
    holder.tell()
    assert waiter.hear() == "HELD"


def test_waiter_goes_on_alone_where_the_holder_is_silent(actor: Start, path: Path) -> None:
    holder = actor("hold", path)
    assert holder.hear() == "HELD"
    holder.signal(signal.SIGSTOP)
    waiter = actor("wait", path, LEAST_TIMEOUT_SECONDS)
    assert [waiter.hear(), waiter.hear()] == ["waiting", "SILENT"]
    holder.signal(signal.SIGCONT)
    third = actor("wait", path, 600)
    assert third.hear() == "waiting"
    holder.tell()
    assert holder.hear() == "released"
    assert third.hear() == "HELD"


def test_silence_is_waited_for_once(actor: Start, path: Path) -> None:
    holder = actor("hold", path)
    assert holder.hear() == "HELD"
    holder.signal(signal.SIGSTOP)
    waiter = KeyLock(path)
    assert waiter.acquire(LEAST_TIMEOUT_SECONDS) is LockState.SILENT
    # Ten minutes, far more than a test may take, if it waited again.
    assert waiter.acquire(600) is LockState.SILENT
    holder.signal(signal.SIGCONT)
    count = path.stat().st_size
    while path.stat().st_size == count:
        time.sleep(0.01)
    outcome: list[LockState] = []
    thread = threading.Thread(target=lambda: outcome.append(waiter.acquire(600)))
    thread.start()
    holder.tell()
    thread.join()
    assert outcome == [LockState.HELD]
    waiter.release()


def test_sleep_of_the_whole_machine_is_no_silence(actor: Start, path: Path) -> None:
    holder = actor("hold", path)
    assert holder.hear() == "HELD"
    waiter = actor("wait", path, LEAST_TIMEOUT_SECONDS)
    assert waiter.hear() == "waiting"
    time.sleep(0.5)  # Now it is in the middle of its wait.
    for number in (signal.SIGSTOP, signal.SIGCONT):
        waiter.signal(number)
        holder.signal(number)
        time.sleep(2 * LEAST_TIMEOUT_SECONDS)
    holder.tell()
    assert waiter.hear() == "HELD"


def test_forked_child_does_not_keep_the_lock_of_its_dead_parent(actor: Start, path: Path) -> None:
    holder = actor("hold_with_child", path)
    assert holder.hear() == "HELD"
    child = int(holder.hear())
    holder.signal(signal.SIGKILL)
    try:
        waiter = actor("wait", path, 600)
        assert [waiter.hear(), waiter.hear()] == ["waiting", "HELD"]
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_lock_file_is_never_unlinked(path: Path) -> None:
    inodes = set()
    for _ in range(3):
        lock = KeyLock(path)
        assert lock.acquire(60).held
        inodes.add(path.stat().st_ino)
        lock.release()
        inodes.add(path.stat().st_ino)
    assert len(inodes) == 1


def test_lock_of_a_cache_that_was_removed_excludes_nobody(tmp_path: Path, actor: Start) -> None:
    path = tmp_path / "locks" / "key.lock"
    path.parent.mkdir()
    old = KeyLock(path)
    assert old.acquire(60).held
    waiter = actor("hold", path)
    time.sleep(1)  # It waits for the old file.
    shutil.rmtree(path.parent)
    path.parent.mkdir()
    assert waiter.hear() == "HELD"
    old.release()
    assert not kernel_can_lock(path), "the waiter holds the file that newcomers find"
    waiter.tell()
    assert waiter.hear() == "released"
    assert kernel_can_lock(path)


def kernel_can_lock(path: Path) -> bool:
    """Asks the kernel itself, beside our code."""
    with path.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_threads_of_one_process_exclude_each_other(path: Path) -> None:
    inside, most = 0, []
    guard = threading.Lock()

    def work() -> None:
        nonlocal inside
        lock = KeyLock(path)
        assert lock.acquire(60).held
        with guard:
            inside += 1
            most.append(inside)
        time.sleep(0.01)
        with guard:
            inside -= 1
        lock.release()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8


def test_place_where_no_lock_can_be_had(tmp_path: Path) -> None:
    assert KeyLock(tmp_path / "no" / "such" / "folder.lock").acquire(60) is LockState.UNAVAILABLE
    (tmp_path / "link.lock").symlink_to(tmp_path / "elsewhere")
    assert KeyLock(tmp_path / "link.lock").acquire(60) is LockState.UNAVAILABLE
    assert not (tmp_path / "elsewhere").exists()


def test_lock_file_has_the_mode_that_is_asked_for(path: Path) -> None:
    old = os.umask(0o077)
    try:
        lock = KeyLock(path, 0o664)
        assert lock.acquire(60).held
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o664
    lock.release()
