"""Entries in one file: what comes out is what went in, or nothing."""

from __future__ import annotations

import io
import os
import random
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from entries import ARTIFACT, KEY, OTHER, fill, fill_other, manifest, stranger
from test_local import names

from vllm_neuron.cache import archive
from vllm_neuron.cache.archive import Unpacked
from vllm_neuron.cache.entry import EntryState, examine
from vllm_neuron.cache.key import is_key
from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.cache.manifests.store import ManifestStore
from vllm_neuron.cache.store.layout import MAX_MANIFEST_BYTES
from vllm_neuron.errors import CacheError

Members = list[tuple[tarfile.TarInfo, bytes]]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    tier = LocalTier(tmp_path / "builder")
    entries = [tier.build(KEY, fill), tier.build(OTHER.digest, fill_other)]
    archive.pack(entries, tmp_path / "cache.tar", [manifest(), manifest("decode_b8")])
    archive.pack(entries[::-1], tmp_path / "again.tar", [manifest("decode_b8"), manifest()])
    assert (tmp_path / "cache.tar").read_bytes() == (tmp_path / "again.tar").read_bytes()
    return tmp_path / "cache.tar"


@pytest.fixture
def local(tmp_path: Path) -> LocalTier:
    return LocalTier(tmp_path / "local")


@pytest.fixture
def manifests(tmp_path: Path) -> ManifestStore:
    return ManifestStore(tmp_path / "manifests")


def rewrite(path: Path, change: Callable[[Members], object]) -> None:
    with tarfile.open(path) as old:
        members = [(member, old.extractfile(member).read()) for member in old]  # type: ignore[union-attr]
    change(members)
    with tarfile.open(path, "w") as new:
        for member, data in members:
            member.size = len(data)
            new.addfile(member, io.BytesIO(data))


def test_round_trip(packed: Path, local: LocalTier, manifests: ManifestStore) -> None:
    traces = [manifest().key, manifest("decode_b8").key]
    done = archive.unpack(packed, local, manifests)
    assert done == Unpacked({KEY: True, OTHER.digest: True}, dict.fromkeys(traces, True))
    assert local.keys() == sorted([KEY, OTHER.digest])
    found = LocalTier(local.root).lookup(KEY)
    assert found is not None
    assert found.artifact_path.read_bytes() == ARTIFACT
    recalled = ManifestStore(manifests.root).lookup(manifest().key)
    assert recalled is not None
    assert recalled.manifest == manifest()
    again = archive.unpack(packed, local, manifests)
    assert again == Unpacked({KEY: False, OTHER.digest: False}, dict.fromkeys(traces, False))


def test_a_damaged_manifest_is_replaced_by_that_of_the_archive(
    packed: Path, local: LocalTier, manifests: ManifestStore
) -> None:
    archive.unpack(packed, local, manifests)
    path = manifests.root / f"{manifest().key}.json"
    path.write_bytes(path.read_bytes()[:-9])
    assert archive.unpack(packed, local, manifests).manifests == {
        manifest().key: True,
        manifest("decode_b8").key: False,
    }
    assert manifests.problems == {}
    assert path.read_bytes() == manifest().to_bytes()


def test_an_archive_has_the_manifests_of_its_entries_only(tmp_path: Path, manifests: ManifestStore) -> None:
    entry = LocalTier(tmp_path / "builder").build(KEY, fill)
    for one in (manifest(), stranger()):
        manifests.store(one)
    (manifests.root / f"{'0' * 32}.json").write_text("nonsense")
    assert manifests.local_of([entry.metadata]) == [manifest()]
    assert list(manifests.problems) == ["0" * 32]


def rename_member(name: str) -> Callable[[Members], object]:
    return lambda members: setattr(members[2][0], "name", name)


def make_link(members: Members) -> None:
    members[2][0].type = tarfile.SYMTYPE
    members[2][0].linkname = "/etc/passwd"


def flip_artifact(members: Members) -> None:
    for n, (member, data) in enumerate(members):
        if member.name.endswith("graph.vmfb"):
            members[n] = (member, bytes([data[0] ^ 1]) + data[1:])


def to_manifest(change: Callable[[tarfile.TarInfo, bytes], tuple[tarfile.TarInfo, bytes]]) -> Callable[[Members], None]:
    """Change the last member, which is a manifest."""

    def harm(members: Members) -> None:
        members[-1] = change(*members[-1])

    return harm


def named(name: str) -> Callable[[tarfile.TarInfo, bytes], tuple[tarfile.TarInfo, bytes]]:
    def change(member: tarfile.TarInfo, data: bytes) -> tuple[tarfile.TarInfo, bytes]:
        member.name = name
        return member, data

    return change


HARM: dict[str, Callable[[Members], object]] = {
    "outside": rename_member("../outside"),
    "absolute": rename_member("/tmp/outside"),
    "deeper": rename_member(f"{KEY}/sub/file"),
    "not listed": rename_member(f"{KEY}/surprise"),
    "link": make_link,
    "flipped": flip_artifact,
    "no metadata": lambda members: members.pop(0),
    "no marker": lambda members: members.pop(-3),
    "nonsense in place of metadata": lambda members: members.__setitem__(0, (members[0][0], b"{}")),
}


def made_by_refusing(
    packed: Path, local: LocalTier, manifests: ManifestStore, harm: Callable[[Members], object], tmp_path: Path
) -> set[str]:
    """What there is more in ``tmp_path`` after an archive, with ``harm`` done to it, was refused as damaged."""
    rewrite(packed, harm)
    before = names(tmp_path)
    with pytest.raises(CacheError, match=f"the archive {packed} is damaged"):
        archive.unpack(packed, local, manifests)
    return set(names(tmp_path)) - set(before)


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
def test_damaged_archive(
    packed: Path, local: LocalTier, manifests: ManifestStore, harm: Callable[[Members], object], tmp_path: Path
) -> None:
    assert made_by_refusing(packed, local, manifests, harm, tmp_path) <= {"local"}
    assert len(local.keys()) <= 1
    assert not manifests.root.exists()
    assert names(local.root / ".staging") == []


@pytest.mark.parametrize("size", [0, 100, 3000, 9000])
def test_archive_that_ends_early(packed: Path, local: LocalTier, manifests: ManifestStore, size: int) -> None:
    packed.write_bytes(packed.read_bytes()[:size])
    with pytest.raises(CacheError, match=f"the archive {packed}"):
        archive.unpack(packed, local, manifests)
    assert local.keys() == []


HARM_TO_MANIFESTS = {
    "truncated": to_manifest(lambda member, data: (member, data[:-20])),
    "not text": to_manifest(lambda member, data: (member, bytes(range(256)))),
    "changed": to_manifest(lambda member, data: (member, data.replace(b'"tiny"', b'"tinj"'))),
    "another key's": to_manifest(named(f".manifests/{KEY}.json")),
    "no key": to_manifest(named(".manifests/passwd.json")),
    "another suffix": to_manifest(named(f".manifests/{KEY}.py")),
    "outside": to_manifest(named(f".manifests/../{KEY}.json")),
    "another folder": to_manifest(named(f".locks/{KEY}.json")),
    "huge": to_manifest(lambda member, data: (member, bytes(MAX_MANIFEST_BYTES + 1))),
}


@pytest.mark.parametrize("harm", HARM_TO_MANIFESTS.values(), ids=HARM_TO_MANIFESTS)
def test_damaged_manifest_in_an_archive(
    packed: Path, local: LocalTier, manifests: ManifestStore, harm: Callable[[Members], object], tmp_path: Path
) -> None:
    assert made_by_refusing(packed, local, manifests, harm, tmp_path) <= {"local", "manifests"}
    assert len(names(manifests.root)) == 1


def test_bytes_that_are_changed_anywhere_are_an_error_or_change_nothing(
    packed: Path, tmp_path: Path, manifests: ManifestStore
) -> None:
    """No other exception, whatever the byte: one in each of the archive's blocks."""
    whole, dice = packed.read_bytes(), random.Random(7)
    for block in range(0, len(whole), 512):
        harmed = bytearray(whole)
        place = block + dice.randrange(512)
        harmed[place] ^= 1 << dice.randrange(8)
        packed.write_bytes(harmed)
        local = LocalTier(tmp_path / f"local{block}")
        with suppress(CacheError):
            archive.unpack(packed, local, manifests)
        for key in local.keys():
            assert examine(local.root / key, key).state is EntryState.COMPLETE


def test_nothing_but_an_archive_is_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    kinds = {tmp_path: "a folder", Path(): "a folder", Path("/"): "a folder", tmp_path / "pipe": "no plain file"}
    for target, kind in kinds.items():
        with pytest.raises(CacheError, match=f"is {kind}: name the archive"):
            archive.pack([], target)
    assert names(tmp_path) == ["pipe"]
    with pytest.raises(CacheError, match=r"can't be written: .*File name too long"):
        archive.pack([], tmp_path / ("a" * 300))
    archive.pack([], tmp_path / ("a" * 255))


def test_an_archive_of_nothing_is_an_error(tmp_path: Path, local: LocalTier, manifests: ManifestStore) -> None:
    archive.pack([], tmp_path / "empty.tar")
    for source in (tmp_path / "empty.tar", Path("/dev/zero")):
        with pytest.raises(CacheError, match="is empty: there is nothing to unpack"):
            archive.unpack(source, local, manifests)


def test_what_can_t_be_kept_is_an_error(
    packed: Path, local: LocalTier, manifests: ManifestStore, mount: Callable[..., None]
) -> None:
    local.root.mkdir()
    mount("-t", "tmpfs", "-o", "ro,mode=700", "tmpfs", local.root)
    with pytest.raises(CacheError, match=f"entry {min(KEY, OTHER.digest)} can't be kept in {local.root}"):
        archive.unpack(packed, local, manifests)


def test_full_disks_leave_nothing_behind(
    packed: Path, local: LocalTier, manifests: ManifestStore, mount: Callable[..., None], tmp_path: Path
) -> None:
    """Where an archive is written to, and where one is unpacked to."""
    entry = LocalTier(tmp_path / "builder").build(KEY, fill)
    for folder in (tmp_path / "small", local.root):
        folder.mkdir()
        mount("-t", "tmpfs", "-o", "size=12k,mode=700", "tmpfs", folder)
    with pytest.raises(CacheError, match=r"can't be written: .*No space left on device"):
        archive.pack([entry], tmp_path / "small" / "cache.tar")
    assert names(tmp_path / "small") == []
    with pytest.raises(CacheError, match=f"can't be kept in {local.root}: .*No space left on device"):
        archive.unpack(packed, local, manifests)
    assert [name for name in names(local.root) if is_key(name)] == []
    assert names(local.root / ".staging") == []
