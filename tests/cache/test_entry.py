"""Every state of an entry, each made with real files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from entries import ABI, ARTIFACT, FILES, FLAGS, KEY, MODULE, OTHER, PARTS, fill

from vllm_neuron.cache.entry import EntryState, examine, read_entry, write_entry
from vllm_neuron.errors import CacheError, DamagedEntryError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / KEY
    path.mkdir()
    fill(path)
    return path


def rewrite_metadata(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change ``metadata.json`` as someone would who also knows how to make the marker fit."""
    path = folder / "metadata.json"
    document = json.loads(path.read_bytes())
    change(document)
    data = json.dumps(document).encode()
    path.write_bytes(data)
    (folder / ".compilation_complete").write_text(hashlib.sha256(data).hexdigest() + "\n")


def test_whole_entry(folder: Path) -> None:
    entry = read_entry(folder, KEY)
    assert entry.artifact_path.read_bytes() == ARTIFACT
    assert entry.module_path.read_bytes() == MODULE.data
    assert entry.abi == ABI
    metadata = entry.metadata
    assert (metadata.compiler, metadata.compiler_version) == ("iree", "3.13.0")
    assert (metadata.target, metadata.level, metadata.flags) == ("cpu:x86-64-v3", 2, FLAGS)
    assert metadata.required_features == ("avx2", "fma")
    assert metadata.provenance["bucket"] == "prefill_s128"
    assert metadata.files["graph.vmfb"].digest == hashlib.sha256(ARTIFACT).hexdigest()
    assert metadata.size == sum((folder / name).stat().st_size for name in FILES if name in metadata.files)


def test_entry_can_be_copied_anywhere(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / KEY
    shutil.copytree(folder, moved)
    for path in folder.iterdir():
        assert str(tmp_path).encode() not in path.read_bytes()
    shutil.rmtree(folder)
    assert read_entry(moved, KEY).artifact_path.read_bytes() == ARTIFACT


def test_absent_and_unfinished(folder: Path) -> None:
    assert examine(folder.with_name(OTHER.digest), OTHER.digest).state is EntryState.ABSENT
    (folder / ".compilation_complete").unlink()
    assert examine(folder, KEY).state is EntryState.IN_PROGRESS
    with pytest.raises(CacheError, match=r"in progress: it has no \.compilation_complete"):
        read_entry(folder, KEY)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def remove(path: Path) -> None:
    path.unlink()


def link(path: Path) -> None:
    outside = path.parent.with_name("outside")
    shutil.move(path, outside)
    path.symlink_to(outside)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


HARM = [truncate, empty, flip, lengthen, remove, link, pipe, make_folder]


@pytest.mark.parametrize("harm", HARM, ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("name", FILES)
def test_harm_to_any_file_is_seen(folder: Path, name: str, harm: Callable[[Path], None]) -> None:
    read_entry(folder, KEY)  # An entry that this process has verified before is looked at again when it changes.
    harm(folder / name)
    if (name, harm) == (".compilation_complete", remove):
        assert examine(folder, KEY).state is EntryState.IN_PROGRESS
        return
    found = examine(folder, KEY)
    assert found.state is EntryState.DAMAGED
    assert name in found.reason
    if harm is not flip:
        assert examine(folder, KEY, digests=False).state is EntryState.DAMAGED, "seen without reading the file"
    with pytest.raises(DamagedEntryError, match=f"{KEY} is damaged: .*{name}"):
        read_entry(folder, KEY)


def test_a_flipped_bit_anywhere_in_the_metadata_is_seen(folder: Path) -> None:
    path = folder / "metadata.json"
    data = path.read_bytes()
    for position in range(0, len(data), 97):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        assert examine(folder, KEY).state is EntryState.DAMAGED
    path.write_bytes(data)
    assert examine(folder, KEY).state is EntryState.COMPLETE


def test_another_format_version_is_foreign_not_damaged(folder: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        document.clear()
        document.update(format_version=99, whatever="a later release likes")

    rewrite_metadata(folder, change)
    found = examine(folder, KEY)
    assert found.state is EntryState.FOREIGN
    assert "version 99, this release reads 1" in found.reason


def test_entry_under_the_name_of_another_key(folder: Path) -> None:
    renamed = folder.with_name(OTHER.digest)
    folder.rename(renamed)
    with pytest.raises(DamagedEntryError, match=f"it is the entry of key {KEY}"):
        read_entry(renamed, OTHER.digest)


def test_folder_that_is_a_link(folder: Path) -> None:
    elsewhere = folder.with_name("elsewhere")
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    assert examine(folder, KEY).state is EntryState.DAMAGED


LIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "other key": lambda d: d.update(key=OTHER.digest),
    "other level under this key": lambda d: d["key_parts"].update(level="O3"),
    "other abi": lambda d: d["abi"]["inputs"].reverse(),
    "abi without aliases": lambda d: d["abi"].pop("aliases"),
    "artifact not listed": lambda d: d.update(artifact_file="other.vmfb"),
    "artifact outside": lambda d: d.update(artifact_file="../outside"),
    "file outside": lambda d: d["files"].update({"../outside": d["files"]["graph.vmfb"]}),
    "absolute file": lambda d: d["files"].update({"/etc/passwd": d["files"]["graph.vmfb"]}),
    "hidden file": lambda d: d["files"].update({".compilation_complete": d["files"]["graph.vmfb"]}),
    "negative size": lambda d: d["files"]["graph.vmfb"].update(size=-1),
    "vast size": lambda d: d["files"]["graph.vmfb"].update(size=1 << 60),
    "size as text": lambda d: d["files"]["graph.vmfb"].update(size=str(len(ARTIFACT))),
    "too many files": lambda d: d["files"].update({f"f{n}": d["files"]["graph.vmfb"] for n in range(100)}),
    "unknown field": lambda d: d.update(surprise=1),
    "no files": lambda d: d.pop("files"),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_metadata_that_lies_under_a_fitting_marker(folder: Path, lie: Callable[[dict[str, Any]], object]) -> None:
    (folder.parent / "outside").write_bytes(ARTIFACT)
    rewrite_metadata(folder, lie)
    assert examine(folder, KEY, digests=False).state is EntryState.DAMAGED


def test_nonsense_in_place_of_metadata(folder: Path) -> None:
    for data in (b"", b"[]", b"\xff\xfe", b"[" * 200_000, b'{"format_version": 1}', b'{"format_version": NaN}'):
        (folder / "metadata.json").write_bytes(data)
        (folder / ".compilation_complete").write_text(hashlib.sha256(data).hexdigest() + "\n")
        assert examine(folder, KEY).state in (EntryState.DAMAGED, EntryState.FOREIGN)


def test_files_that_are_not_listed_are_ignored(folder: Path) -> None:
    (folder / ".nfs000001").write_text("left by a file server")
    assert examine(folder, KEY).state is EntryState.COMPLETE


def make_entry(folder: Path) -> None:
    write_entry(folder, key=PARTS, abi=ABI)


def test_only_a_sound_folder_becomes_an_entry(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="0 files that could be its module"):
        make_entry(tmp_path)
    (tmp_path / "graph.mlir").write_bytes(MODULE.data)
    with pytest.raises(CacheError, match="0 files that could be its artifact"):
        make_entry(tmp_path)
    (tmp_path / "graph.vmfb").write_bytes(ARTIFACT)
    (tmp_path / "scratch").mkdir()
    with pytest.raises(CacheError, match="scratch is not a plain file"):
        make_entry(tmp_path)
    (tmp_path / "scratch").rmdir()
    (tmp_path / "scratch").symlink_to("/etc/passwd")
    with pytest.raises(CacheError, match="scratch is a symbolic link"):
        make_entry(tmp_path)
    (tmp_path / "scratch").unlink()
    (tmp_path / "graph.mlir").write_bytes(MODULE.data + b" ")
    with pytest.raises(CacheError, match=r"graph\.mlir is not the module in the key parts"):
        make_entry(tmp_path)
    assert examine(tmp_path, KEY).state is EntryState.IN_PROGRESS
    (tmp_path / "graph.mlir").write_bytes(MODULE.data)
    make_entry(tmp_path)
    assert examine(tmp_path, KEY).state is EntryState.COMPLETE
    with pytest.raises(CacheError, match="finished once"):
        make_entry(tmp_path)
