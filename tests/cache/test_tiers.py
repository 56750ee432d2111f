"""One lookup over all tiers: who is asked, who works, and what everyone gets."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from entries import ARTIFACT, FLAGS, KEY, MODULE, OTHER, PARTS, fill, fill_other
from processes import Actor
from remotes import folder_tier
from test_entry import HARM, flip
from test_local import names

from vllm_neuron.cache.entry import Entry, EntryState, examine
from vllm_neuron.cache.explain import provenance_differences
from vllm_neuron.cache.key import artifact_key
from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.cache.remote.tier import RemoteTier
from vllm_neuron.cache.tiers import TieredCache
from vllm_neuron.errors import CacheError, ConfigError

Start = Callable[..., Actor]


@pytest.fixture
def entry(tmp_path: Path) -> Entry:
    return LocalTier(tmp_path / "builder").build(KEY, fill)


@pytest.fixture
def remote(tmp_path: Path, entry: Entry) -> RemoteTier:
    """A remote that has the entry of KEY."""
    store = folder_tier(tmp_path / "remote")
    store.publish(entry)
    return store


@pytest.fixture
def local(tmp_path: Path) -> LocalTier:
    return LocalTier(tmp_path / "local")


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_fetch_reads_each_byte_once(tmp_path: Path, mode: int) -> None:
    """Also where others may read the tier, and so the modes of the files change on their way."""
    artifact = bytes(range(256)) * (16 << 10)
    remote, local = folder_tier(tmp_path / "remote"), tmp_path / "local"
    remote.publish(LocalTier(tmp_path / "builder").build(KEY, lambda folder: fill(folder, artifact)))
    local.mkdir()
    local.chmod(mode)
    before = bytes_read()
    found = TieredCache(LocalTier(local), [remote]).lookup(KEY)
    assert len(artifact) <= bytes_read() - before < 1.5 * len(artifact)
    assert found is not None
    flip(found.entry.artifact_path)
    assert LocalTier(local).lookup(KEY) is None


def bytes_read() -> int:
    """What this process has read from files so far, from their caches too."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_processes_compile_a_key_once(tmp_path: Path, actor: Start) -> None:
    count = tmp_path / "count"
    processes = [actor("compile_once", tmp_path / "root", count) for _ in range(8)]
    assert {process.hear() for process in processes} == {"ready"}
    for process in processes:
        process.tell()
    assert {process.hear() for process in processes} == {ARTIFACT.hex()}
    assert [process.process.wait() for process in processes] == [0] * 8
    assert len(count.read_text().splitlines()) == 1


def test_killed_compiler_is_replaced_by_one_of_the_waiters(tmp_path: Path, actor: Start) -> None:
    count = tmp_path / "count"
    processes = [actor("compile_once", tmp_path / "root", count) for _ in range(4)]
    assert {process.hear() for process in processes} == {"ready"}
    for process in processes:
        process.tell()
    while not count.exists() or not count.read_text().endswith("\n"):
        time.sleep(0.001)
    first = int(count.read_text().split()[0])
    victim = next(process for process in processes if process.pid == first)
    victim.signal(signal.SIGKILL)
    assert victim.process.wait() == -signal.SIGKILL
    others = [process for process in processes if process is not victim]
    assert {process.hear() for process in others} == {ARTIFACT.hex()}
    assert len(set(count.read_text().split())) == 2
    assert names(tmp_path / "root" / ".staging") == []


def test_silent_compiler_is_not_waited_for_and_uses_what_won(
    tmp_path: Path, actor: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_LIBTORCH_COMPILATION_TIMEOUT", "2")
    count = tmp_path / "count"
    silent, other = (actor("compile_once", tmp_path / "root", count, tmp_path / "remote") for _ in range(2))
    assert [silent.hear(), other.hear()] == ["ready", "ready"]
    silent.tell()
    while not count.exists():
        time.sleep(0.001)
    silent.signal(signal.SIGSTOP)
    other.tell()
    assert other.hear() == ARTIFACT.hex()
    assert other.process.wait() == 0
    before = (tmp_path / "root" / KEY).stat().st_ino
    silent.signal(signal.SIGCONT)
    assert silent.hear() == ARTIFACT.hex()
    assert silent.process.wait() == 0
    assert (tmp_path / "root" / KEY).stat().st_ino == before
    assert len(count.read_text().splitlines()) == 2


def test_processes_of_one_host_fetch_a_key_once(tmp_path: Path, remote: RemoteTier, actor: Start) -> None:
    processes = [actor("fetch", tmp_path / "root", Path(remote.name)) for _ in range(8)]
    assert {process.hear() for process in processes} == {"ready"}
    for process in processes:
        process.tell()
    words = [process.hear().split() for process in processes]
    assert sorted(tier for tier, _, _ in words) == ["local"] * 7 + ["remote"]
    assert sum(int(fetches) for _, fetches, _ in words) == 1
    assert {artifact for _, _, artifact in words} == {ARTIFACT.hex()}


def test_lookup_goes_from_near_to_far_and_fills_the_near(local: LocalTier, remote: RemoteTier) -> None:
    empty = folder_tier(Path(remote.name).with_name("empty"))
    cache = TieredCache(local, [empty, remote])
    first, second = cache.lookup(KEY), cache.lookup(KEY)
    assert first is not None
    assert second is not None
    assert (first.tier, first.source) == ("remote", str(Path(remote.name)))
    assert (second.tier, second.source) == ("local", "local")
    assert first.entry.path == second.entry.path == local.root / KEY
    assert cache.lookup(OTHER.digest) is None
    counters = {name: counter.to_json() for name, counter in cache.counters.items()}
    for counter in counters.values():
        assert counter.pop("seconds") > 0
    size = sum((local.root / KEY / name).stat().st_size for name in first.entry.metadata.files)
    nothing = {"hits": 0, "misses": 0, "fetches": 0, "bytes": 0, "failures": 0}
    assert counters == {
        "local": {**nothing, "hits": 1, "misses": 2},
        empty.name: {**nothing, "misses": 2},
        remote.name: {**nothing, "hits": 1, "misses": 1, "fetches": 1, "bytes": size},
    }


def test_the_forms_of_one_graph_are_one_look_up(local: LocalTier, remote: RemoteTier) -> None:
    """A host that can use several targets' artifacts has not missed where it finds the second best."""
    cache = TieredCache(local, [remote])
    for tier in ("remote", "local"):
        found = cache.lookup(OTHER.digest, KEY)
        assert found is not None
        assert (found.tier, found.entry.key) == (tier, KEY)
    counters = {name: (counter.hits, counter.misses) for name, counter in cache.counters.items()}
    assert counters == {"local": (1, 1), remote.name: (1, 0)}


def test_nearer_tier_spares_the_farther_one(local: LocalTier, remote: RemoteTier) -> None:
    local.build(KEY, fill)
    cache = TieredCache(local, [remote])
    shutil.rmtree(Path(remote.name))
    found = cache.lookup(KEY)
    assert found is not None
    assert cache.counters[remote.name].to_json() == {
        "hits": 0,
        "misses": 0,
        "fetches": 0,
        "bytes": 0,
        "failures": 0,
        "seconds": 0.0,
    }


def test_lookup_inside_the_lock_does_not_wait_for_itself(local: LocalTier, remote: RemoteTier) -> None:
    cache = TieredCache(local, [remote])
    with cache.lock(KEY) as state:
        assert state.held
        found = cache.lookup(KEY)
    assert found is not None
    assert found.tier == "remote"


@pytest.mark.parametrize("harm", HARM, ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("name", [".compilation_complete", "metadata.json", "graph.vmfb", "compiler.log"])
def test_damaged_remote_entry_is_a_miss_and_nothing_of_it_stays(
    local: LocalTier, remote: RemoteTier, name: str, harm: Callable[[Path], None]
) -> None:
    harm(Path(remote.name) / KEY / name)
    cache = TieredCache(local, [remote])
    assert cache.lookup(KEY) is None
    assert local.keys() == []
    assert examine(local.root / KEY, KEY).state is EntryState.ABSENT
    assert names(local.root / ".staging") == []
    cache.publish_remote(local.build(KEY, fill))
    assert TieredCache(LocalTier(local.root.with_name("third")), [remote]).lookup(KEY) is not None


def test_bad_copy_in_one_remote_does_not_hide_a_good_one_in_the_next(
    local: LocalTier, remote: RemoteTier, entry: Entry, caplog: pytest.LogCaptureFixture
) -> None:
    flip(Path(remote.name) / KEY / "graph.vmfb")
    good = folder_tier(Path(remote.name).with_name("good"))
    good.publish(entry)
    cache = TieredCache(local, [remote, good])
    found = cache.lookup(KEY)
    assert found is not None
    assert found.source == good.name
    assert cache.counters[remote.name].failures == 1
    assert f"can't be had from the remote cache {remote.name}" in caplog.text


def test_dead_remote_costs_a_warning(local: LocalTier, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = folder_tier(tmp_path / "mount" / "cache")
    (tmp_path / "mount").write_text("where a file system used to be")
    cache = TieredCache(local, [store])
    assert cache.lookup(KEY) is None
    assert cache.where(KEY) == []
    assert cache.counters[store.name].failures == 1
    assert store.name in caplog.text
    with pytest.raises(CacheError, match=f"{KEY} can't be published to {store.name}"):
        cache.publish_remote(local.build(KEY, fill))


def test_publishing_to_every_remote_that_takes_entries(local: LocalTier, tmp_path: Path) -> None:
    stores = [folder_tier(tmp_path / "a"), folder_tier(tmp_path / "b", read_only=True), folder_tier(tmp_path / "c")]
    entry = local.build(KEY, fill)
    cache = TieredCache(local, stores)
    assert cache.publish_remote(entry) is True
    assert cache.publish_remote(entry) is False
    assert [store.keys() for store in stores] == [[KEY], [], [KEY]]
    assert cache.where(KEY) == ["local", stores[0].name, stores[2].name]
    assert cache.describe() == [
        f"{local.root} (local)",
        f"{tmp_path}/a (remote)",
        f"{tmp_path}/b (remote, no such folder, read-only)",
        f"{tmp_path}/c (remote)",
    ]
    assert TieredCache(local).publish_remote(entry) is False
    with pytest.raises(CacheError, match=rf"every remote cache is read-only \({tmp_path}/b\)"):
        TieredCache(local, [stores[1]]).publish_remote(entry)


def test_cache_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "root"))
    monkeypatch.setenv("NEURON_LIBTORCH_REMOTE_CACHE", f"{tmp_path}/a,file://{tmp_path}/b")
    cache = TieredCache.from_environment()
    assert cache.local.root == tmp_path / "root" / "neuron" / "compile_cache"
    assert [remote.name for remote in cache.remotes] == [f"{tmp_path}/a", f"{tmp_path}/b"]
    monkeypatch.setenv("NEURON_LIBTORCH_REMOTE_CACHE", "ftp://host/cache")
    with pytest.raises(ConfigError, match="ftp:// is not supported"):
        TieredCache.from_environment()


def test_disabled_cache_is_of_this_process_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "root"))
    monkeypatch.setenv("NEURON_LIBTORCH_REMOTE_CACHE", str(tmp_path / "remote"))
    monkeypatch.setenv("NEURON_LIBTORCH_DISABLE_COMPILE_CACHE", "1")
    cache, other = TieredCache.from_environment(), TieredCache.from_environment()
    assert cache.remotes == []
    assert cache.lookup(KEY) is None
    with cache.lock(KEY) as state:
        assert not state.held
    entry = cache.local.build(KEY, fill)
    cache.publish_remote(entry)
    found = cache.lookup(KEY)
    assert found is not None
    assert found.entry.artifact_path.read_bytes() == ARTIFACT
    assert other.lookup(KEY) is None
    assert cache.local.shared_folder("slots") is None
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"compiler_version": "3.12.0"}, "IREE 3.13.0 there, 3.12.0 here"),
        ({"level": 1}, "level: O2 there, O1 here"),
        ({"target": "cpu:x86-64-v4"}, "target: cpu:x86-64-v3 there, cpu:x86-64-v4 here"),
        ({"flags": [*FLAGS, "--extra"]}, "flags: nothing more there, --extra here"),
        ({"flags": FLAGS[:1]}, f"flags: {FLAGS[1]} there, nothing more here"),
        ({"flags": FLAGS[::-1]}, f"flags: in another order or number, {' '.join(FLAGS)} there, "
                                 f"{' '.join(FLAGS[::-1])} here"),
    ],
)  # fmt: skip
def test_nearest_entry_says_what_differs(
    local: LocalTier, remote: RemoteTier, change: dict[str, object], words: str
) -> None:
    arguments = {"module": MODULE, "compiler": "iree", "compiler_version": "3.13.0", "flags": FLAGS,
                 "target": "cpu:x86-64-v3", "level": 2, **change}  # fmt: skip
    wanted = artifact_key(**arguments)  # type: ignore[arg-type]
    (neighbour,) = TieredCache(local, [remote]).nearest(wanted.parts, {})
    assert neighbour.differences == (words,)
    assert str(neighbour) == f"{KEY} in {remote.name}: {words}"


def test_nearest_prefers_what_is_known_and_tells_versions_apart(local: LocalTier, remote: RemoteTier) -> None:
    local.build(OTHER.digest, fill_other)  # It says nothing of itself: no reason to be near.
    provenance = {"model": "tiny", "bucket": "prefill_s128", "max_num_seqs": 16}
    near = TieredCache(local, [remote]).nearest({**PARTS.parts, "level": "O7"}, provenance)
    assert [neighbour.metadata.key for neighbour in near] == [KEY, OTHER.digest]
    there, here = {"versions": {"vllm": "0.31", "torch": "2"}}, {"versions": {"vllm": "0.32", "torch": "2"}}
    assert provenance_differences(there, here) == ["versions.vllm: 0.31 there, 0.32 here"]


def test_differences_of_many_fields_and_of_hostile_ones() -> None:
    there = {"config": {f"field{number}": number for number in range(8)}, "model": "x\x1b[2J" + "y" * 1000}
    *fields, more, model = provenance_differences(there, {"config": {}, "model": "z"})
    assert fields == [f"config.field{number}: {number} there, unset here" for number in range(5)]
    assert more == "config: 3 more fields differ"
    assert (model[:20], model[-20:], len(model)) == ("model: x\\x1b[2Jyyyyy", "yyy... there, z here", 7 + 200 + 14)


def test_a_difference_far_inside_of_a_long_value_is_shown() -> None:
    there, here = [0] * 500 + [1], [0] * 500 + [2]
    (line,) = provenance_differences({"passes": there}, {"passes": here})
    zeros = " 0," * 13
    assert line == f"passes: ...{zeros} 1] there, ...{zeros} 2] here"


def test_nearest_of_several_entries(local: LocalTier, remote: RemoteTier) -> None:
    """An entry is one neighbour, however many tiers have it."""
    local.build(KEY, fill)
    local.build(OTHER.digest, fill_other)
    parts = {**PARTS.parts, "module": "0" * 64}
    provenance = {"model": "tiny", "bucket": "prefill_s128", "max_num_seqs": 16, "only_here": 1}
    near = TieredCache(local, [remote]).nearest(parts, provenance)
    found = [(neighbour.metadata.key, neighbour.tier) for neighbour in near]
    assert found == [(KEY, f"local, {remote.name}"), (OTHER.digest, "local")]
    assert near[0].differences == ("module: the graph differs", "max_num_seqs: 8 there, 16 here")
    assert len(TieredCache(local, [remote]).nearest(parts, provenance, limit=1)) == 1
