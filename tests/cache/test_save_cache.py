"""Promotion of one entry through the public function."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from entries import KEY, OTHER, fill

from vllm_neuron.cache.entry import read_entry
from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.compile.save_cache import save_cache


@pytest.fixture
def local(tmp_path: Path) -> Path:
    LocalTier(tmp_path / "local").build(KEY, fill)
    return tmp_path / "local"


def test_promotes_once(local: Path, tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    assert save_cache(local_cache_dir=str(local), remote_cache_dir=str(remote), hash_key=KEY) is True
    assert save_cache(local, f"file://{remote}", KEY) is False
    assert read_entry(remote / KEY, KEY).metadata == read_entry(local / KEY, KEY).metadata


def test_unfinished_missing_and_damaged_entries_are_runtime_errors(local: Path, tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    with pytest.raises(RuntimeError, match="absent"):
        save_cache(local, remote, OTHER.digest)
    (local / KEY / "graph.vmfb").write_bytes(b"rubbish")
    with pytest.raises(RuntimeError, match=r"damaged: graph\.vmfb"):
        save_cache(local, remote, KEY)
    (local / KEY / ".compilation_complete").unlink()
    with pytest.raises(RuntimeError, match=f"{local / KEY} is in progress"):
        save_cache(local, remote, KEY)
    assert not (remote / KEY).exists()


def test_failure_to_promote_is_an_error(local: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match=f"{KEY} can't be promoted to {tmp_path}/file/remote"):
        save_cache(local, tmp_path / "file" / "remote", KEY)


def test_unfinished_remote_entry_is_replaced(local: Path, tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    shutil.copytree(local / KEY, remote / KEY)
    (remote / KEY / ".compilation_complete").unlink()
    assert save_cache(local, remote, KEY) is True
    assert read_entry(remote / KEY, KEY).key == KEY


@pytest.mark.parametrize("key", ["", "..", f"../local/{KEY}", KEY[:8]])
def test_key_that_is_none(local: Path, tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="is not a key; a key is 32 hexadecimal digits"):
        save_cache(local, tmp_path / "remote", key)
