"""Full disks, read-only file systems and folders of other users: entries are used, and work goes on elsewhere."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from entries import ARTIFACT, KEY, OTHER, fill
from processes import Actor
from remotes import folder_tier
from test_local import names, open_up

from vllm_neuron.cache.entry import EntryState, examine
from vllm_neuron.cache.local.key_lock import LockState
from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.cache.tiers import TieredCache
from vllm_neuron.errors import CacheError

Start = Callable[..., Actor]
Mount = Callable[..., None]
BIG = 8 << 20


@pytest.fixture
def disk(tmp_path: Path, mount: Mount) -> Path:
    """A disk of 4 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount("-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs", path)
    return path


@pytest.fixture
def read_only(tmp_path: Path, mount: Mount) -> Callable[[Path], Path]:
    """Shows a folder once more, read-only."""

    def show(root: Path) -> Path:
        path = tmp_path / "read-only"
        path.mkdir()
        mount("--bind", root, path)
        mount("-o", "remount,ro,bind", path)
        return path

    return show


def fill_big(folder: Path) -> None:
    fill(folder, bytes(BIG))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_full_disk_in_the_middle_of_the_work(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = LocalTier(disk / "cache")
    entry = tier.build(KEY, fill_big)
    assert entry.artifact_path.stat().st_size == BIG
    assert not entry.path.is_relative_to(disk)
    found = tier.lookup(KEY)
    assert found is not None
    assert found.path == entry.path
    assert tier.keys() == [KEY]
    assert not tier.writable
    assert len(warnings(caplog)) == 1
    assert "can't be written to" in warnings(caplog)[0]
    assert "No space left" in warnings(caplog)[0]
    assert LocalTier(disk / "cache").lookup(KEY) is None, "nothing half is visible to others"
    assert names(disk / "cache" / ".staging") == []


def test_disk_that_is_full_from_the_start(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = LocalTier(disk / "cache")
    tier.build(KEY, fill)
    with (disk / "ballast").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(1024))
    fresh = LocalTier(disk / "cache")
    assert fresh.lookup(KEY) is not None
    with fresh.lock(KEY) as state:
        assert state.held, "the sign of life needs no space"
    with fresh.staging(KEY) as folder:
        fill(folder)
        entry = fresh.publish(folder, KEY)
    assert entry.artifact_path.read_bytes() == ARTIFACT


def test_compiler_that_fails_on_a_full_disk_runs_again_elsewhere(disk: Path) -> None:
    """A compiler reports in its own words; what the disk has left tells."""
    calls = []

    def compile_into(folder: Path) -> None:
        calls.append(folder)
        with suppress(OSError):
            return fill_big(folder)
        raise RuntimeError("the compiler ended with 1")

    entry = LocalTier(disk / "cache").build(KEY, compile_into)
    assert len(calls) == 2
    assert entry.artifact_path.stat().st_size == BIG


def test_hit_on_a_read_only_file_system(
    tmp_path: Path, read_only: Callable[[Path], Path], caplog: pytest.LogCaptureFixture
) -> None:
    LocalTier(tmp_path / "cache").build(KEY, fill)
    tier = LocalTier(read_only(tmp_path / "cache"))
    found = tier.lookup(KEY)
    assert found is not None
    assert found.path == tier.root / KEY
    assert warnings(caplog) == []
    assert not tier.writable
    other = tier.lookup(OTHER.digest)
    assert other is None
    with tier.lock(OTHER.digest) as state:
        assert not state.held


@pytest.mark.parametrize("filled", [True, False], ids=["used before", "new"])
def test_build_on_a_read_only_file_system(
    tmp_path: Path, read_only: Callable[[Path], Path], caplog: pytest.LogCaptureFixture, filled: bool
) -> None:
    source = tmp_path / "cache"
    source.mkdir(mode=0o700)
    if filled:
        with LocalTier(source).staging(KEY), LocalTier(source).lock(KEY):
            pass
    tier = LocalTier(read_only(source))
    with tier.lock(KEY) as state:
        assert not state.held
        entry = tier.build(KEY, fill)
    assert entry.artifact_path.read_bytes() == ARTIFACT
    assert tier.lookup(KEY) is not None
    assert len(warnings(caplog)) == 1
    assert "Read-only file system" in warnings(caplog)[0]


def test_damaged_entry_on_a_read_only_file_system(
    tmp_path: Path, read_only: Callable[[Path], Path], caplog: pytest.LogCaptureFixture
) -> None:
    LocalTier(tmp_path / "cache").build(KEY, fill).artifact_path.write_bytes(b"rubbish")
    tier = LocalTier(read_only(tmp_path / "cache"))
    assert tier.lookup(KEY) is None
    assert tier.build(KEY, fill).artifact_path.read_bytes() == ARTIFACT
    assert tier.lookup(KEY) is not None
    assert any("graph.vmfb has 7 bytes" in message and "can't be moved away" in message for message in warnings(caplog))


def test_fetch_where_the_local_tier_is_read_only(tmp_path: Path, read_only: Callable[[Path], Path]) -> None:
    remote = folder_tier(tmp_path / "remote")
    remote.publish(LocalTier(tmp_path / "other").build(KEY, fill))
    (tmp_path / "cache").mkdir(mode=0o700)
    cache = TieredCache(LocalTier(read_only(tmp_path / "cache")), [remote])
    first, second = cache.lookup(KEY), cache.lookup(KEY)
    assert first is not None
    assert second is not None
    assert [first.tier, second.tier] == ["remote", "local"]
    assert first.entry.artifact_path.read_bytes() == ARTIFACT


def test_damaged_entry_in_a_lower_layer_of_an_image(tmp_path: Path, mount: Mount) -> None:
    lower, upper, work, merged = (tmp_path / name for name in ("lower", "upper", "work", "merged"))
    for path in (upper, work, merged):
        path.mkdir()
    LocalTier(lower).build(KEY, fill).artifact_path.write_bytes(b"rubbish")
    layers = f"lowerdir={lower},upperdir={upper},workdir={work},redirect_dir=off"
    mount("-t", "overlay", "-o", layers, "overlay", merged)
    tier = LocalTier(merged)
    assert tier.lookup(KEY) is None
    assert len(names(merged / ".quarantine")) == 2
    assert tier.build(KEY, fill).path == merged / KEY


def test_folder_that_this_user_may_read_but_not_write(tmp_path: Path, other_user: int, actor: Start) -> None:
    root = tmp_path / "cache"
    open_up(root)
    root.chmod(0o755)
    LocalTier(root).build(KEY, fill)
    reader = actor("as_user", other_user, "build", root)
    assert [reader.hear() for _ in range(4)] == ["hit", "UNAVAILABLE", str(root / KEY), "found"]


def test_folder_that_this_user_may_not_even_read(tmp_path: Path, other_user: int, actor: Start) -> None:
    root = tmp_path / "cache"
    open_up(root)
    root.chmod(0o700)
    LocalTier(root).build(KEY, fill)
    stranger = actor("as_user", other_user, "build", root, env={**os.environ, "TMPDIR": "/tmp"})
    words = [stranger.hear() for _ in range(4)]
    assert words[:2] == ["miss", "UNAVAILABLE"]
    assert not Path(words[2]).is_relative_to(root)
    assert words[3] == "found"


def test_nothing_can_be_stored_anywhere(tmp_path: Path, read_only: Callable[[Path], Path]) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    root = read_only(tmp_path / "cache")
    old, tempfile.tempdir = tempfile.tempdir, str(root)
    try:
        with pytest.raises(CacheError, match=r"nothing can be stored.*VLLM_CACHE_ROOT or TMPDIR"):
            LocalTier(root / "inner").build(KEY, fill)
    finally:
        tempfile.tempdir = old


def test_private_folder_goes_with_its_process(tmp_path: Path, actor: Start) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    killed, ended = (actor("stage_private", env=environment) for _ in range(2))
    folders = [Path(killed.hear()), Path(ended.hear())]
    assert all(examine(folder, KEY).state is EntryState.COMPLETE for folder in folders)
    ended.tell()
    ended.process.wait()
    assert not folders[1].exists()
    killed.signal(signal.SIGKILL)
    killed.process.wait()
    assert folders[0].exists()
    last = actor("stage_private", env=environment)
    assert Path(last.hear()).exists()
    assert not folders[0].exists()
    last.tell()
    last.process.wait()
    assert names(tmp_path) == []


def test_a_folder_that_can_not_even_be_made(caplog: pytest.LogCaptureFixture) -> None:
    """As on a read-only root: nothing of the path is there, and nothing can be."""
    tier = LocalTier(Path("/sys/no/such/folder"))
    with tier.lock(KEY) as state:
        assert state is LockState.UNAVAILABLE
    assert "can't be written to" in caplog.text
