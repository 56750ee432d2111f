"""Remote folders: atomic publishing between hosts that share nothing else, and stores that lie."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from entries import ARTIFACT, KEY, OTHER, fill
from processes import Actor
from remotes import folder_tier
from test_entry import HARM, remove
from test_local import names, umask

from vllm_neuron.cache.entry import Entry, EntryState, examine, read_entry
from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.cache.remote.urls import open_remote, open_remotes
from vllm_neuron.errors import CacheError, ConfigError

Start = Callable[..., Actor]


@pytest.fixture
def entry(tmp_path: Path) -> Entry:
    return LocalTier(tmp_path / "local").build(KEY, fill)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "shared" / "remote"


def test_publish_and_fetch(entry: Entry, root: Path, tmp_path: Path) -> None:
    remote = folder_tier(root)
    assert remote.metadata(KEY) is None
    assert remote.keys() == []
    assert remote.publish(entry) is True
    assert remote.keys() == [KEY]
    assert remote.metadata(KEY) == entry.metadata
    into = tmp_path / "into"
    into.mkdir()
    assert remote.fetch(KEY, into) is True
    assert read_entry(into, KEY).artifact_path.read_bytes() == ARTIFACT
    assert remote.fetch(OTHER.digest, into) is False
    assert names(root / ".staging") == []


def test_second_publisher_changes_nothing(entry: Entry, root: Path) -> None:
    folder_tier(root).publish(entry)
    before = {path: path.stat() for path in (root / KEY).iterdir()}
    assert folder_tier(root).publish(entry) is False
    assert {path: path.stat() for path in (root / KEY).iterdir()} == before


@pytest.mark.parametrize("harm", HARM, ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("name", [".compilation_complete", "graph.vmfb", "metadata.json"])
def test_unfinished_or_damaged_entry_is_replaced(
    entry: Entry, root: Path, name: str, harm: Callable[[Path], None]
) -> None:
    remote = folder_tier(root)
    remote.publish(entry)
    harm(root / KEY / name)
    assert remote.publish(entry) is True
    assert read_entry(root / KEY, KEY).artifact_path.read_bytes() == ARTIFACT
    assert names(root / ".staging") == []


def test_racing_publishers(tmp_path: Path, root: Path, actor: Start) -> None:
    artifacts = [f"artifact of host {n}" for n in range(6)]
    hosts = [actor("publish_remote", tmp_path / f"host{n}", root, artifact) for n, artifact in enumerate(artifacts)]
    assert {host.hear() for host in hosts} == {"ready"}
    for host in hosts:
        host.tell()
    landed = [host.hear() for host in hosts]
    assert sorted(landed) == ["False"] * 5 + ["True"]
    assert read_entry(root / KEY, KEY).artifact_path.read_text() == artifacts[landed.index("True")]
    assert [host.process.wait() for host in hosts] == [0] * 6
    assert names(root / ".staging") == []


def test_racing_publishers_over_a_damaged_entry(tmp_path: Path, root: Path, actor: Start, entry: Entry) -> None:
    folder_tier(root).publish(entry)
    remove(root / KEY / "graph.vmfb")
    hosts = [actor("publish_remote", tmp_path / f"host{n}", root, f"artifact {n}") for n in range(6)]
    assert {host.hear() for host in hosts} == {"ready"}
    for host in hosts:
        host.tell()
    assert "True" in [host.hear() for host in hosts]
    assert [host.process.wait() for host in hosts] == [0] * 6
    assert read_entry(root / KEY, KEY).artifact_path.read_text().startswith("artifact ")


def test_damaged_local_entry_is_not_published(entry: Entry, root: Path) -> None:
    path = entry.artifact_path
    path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(CacheError, match="damaged"):
        folder_tier(root).publish(entry)
    os.truncate(path, 3)
    with pytest.raises(CacheError, match=r"graph\.vmfb has 3 bytes"):
        folder_tier(root).publish(entry)
    assert names(root) == [".staging"]
    assert names(root / ".staging") == []


def test_remote_link_is_not_followed(entry: Entry, root: Path, tmp_path: Path) -> None:
    remote = folder_tier(root)
    remote.publish(entry)
    secret = tmp_path / "secret"
    secret.write_bytes(ARTIFACT)
    path = root / KEY / "graph.vmfb"
    path.unlink()
    path.symlink_to(secret)
    (tmp_path / "into").mkdir()
    assert remote.fetch(KEY, tmp_path / "into") is False
    assert names(tmp_path / "into") == []


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o2775, 0o700])
def test_entries_can_be_read_by_whom_the_remote_can(entry: Entry, root: Path, mode: int) -> None:
    root.mkdir(parents=True)
    root.chmod(mode)
    with umask(0o077):
        folder_tier(root).publish(entry)
    assert stat.S_IMODE((root / KEY).stat().st_mode) & 0o777 == 0o700 | (mode & 0o055)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (root / KEY).iterdir()} == {0o600 | (mode & 0o044)}
    assert stat.S_IMODE((root / ".staging").stat().st_mode) == mode


def test_only_abandoned_temporary_folders_are_removed(entry: Entry, root: Path, actor: Start, tmp_path: Path) -> None:
    remote = folder_tier(root)
    remote.publish(entry)
    staging = root / ".staging"
    foreign, ancient = staging / f"{KEY}.otherboot.1", staging / f"{KEY}.otherboot.2"
    for folder in (foreign, ancient):
        (folder / "content").mkdir(parents=True)
        (folder / "owner.lock").touch()
    long_ago = time.time() - 100_000
    os.utime(ancient, (long_ago, long_ago))
    shutil.rmtree(root / KEY)
    assert remote.publish(entry) is True
    assert names(staging) == [foreign.name], "another host may still be at work, as long as it is not absurd"


def test_killed_publisher_leaves_nothing_for_long(entry: Entry, root: Path, tmp_path: Path, actor: Start) -> None:
    big = LocalTier(tmp_path / "big").build(KEY, lambda folder: fill(folder, bytes(64 << 20)))
    host = actor("publish_remote", tmp_path / "big", root, "unused")
    assert host.hear() == "ready"
    host.tell()
    while not names(root / ".staging") and not (root / KEY).exists():
        time.sleep(0.001)
    host.signal(signal.SIGKILL)
    host.process.wait()
    assert examine(root / KEY, KEY).state in (EntryState.ABSENT, EntryState.COMPLETE)
    shutil.rmtree(root / KEY, ignore_errors=True)
    assert folder_tier(root).publish(big) is True
    assert names(root / ".staging") == []


def test_read_only_remote(entry: Entry, root: Path) -> None:
    with pytest.raises(CacheError, match="read-only"):
        folder_tier(root, read_only=True).publish(entry)


def test_names_of_remotes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert open_remote("/mnt/cache").name == "/mnt/cache"
    assert open_remote(" relative ").name == str(tmp_path / "relative")
    assert open_remote("~/cache").name == "/home/someone/cache"
    assert open_remote("file:///mnt/a%2Cb%20c").name == "/mnt/a,b c"
    assert open_remote("file://localhost/mnt").name == "/mnt"
    assert [remote.name for remote in open_remotes("/a, file:///b")] == ["/a", "/b"]
    assert open_remotes(None) == open_remotes(" ") == []


@pytest.mark.parametrize("text", ["s3//bucket/x", "s3:/bucket/x", "https:/host/x", "ro+s3://b, S3//c", "file:/mnt/x"])
def test_what_is_nearly_a_url_is_not_taken_for_a_folder(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is neither a URL nor a path; accepted: a path, or a file://, s3://"):
        open_remotes(text)
    assert open_remotes("s3/cache")[0].name.endswith("/s3/cache")


@pytest.mark.parametrize("url", ["ftp://user:secret@host/cache", "github://b", "rsync://b"])
def test_remotes_that_are_not_supported(url: str) -> None:
    with pytest.raises(ConfigError, match=r"is not supported; accepted: a path, or a file://, s3://") as error:
        open_remote(url)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    ["", "  ", "file://otherhost/cache", "file://", "file:///cache?x=1", "s3://", "https://u:secret@host/c?token=secret",
     "ro+/mnt/cache", "ro+"],
)  # fmt: skip
def test_remotes_that_name_nothing(url: str) -> None:
    with pytest.raises(ConfigError, match="accepted: a path, or a file://, s3://") as error:
        open_remote(url)
    assert "secret" not in str(error.value)
    with pytest.raises(ConfigError, match="accepted"):
        open_remotes(f"/a,{url}")


@pytest.mark.parametrize(
    ("url", "name", "read_only"),
    [
        ("https://user:secret@host:8443/cache/", "https://host:8443/cache", True),
        ("ro+file:///mnt/cache", "/mnt/cache", True),
        ("RO+memory://cache/prefix/", "memory://cache/prefix", True),
        ("memory://cache", "memory://cache", False),
    ],
)
def test_names_and_marks_of_urls(url: str, name: str, read_only: bool) -> None:
    remote = open_remote(url)
    assert (remote.name, remote.read_only) == (name, read_only)


def test_remote_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a folder"):
        open_remote(str(tmp_path / "file"))
