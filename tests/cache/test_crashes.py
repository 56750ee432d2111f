"""Death at every step: a whole entry or none is visible, the next process finishes, and nothing else is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from entries import KEY, fill
from remotes import folder_tier
from test_entry import flip
from test_local import names

from vllm_neuron.cache.entry import EntryState, examine
from vllm_neuron.cache.failpoint import Failpoint
from vllm_neuron.cache.key import is_key
from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.cache.remote.tier import RemoteTier
from vllm_neuron.cache.remote.urls import open_remote
from vllm_neuron.cache.tiers import TieredCache

PROGRAM = Path(__file__).with_name("crashing.py")

# Step and occurrence: a copy reaches FETCHED_FILE once for each of its files, and a publish to a remote folder comes
# after one to the local tier.
COMPILE = [
    ("LOCKED", 1), ("STAGED", 1), ("MODULE_WRITTEN", 1), ("COMPILING", 1), ("COMPILING_RUNS", 1), ("COMPILED", 1),
    ("FILES_LISTED", 1), ("METADATA_WRITTEN", 1), ("MARKER_WRITTEN", 1), ("OPENED_TO_READERS", 1), ("VERIFIED", 1),
    ("RENAMED", 1), ("REMOTE_STAGED", 1), ("FETCHED_FILE", 1), ("REMOTE_COPIED", 1), ("VERIFIED", 2), ("RENAMED", 2),
]  # fmt: skip
REPLACE = [("TAKEN", 1), ("SET_ASIDE", 1), ("RENAMED", 1)]
UPLOAD = [("UPLOADING", 1), ("UPLOADED_FILE", 1), ("UPLOADED_FILE", 3), ("UPLOADED", 1), ("MARKED", 1)]
FETCH = [
    ("FOUND", 1), ("STAGED", 1), ("FETCHED_FILE", 1), ("FETCHED_FILE", 3), ("FETCHED", 1), ("OPENED_TO_READERS", 1),
    ("VERIFIED", 1), ("RENAMED", 1),
]  # fmt: skip
COLLECT = [("CHOSEN", 1), ("REMOVING", 1), ("PINS_READ_AGAIN", 1), ("REMOVED", 1)]
COLLECT_REMOTE = [("HIDDEN", 1), ("REMOTE_REMOVED", 1)]
ALL = [*COMPILE, *REPLACE, *UPLOAD, *FETCH, *COLLECT, *COLLECT_REMOTE]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "local"


@pytest.fixture
def remote(tmp_path: Path) -> str:
    return str(tmp_path / "remote")


@pytest.fixture(autouse=True)
def no_processes_are_left() -> Iterator[None]:
    """Whatever was a descendant of this test's processes is gone when it ends."""
    mark = uuid.uuid4().hex
    os.environ["CRASH_TEST"] = mark
    yield
    del os.environ["CRASH_TEST"]
    psutil.wait_procs(found := _marked(mark), timeout=5)
    assert [process for process in found if process.is_running()] == []


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("CRASH_TEST") == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


def run(scenario: str, root: Path, remote: str, *where: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), scenario, str(root), remote, *map(str, where)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONFAULTHANDLER": "1"})


def die(scenario: str, root: Path, remote: str, step: str, occurrence: int) -> None:
    done = run(scenario, root, remote, step, occurrence)
    assert done.returncode == -signal.SIGKILL, f"{step} was not reached: {done.stdout}{done.stderr}"


def recover(scenario: str, root: Path, remote: str, record: pytest.FixtureRequest) -> None:
    done = run(scenario, root, remote)
    assert done.returncode == 0, done.stderr
    record.node.user_properties.append(("seconds beyond the compile", done.stdout.strip()))
    print(f"{record.node.name}: {float(done.stdout):.2f} s beyond the compile")


def only_whole_entries(folder: Path) -> bool:
    """Whether all that has a key's name in a folder is whole."""
    keys = [name for name in names(folder) if is_key(name)]
    return all(examine(folder / key, key).state is EntryState.COMPLETE for key in keys)


def left_over(*folders: Path) -> list[str]:
    """Temporary things in the folders of tiers."""
    places = [folder / ".staging" for folder in folders]
    return [name for place in places for name in names(place)]


def test_every_step_is_in_the_matrix() -> None:
    assert {name.removesuffix("_RUNS") for name, _ in ALL} == {step.name for step in Failpoint}
    assert len(set(ALL)) >= 20


@pytest.mark.slow
@pytest.mark.parametrize(("step", "occurrence"), COMPILE)
def test_compile_and_publish(
    root: Path, remote: str, step: str, occurrence: int, request: pytest.FixtureRequest
) -> None:
    die("compile_graph", root, remote, step, occurrence)
    assert only_whole_entries(root)
    assert only_whole_entries(Path(remote))
    recover("compile_graph", root, remote, request)
    assert [name for name in names(root) if is_key(name)] == [name for name in names(Path(remote)) if is_key(name)]
    assert only_whole_entries(root)
    assert only_whole_entries(Path(remote))
    assert left_over(root, Path(remote)) == []


@pytest.mark.parametrize(("step", "occurrence"), REPLACE)
def test_replacing_a_damaged_entry(
    root: Path, remote: str, step: str, occurrence: int, request: pytest.FixtureRequest
) -> None:
    entry = LocalTier(root).build(KEY, fill)
    folder_tier(Path(remote)).publish(entry)
    flip(Path(remote) / KEY / "graph.vmfb")
    die("publish", root, remote, step, occurrence)
    state = examine(Path(remote) / KEY, KEY).state
    assert state in ((EntryState.DAMAGED,) if step == "TAKEN" else (EntryState.ABSENT, EntryState.COMPLETE))
    recover("publish", root, remote, request)
    assert examine(Path(remote) / KEY, KEY).state is EntryState.COMPLETE
    assert left_over(root, Path(remote)) == []


@pytest.mark.parametrize(("step", "occurrence"), UPLOAD)
def test_publish_to_an_object_store(
    root: Path, s3: dict[str, str], step: str, occurrence: int, request: pytest.FixtureRequest
) -> None:
    url = f"s3://bucket/{uuid.uuid4().hex}"
    die("publish", root, url, step, occurrence)
    other = TieredCache(LocalTier(root.with_name("other")), [open_remote(url)])
    assert (other.lookup(KEY) is not None) == (step == "MARKED")
    recover("publish", root, url, request)
    assert TieredCache(LocalTier(root.with_name("third")), [open_remote(url)]).lookup(KEY) is not None


@pytest.mark.parametrize(("step", "occurrence"), FETCH)
def test_fetch(root: Path, remote: str, step: str, occurrence: int, request: pytest.FixtureRequest) -> None:
    store: RemoteTier = folder_tier(Path(remote))
    store.publish(LocalTier(root.with_name("builder")).build(KEY, fill))
    die("fetch", root, remote, step, occurrence)
    assert only_whole_entries(root)
    recover("fetch", root, remote, request)
    assert examine(root / KEY, KEY).state is EntryState.COMPLETE
    assert left_over(root) == []


@pytest.mark.parametrize(("step", "occurrence"), COLLECT)
def test_gc(root: Path, remote: str, step: str, occurrence: int, request: pytest.FixtureRequest) -> None:
    LocalTier(root).build(KEY, fill)
    die("collect", root, remote, step, occurrence)
    assert only_whole_entries(root)
    recover("collect", root, remote, request)
    assert [name for name in names(root) if is_key(name)] == []
    assert left_over(root) == []


@pytest.mark.parametrize(("step", "occurrence"), COLLECT_REMOTE)
@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_gc_of_a_remote_tier(
    root: Path, remote: str, kind: str, step: str, occurrence: int, request: pytest.FixtureRequest
) -> None:
    if kind == "s3":
        request.getfixturevalue("s3")
        remote = f"s3://bucket/{uuid.uuid4().hex}"
    store = open_remote(remote)
    store.publish(LocalTier(root).build(KEY, fill))
    die("collect_from_remote", root, remote, step, occurrence)
    assert (store.keys(), store.metadata(KEY)) == ([], None)
    recover("collect_from_remote", root, remote, request)
    if kind == "folder":
        assert left_over(Path(remote)) == []
    assert store.publish(LocalTier(root).build(KEY, fill)) is True
    assert TieredCache(LocalTier(root.with_name("other")), [store]).lookup(KEY) is not None
