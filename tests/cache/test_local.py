"""The local tier: what a hit costs the disk, what a death leaves, and whom it trusts."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from entries import ABI, ARTIFACT, KEY, OTHER, PARTS, fill
from processes import Actor

from vllm_neuron.cache.entry import write_entry
from vllm_neuron.cache.local.key_lock import LockState
from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.errors import CacheError, ConfigError

Start = Callable[..., Actor]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "neuron" / "compile_cache"


def snapshot(root: Path) -> dict[str, tuple[int, int, int]]:
    stats = {str(path): path.lstat() for path in (root, *root.rglob("*"))}
    return {path: (found.st_ino, found.st_mtime_ns, found.st_ctime_ns) for path, found in stats.items()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@contextmanager
def umask(value: int) -> Iterator[None]:
    old = os.umask(value)
    try:
        yield
    finally:
        os.umask(old)


def test_entry_is_there_after_it_is_built_and_not_before(root: Path) -> None:
    tier = LocalTier(root)
    assert tier.lookup(KEY) is None
    assert not root.exists(), "a miss makes nothing"
    entry = tier.build(KEY, fill)
    assert entry.path == root / KEY
    assert tier.keys() == [KEY]
    found = LocalTier(root).lookup(KEY)
    assert found is not None
    assert found.artifact_path.read_bytes() == ARTIFACT
    assert names(root / ".staging") == []


def test_hit_writes_nothing_and_takes_no_lock(root: Path, actor: Start) -> None:
    LocalTier(root).build(KEY, fill)
    shutil.rmtree(root / ".staging")
    before = snapshot(root)
    code = f"from pathlib import Path; from vllm_neuron.cache.local.tier import LocalTier; \
             assert LocalTier(Path({str(root)!r})).lookup({KEY!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert snapshot(root) == before


def test_unfinished_work_is_never_visible(root: Path) -> None:
    tier = LocalTier(root)
    with pytest.raises(ZeroDivisionError), tier.staging(KEY) as folder:
        fill(folder)
        assert LocalTier(root).lookup(KEY) is None
        assert LocalTier(root).keys() == []
        raise ZeroDivisionError
    assert names(root / ".staging") == []
    with pytest.raises(CacheError, match="in progress"), tier.staging(KEY) as folder:
        tier.publish(folder, KEY)
    with pytest.raises(CacheError, match=f"it is the entry of key {KEY}"):
        tier.build(OTHER.digest, fill)
    assert tier.keys() == []


def test_what_a_killed_process_leaves_goes_with_the_next_one(root: Path, actor: Start) -> None:
    dead, alive = actor("stage", root), actor("stage", root)
    dead_folder, alive_folder = Path(dead.hear()), Path(alive.hear())
    dead.signal(signal.SIGKILL)
    dead.process.wait()
    assert dead_folder.exists()
    LocalTier(root).build(KEY, fill)
    assert not dead_folder.parent.exists()
    assert alive_folder.exists()
    assert LocalTier(root).keys() == [KEY]


def test_forked_child_does_not_remove_the_work_of_its_parent(root: Path) -> None:
    code = f"""
import os, sys
from pathlib import Path
from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.cache.local.key_lock import LockState
with LocalTier(Path({str(root)!r})).staging({KEY!r}) as folder:
    child = os.fork()
    if child == 0:
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    print(folder.exists())
print(folder.exists())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_second_publisher_uses_what_the_first_one_stored(root: Path) -> None:
    first, second = LocalTier(root), LocalTier(root)
    with second.staging(KEY) as folder:
        fill(folder, b"second")
        first.build(KEY, lambda path: fill(path, b"first"))
        entry = second.publish(folder, KEY)
    assert entry.artifact_path.read_bytes() == b"first"
    assert names(root / ".staging") == names(root / ".quarantine") == []


def test_damaged_entry_goes_to_quarantine_and_is_made_again(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = LocalTier(root)
    path = tier.build(KEY, fill).artifact_path
    path.write_bytes(b"\0" * len(ARTIFACT))
    assert tier.lookup(KEY) is None
    assert tier.lookup(KEY) is None
    assert not (root / KEY).exists()
    aside, reason = sorted((root / ".quarantine").iterdir())
    assert (aside / "graph.vmfb").read_bytes() == b"\0" * len(ARTIFACT)
    assert "digest of graph.vmfb" in reason.read_text()
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert str(root / KEY) in warnings[0]
    assert str(aside) in warnings[0]
    assert tier.build(KEY, fill).artifact_path.read_bytes() == ARTIFACT
    assert tier.lookup(KEY) is not None


@pytest.mark.parametrize("kind", ["unfinished", "empty", "damaged", "foreign", "link", "file"])
def test_publishing_replaces_what_is_not_whole(root: Path, kind: str) -> None:
    target = root / KEY
    target.parent.mkdir(parents=True)
    if kind == "link":
        target.symlink_to(root.parent)
    elif kind == "file":
        target.write_text("a file")
    else:
        target.mkdir()
    if kind in ("damaged", "foreign"):
        fill(target)
    if kind == "damaged":
        (target / "graph.vmfb").unlink()
    if kind == "foreign":
        (target / "metadata.json").write_text('{"format_version": 99}')
        digest = subprocess.run(["sha256sum", target / "metadata.json"], capture_output=True, text=True, check=True)
        (target / ".compilation_complete").write_text(digest.stdout.split()[0] + "\n")
    if kind == "unfinished":
        (target / "graph.vmfb").write_bytes(b"half")
    tier = LocalTier(root)
    assert tier.lookup(KEY) is None
    assert tier.build(KEY, fill).artifact_path == target / "graph.vmfb"
    assert LocalTier(root).lookup(KEY) is not None
    assert root.parent.is_dir()


def test_foreign_entry_stays_and_is_warned_about_once(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    test_publishing_replaces_what_is_not_whole(root, "foreign")
    shutil.rmtree(root / KEY)
    kept = next(path for path in (root / ".quarantine").iterdir() if path.is_dir())
    kept.rename(root / KEY)
    caplog.clear()
    tier = LocalTier(root)
    assert tier.lookup(KEY) is None
    assert tier.lookup(KEY) is None
    assert (root / KEY).exists()
    assert ["format version 99" in record.getMessage() for record in caplog.records] == [True]


def test_one_winner_among_threads(root: Path) -> None:
    tier = LocalTier(root)
    made = []

    def work() -> None:
        with tier.lock(KEY):
            if tier.lookup(KEY) is None:
                made.append(tier.build(KEY, fill))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_all_who_wait_go_on_at_once_when_the_entry_is_there(root: Path) -> None:
    tier = LocalTier(root)
    states = []

    def wait() -> None:
        with tier.lock(KEY) as state:
            states.append(state)
            assert tier.lookup(KEY) is not None

    threads = [threading.Thread(target=wait) for _ in range(8)]
    with tier.lock(KEY):
        for thread in threads:
            thread.start()
        tier.build(KEY, fill)
        for thread in threads:
            thread.join()  # The lock is still held.
    assert states == [LockState.DONE] * 8


def test_lock_may_be_taken_again_inside(root: Path) -> None:
    tier = LocalTier(root)
    with tier.lock(KEY) as outer, tier.lock(KEY) as inner:
        assert outer.held
        assert inner.held
    with tier.lock(KEY) as again:
        assert again.held


def test_new_root_is_private_whatever_the_umask(root: Path) -> None:
    for mask in (0o000, 0o077):
        with umask(mask):
            entry = LocalTier(root).build(KEY, fill)
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in entry.path.iterdir()} == {0o600}
        assert LocalTier(root).lookup(KEY) is not None
        shutil.rmtree(root)


def test_root_that_is_shared_stays_shared_under_a_strict_umask(other_user: int, actor: Start) -> None:
    # Not below /tmp: there, no folder of several users is trusted.
    root = Path(tempfile.mkdtemp(prefix="vllm-neuron-tests-", dir="/srv"))
    try:
        share(root, other_user, actor)
    finally:
        shutil.rmtree(root)


def share(root: Path, other_user: int, actor: Start) -> None:
    root.chmod(0o2775)
    os.chown(root, 0, other_user)
    with umask(0o077):
        LocalTier(root).build(KEY, fill)
        with LocalTier(root).lock(KEY) as state:
            assert state.held
    member = actor("as_user", other_user, "build", root)
    assert [member.hear() for _ in range(4)] == ["hit", "HELD", str(root / KEY), "found"]
    member.process.wait()
    (root / KEY / "graph.vmfb").write_bytes(b"rubbish")
    # A member can't move away what another one owns; it must not be stopped by that.
    member = actor("as_user", other_user, "build", root)
    words = [member.hear() for _ in range(4)]
    member.process.wait()
    assert words[:2] == ["miss", "HELD"]
    assert not Path(words[2]).is_relative_to(root)
    assert words[3] == "found"


def test_folder_of_another_user_below_a_public_one_is_refused(tmp_path: Path, other_user: int) -> None:
    public = tmp_path / "tmp"
    public.mkdir()
    public.chmod(0o1777)
    theirs = public / "vllm_neuron_wdir_me"
    theirs.mkdir()
    os.chown(theirs, other_user, -1)
    with pytest.raises(ConfigError, match=f"{theirs} belongs to user {other_user}.*VLLM_CACHE_ROOT"):
        LocalTier(theirs / "neuron" / "compile_cache")
    link = public / "link"
    link.symlink_to(tmp_path)
    os.lchown(link, other_user, -1)
    with pytest.raises(ConfigError, match=f"{link} belongs to user {other_user}"):
        LocalTier(link / "cache")


def test_folder_that_others_can_write_to_is_refused(tmp_path: Path, other_user: int) -> None:
    public = tmp_path / "tmp"
    mine = public / "mine"
    mine.mkdir(parents=True)
    public.chmod(0o1777)
    LocalTier(mine / "cache").build(KEY, fill)
    mine.chmod(0o775)
    os.chown(mine, -1, os.getegid())
    LocalTier(mine / "cache")
    os.chown(mine, -1, other_user)
    with pytest.raises(ConfigError, match=f"other users can write to {mine}; run `chmod go-w {mine}`"):
        LocalTier(mine / "cache")
    with pytest.raises(ConfigError, match=f"other users can write to {public}"):
        LocalTier(public)


@pytest.mark.parametrize("below", ["", "neuron/compile_cache"])
def test_root_that_is_a_file(tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match=f"{file}.* is not a folder.*VLLM_CACHE_ROOT"):
        LocalTier(file / below)


@pytest.mark.parametrize("key", ["", "..", "../escape", "a/b", KEY.upper()])
def test_what_is_not_a_key_is_refused(root: Path, key: str) -> None:
    with pytest.raises(CacheError, match="is not a key"):
        LocalTier(root).lookup(key)


def test_result_of_an_error_in_filling_is_that_error(root: Path) -> None:
    def fail(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", "/usr/bin/some-compiler")

    tier = LocalTier(root)
    with pytest.raises(PermissionError, match="some-compiler"):
        tier.build(KEY, fail)
    assert tier.writable


def open_up(root: Path) -> None:
    """Make ``root``, and let everyone pass through the folders above it that only this test's user may enter."""
    root.mkdir(parents=True)
    for step in root.parents:
        if step.stat().st_uid == os.geteuid() and not step.stat().st_mode & stat.S_IXOTH:
            step.chmod(step.stat().st_mode | 0o011)


def test_finished_folder_from_elsewhere_is_adopted(root: Path, tmp_path: Path) -> None:
    staged = tmp_path / "elsewhere"
    staged.mkdir()
    (staged / "graph.mlir").write_bytes(b"module @graph {}\n" * 8)
    (staged / "graph.vmfb").write_bytes(b"artifact")
    write_entry(staged, key=PARTS, abi=ABI)
    from vllm_neuron.cache.entry import read_entry

    copy = LocalTier(root).adopt(read_entry(staged, KEY))
    assert copy.path == root / KEY
    assert copy.artifact_path.read_bytes() == b"artifact"
    assert (staged / "graph.vmfb").exists()
