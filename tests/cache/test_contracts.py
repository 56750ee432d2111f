"""What holds for a remote tier, whatever it is: the same tests over every kind of store."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from entries import ARTIFACT, KEY, OTHER, fill, fill_other
from stores import Store, folder_store, http_store, mounted_store, s3_store
from test_entry import empty, flip, lengthen, remove, truncate
from test_local import names

from vllm_neuron.cache import failpoint
from vllm_neuron.cache.entry import Entry, EntryState, read_entry
from vllm_neuron.cache.failpoint import Failpoint
from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.cache.remote.gc import collect_remote
from vllm_neuron.cache.remote.tier import RemoteTier
from vllm_neuron.cache.remote.urls import open_remote
from vllm_neuron.cache.retention import Policy
from vllm_neuron.cache.store import index
from vllm_neuron.cache.tiers import TieredCache
from vllm_neuron.digests import PIECE_BYTES
from vllm_neuron.errors import CacheError, ConfigError

KINDS = ["folder", "mount", "s3", "http"]
BIG = bytes(range(251)) * ((2 * PIECE_BYTES) // 251 + 1)


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    folder = tmp_path / "store"
    kinds = {"folder": folder_store, "mount": mounted_store, "http": http_store}
    if request.param == "s3":
        request.getfixturevalue("s3")
        with s3_store(folder, uuid.uuid4().hex) as found:
            yield found
    else:
        with kinds[request.param](folder) as found:
            yield found


@pytest.fixture
def publisher(store: Store) -> RemoteTier:
    """The store, for the one who may write to it."""
    assert store.publish_url is not None
    return open_remote(store.publish_url)


@pytest.fixture
def remote(store: Store) -> RemoteTier:
    """The store, for one who reads."""
    return open_remote(store.url)


@pytest.fixture
def entry(tmp_path: Path) -> Entry:
    return LocalTier(tmp_path / "builder").build(KEY, fill)


@pytest.fixture
def cache(tmp_path: Path, remote: RemoteTier) -> TieredCache:
    """Another host's cache over the store."""
    return TieredCache(LocalTier(tmp_path / "local"), [remote])


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_empty_store_has_nothing(remote: RemoteTier, cache: TieredCache, caplog: pytest.LogCaptureFixture) -> None:
    assert remote.metadata(KEY) is None
    assert cache.lookup(KEY) is None
    assert cache.where(KEY) == []
    assert warnings(caplog) == []


def test_published_entry_arrives_whole(
    publisher: RemoteTier, remote: RemoteTier, cache: TieredCache, entry: Entry, tmp_path: Path
) -> None:
    assert publisher.publish(entry) is True
    assert remote.metadata(KEY) == entry.metadata
    assert remote.exists()
    found = cache.lookup(KEY)
    assert found is not None
    assert (found.tier, found.source) == ("remote", remote.name)
    for name in entry.metadata.files:
        assert (found.entry.path / name).read_bytes() == (entry.path / name).read_bytes()
    assert cache.counters[remote.name].bytes == entry.metadata.size
    again = cache.lookup(KEY)
    assert again is not None
    assert again.tier == "local"
    assert remote.metadata(OTHER.digest) is None


def test_file_of_several_pieces(publisher: RemoteTier, cache: TieredCache, tmp_path: Path) -> None:
    publisher.publish(LocalTier(tmp_path / "big").build(KEY, lambda folder: fill(folder, BIG)))
    found = cache.lookup(KEY)
    assert found is not None
    assert found.entry.artifact_path.read_bytes() == BIG


def test_second_publisher_changes_nothing(
    publisher: RemoteTier, cache: TieredCache, entry: Entry, tmp_path: Path
) -> None:
    other = LocalTier(tmp_path / "other").build(KEY, lambda folder: fill(folder, b"compiled elsewhere"))
    assert publisher.publish(entry) is True
    assert publisher.publish(other) is False
    found = cache.lookup(KEY)
    assert found is not None
    assert found.entry.artifact_path.read_bytes() == ARTIFACT


def test_listing(store: Store, publisher: RemoteTier, remote: RemoteTier, entry: Entry, tmp_path: Path) -> None:
    publisher.publish(entry)
    publisher.publish(LocalTier(tmp_path / "builder").build(OTHER.digest, fill_other))
    if store.url.startswith("http"):
        with pytest.raises(CacheError, match=r"has no index\.json; run `vllm-neuron cache index`"):
            remote.keys()
        index.write(Path(publisher.name))
    assert remote.keys() == sorted([KEY, OTHER.digest])


@pytest.mark.parametrize("harm", [truncate, empty, flip, lengthen, remove], ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("name", ["graph.vmfb", "compiler.log"])
def test_damage_is_seen_passed_over_and_repaired_by_the_next_publisher(
    store: Store,
    publisher: RemoteTier,
    cache: TieredCache,
    entry: Entry,
    caplog: pytest.LogCaptureFixture,
    name: str,
    harm: Callable[[Path], None],
) -> None:
    publisher.publish(entry)
    store.harm(KEY, name, harm)
    assert cache.lookup(KEY) is None
    assert name in "\n".join(warnings(caplog))
    assert cache.local.keys() == []
    assert names(cache.local.root / ".staging") == []
    assert publisher.publish(entry) is True
    found = cache.lookup(KEY)
    assert found is not None
    assert read_entry(found.entry.path, KEY).artifact_path.read_bytes() == ARTIFACT


@pytest.mark.parametrize("harm", [truncate, empty, flip, remove], ids=lambda harm: harm.__name__)
def test_damaged_description_is_passed_over_and_replaced(
    store: Store, publisher: RemoteTier, cache: TieredCache, entry: Entry, harm: Callable[[Path], None]
) -> None:
    publisher.publish(entry)
    marker = "complete.json" if store.url.startswith("s3") else "metadata.json"
    store.harm(KEY, marker, harm)
    assert cache.lookup(KEY) is None
    assert publisher.publish(entry) is True
    assert cache.lookup(KEY) is not None


def test_verify_reads_every_file_and_changes_nothing(
    store: Store, publisher: RemoteTier, remote: RemoteTier, entry: Entry
) -> None:
    assert remote.verify(KEY).state is EntryState.ABSENT
    publisher.publish(entry)
    assert remote.verify(KEY).state is EntryState.COMPLETE
    store.harm(KEY, "graph.vmfb", flip)
    found = remote.verify(KEY)
    assert (found.state, "graph.vmfb" in found.reason) == (EntryState.DAMAGED, True)
    store.harm(KEY, "complete.json" if store.url.startswith("s3") else "metadata.json", flip)
    assert remote.verify(KEY).state in (EntryState.DAMAGED, EntryState.FOREIGN)
    assert publisher.publish(entry) is True


def test_manifests(store: Store, publisher: RemoteTier, remote: RemoteTier, entry: Entry) -> None:
    assert remote.read_manifest(KEY) is None
    for data in (b"one", b"another"):
        publisher.write_manifest(KEY, data)
        assert remote.read_manifest(KEY) == data
    publisher.publish(entry)
    if store.url.startswith("http"):
        index.write(Path(publisher.name))
        with pytest.raises(CacheError, match="is read-only"):
            remote.write_manifest(KEY, b"")
    assert remote.manifest_keys() == [KEY]
    assert remote.keys() == [KEY]


def test_gc_removes_what_the_policy_says_and_nothing_else(
    store: Store, publisher: RemoteTier, remote: RemoteTier, cache: TieredCache, entry: Entry, tmp_path: Path
) -> None:
    other = LocalTier(tmp_path / "builder").build(OTHER.digest, fill_other)
    for one in (entry, other):
        publisher.publish(one)
    if store.url.startswith("http"):
        with pytest.raises(ConfigError, match="is read-only, and nothing can be removed from it"):
            collect_remote(remote, Policy(keep=[KEY]), dry_run=True)
    assert collect_remote(publisher, Policy(max_age=3600.0, max_bytes=1 << 30)) == []
    assert collect_remote(publisher, Policy(other_version=lambda metadata: metadata.level == 9)) == []
    [planned] = collect_remote(publisher, Policy(keep=[KEY]), dry_run=True)
    assert (planned.key, planned.reason, planned.kept) == (OTHER.digest, "not in the plan", "")
    assert planned.bytes >= other.metadata.size
    assert publisher.keys() == sorted([KEY, OTHER.digest]), "a dry run removes nothing"
    assert collect_remote(publisher, Policy(keep=[KEY])) == [planned]
    assert publisher.keys() == [KEY]
    assert cache.lookup(OTHER.digest) is None
    assert cache.lookup(KEY) is not None
    assert publisher.publish(other) is True
    by_version = collect_remote(publisher, Policy(other_version=lambda metadata: metadata.level == 3))
    assert [one.key for one in by_version] == [OTHER.digest]
    assert [one.key for one in collect_remote(publisher, Policy(max_bytes=0))] == [KEY]
    assert publisher.stored() == {}


def test_gc_leaves_what_was_stored_after_it_looked(store: Store, publisher: RemoteTier, entry: Entry) -> None:
    publisher.publish(entry)
    seen = publisher.stored()[KEY]
    store.harm(KEY, "complete.json" if store.url.startswith("s3") else "graph.vmfb", flip)
    assert publisher.publish(entry) is True
    assert publisher.remove(KEY, seen) is False
    assert publisher.remove(KEY, publisher.stored()[KEY]) is True
    assert publisher.remove(KEY, seen) is False


def test_a_reader_of_what_is_being_removed_gets_all_of_it_or_misses(
    publisher: RemoteTier, cache: TieredCache, entry: Entry, request: pytest.FixtureRequest
) -> None:
    publisher.publish(entry)
    seen, once = publisher.stored()[KEY], threading.Lock()

    def remove(step: Failpoint) -> None:
        if step is Failpoint.FETCHED_FILE and once.acquire(blocking=False):
            publisher.remove(KEY, seen)

    request.addfinalizer(lambda: failpoint.observe(None))
    failpoint.observe(remove)
    found = cache.lookup(KEY)
    failpoint.observe(None)
    assert once.locked()
    assert cache.local.keys() == ([] if found is None else [KEY])
    assert names(cache.local.root / ".staging") == []
    assert cache.lookup(KEY) is None or found is not None
    assert publisher.publish(entry) is True


@pytest.mark.parametrize("store", [kind for kind in KINDS if kind != "http"], indirect=True)
def test_publishers_and_gc_at_the_same_time(store: Store, publisher: RemoteTier, entry: Entry, tmp_path: Path) -> None:
    """But for the web server: what is behind it is a folder, which is another case."""
    publish_url, published = store.publish_url or "", threading.Event()

    def publish() -> int:
        mine = open_remote(publish_url)
        return sum(mine.publish(entry) for _ in range(6))

    def collect() -> int:
        mine, gone = open_remote(publish_url), 0
        publisher.publish(entry)
        while not published.is_set():
            done = collect_remote(mine, Policy(keep=()))
            assert not [one for one in done if one.failed], done
            gone += sum(not one.kept for one in done)
        return gone

    with ThreadPoolExecutor(4) as pool:
        publishers = [pool.submit(publish) for _ in range(2)]
        collectors = [pool.submit(collect) for _ in range(2)]
        for worker in publishers:
            worker.exception()
        published.set()
        assert sum(worker.result() for worker in publishers)
        assert sum(worker.result() for worker in collectors)
    publisher.publish(entry)
    found = TieredCache(LocalTier(tmp_path / "after"), [open_remote(publish_url)]).lookup(KEY)
    assert found is not None
    assert found.entry.artifact_path.read_bytes() == ARTIFACT
    if not store.url.startswith("s3"):
        if "/mount/" in store.url:
            # FUSE keeps what is removed while someone reads it. Then it goes with the next one who comes.
            publisher.trim()
        assert names(Path(publish_url) / ".staging") == []


def test_read_only_mark(store: Store, entry: Entry) -> None:
    url = store.url if "://" in store.url else f"file://{store.url}"
    remote = open_remote(f"ro+{url}")
    assert remote.read_only
    with pytest.raises(CacheError, match="is read-only"):
        remote.publish(entry)
    with pytest.raises(ConfigError, match="is read-only, and nothing can be removed from it"):
        collect_remote(remote, Policy(keep=()))
