"""Entries in one file: what comes out is what went in, or nothing."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from entries import ARTIFACT, KEY, OTHER, fill, fill_other
from test_local import names

from vllm_neuron.cache import archive
from vllm_neuron.cache.local import LocalTier
from vllm_neuron.errors import CacheError

Members = list[tuple[tarfile.TarInfo, bytes]]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    tier = LocalTier(tmp_path / "builder")
    entries = [tier.build(KEY, fill), tier.build(OTHER.digest, fill_other)]
    archive.pack(entries, tmp_path / "cache.tar")
    archive.pack(entries[::-1], tmp_path / "again.tar")
    assert (tmp_path / "cache.tar").read_bytes() == (tmp_path / "again.tar").read_bytes()
    return tmp_path / "cache.tar"


@pytest.fixture
def local(tmp_path: Path) -> LocalTier:
    return LocalTier(tmp_path / "local")


def rewrite(path: Path, change: Callable[[Members], object]) -> None:
    with tarfile.open(path) as old:
        members = [(member, old.extractfile(member).read()) for member in old]  # type: ignore[union-attr]
    change(members)
    with tarfile.open(path, "w") as new:
        for member, data in members:
            member.size = len(data)
            new.addfile(member, io.BytesIO(data))


def test_round_trip(packed: Path, local: LocalTier) -> None:
    assert archive.unpack(packed, local) == {KEY: True, OTHER.digest: True}
    assert local.keys() == sorted([KEY, OTHER.digest])
    found = LocalTier(local.root).lookup(KEY)
    assert found is not None
    assert found.artifact_path.read_bytes() == ARTIFACT
    assert archive.unpack(packed, local) == {KEY: False, OTHER.digest: False}


def rename_member(name: str) -> Callable[[Members], object]:
    return lambda members: setattr(members[2][0], "name", name)


def make_link(members: Members) -> None:
    members[2][0].type = tarfile.SYMTYPE
    members[2][0].linkname = "/etc/passwd"


def flip_artifact(members: Members) -> None:
    for n, (member, data) in enumerate(members):
        if member.name.endswith("graph.vmfb"):
            members[n] = (member, bytes([data[0] ^ 1]) + data[1:])


HARM: dict[str, Callable[[Members], object]] = {
    "outside": rename_member("../outside"),
    "absolute": rename_member("/tmp/outside"),
    "deeper": rename_member(f"{KEY}/sub/file"),
    "not listed": rename_member(f"{KEY}/surprise"),
    "link": make_link,
    "flipped": flip_artifact,
    "no metadata": lambda members: members.pop(0),
    "no marker": lambda members: members.pop(-1),
    "nonsense in place of metadata": lambda members: members.__setitem__(0, (members[0][0], b"{}")),
}


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
def test_damaged_archive(packed: Path, local: LocalTier, harm: Callable[[Members], object], tmp_path: Path) -> None:
    rewrite(packed, harm)
    before = names(tmp_path)
    with pytest.raises(CacheError, match=f"the archive {packed} is damaged"):
        archive.unpack(packed, local)
    assert len(local.keys()) <= 1
    assert names(local.root / ".staging") == []
    assert set(names(tmp_path)) - set(before) <= {"local"}


@pytest.mark.parametrize("size", [0, 100, 3000, 9000])
def test_archive_that_ends_early(packed: Path, local: LocalTier, size: int) -> None:
    packed.write_bytes(packed.read_bytes()[:size])
    with pytest.raises(CacheError, match=f"the archive {packed}"):
        archive.unpack(packed, local)
    assert local.keys() == []
