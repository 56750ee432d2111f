"""Manifests that are not what they should be: never used, never fatal by themselves, and said to be so."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from remotes import folder_tier

from vllm_neuron.abi import Abi, TensorSpec
from vllm_neuron.cache.key import TraceKey, canonical_json, sha256
from vllm_neuron.cache.manifests.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    ManifestError,
    make_manifest,
    parse_manifest,
)
from vllm_neuron.cache.manifests.store import ManifestStore
from vllm_neuron.errors import CacheError
from vllm_neuron.lowering.module import KnownModule, LoweredModule

KEY = TraceKey.from_parts({"model": '{"hidden_size":4}', "bucket": "decode_b1"})
OTHER = TraceKey.from_parts({"model": '{"hidden_size":8}', "bucket": "decode_b1"})
CACHE, WEIGHT, IDS = TensorSpec("float32", (8, 2)), TensorSpec("bfloat16", (4, 2)), TensorSpec("int64", (1,))
LOGITS = TensorSpec("float32", (1, 9))
MODULE = LoweredModule("stablehlo", b"module {}", Abi((IDS, CACHE, WEIGHT), (CACHE, LOGITS), (1,)))
NAMES = ("inputs.input_ids", "kv.0.k", "weights.layer.weight")
UNREAD = {"weights.unused": TensorSpec("float32", (3,))}


def manifest(key: TraceKey = KEY) -> Manifest:
    return make_manifest(key, "decode_b1", "some/model", MODULE, NAMES, UNREAD)


def text(**fields: Any) -> bytes:
    """The manifest of ``KEY`` with other fields, and a checksum that is right for them."""
    document = json.loads(manifest().to_bytes()) | fields
    del document["checksum"]
    return json.dumps(document | {"checksum": sha256(canonical_json(document).encode())}).encode()


def test_what_is_written_is_read_back() -> None:
    found = parse_manifest(manifest().to_bytes(), KEY.digest)
    assert found.module == KnownModule("stablehlo", sha256(b"module {}"), MODULE.abi)
    assert found.step_inputs() == {"input_ids": IDS}
    assert found.model_inputs() == {"kv.0.k": CACHE, "weights.layer.weight": WEIGHT, **UNREAD}


GOOD = manifest().to_bytes()
ABI = MODULE.abi.to_json()
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "JSON"),
    "truncated": (GOOD[:-40], "JSON"),
    "not text": (bytes(range(256)), "JSON"),
    "a list": (b"[]", "object"),
    "nested": (b"[" * 100_000, "JSON"),
    "a pickle": (b"cos\nsystem\n(S'true'\ntR.", "JSON"),
    "one letter": (GOOD.replace(b"some/model", b"some/modem"), "checksum"),
    "another key's": (manifest(OTHER).to_bytes(), "it is the manifest of"),
    "parts of another": (text(parts=dict(OTHER.parts)), "the key is not the digest of the parts"),
    "another version": (text(version=99), "version 99"),
    "a surplus field": (text(command="true"), "command"),
    "a number as a name": (text(inputs=["inputs.input_ids", "kv.0.k", 7]), "inputs.2"),
    "names as one text": (text(inputs="inputs.input_ids"), "inputs"),
    "a path as a name": (text(inputs=["inputs.input_ids", "kv.0.k", "weights/../../etc/passwd"]), "inputs.2"),
    "a path as a digest": (text(module_sha256="../../../etc/passwd"), "module_sha256"),
    "a name twice": (text(inputs=["inputs.input_ids", "kv.0.k", "kv.0.k"]), "a name twice"),
    "too few names": (text(inputs=["inputs.input_ids", "kv.0.k"]), "2 names for 3 inputs"),
    "weights written": (text(inputs=["inputs.input_ids", "weights.layer.weight", "kv.0.k"]), "are not the KV caches"),
    "an alias outside": (text(abi=ABI | {"aliases": [7]}), "aliases"),
    "an ABI of texts": (text(abi=ABI | {"inputs": [["int64", ["1"]], *ABI["inputs"][1:]]}), "other types"),
    "a huge shape": (text(unread={"weights.unused": ["float32", [1 << 60]]}), "unread"),
    "a negative shape": (text(unread={"weights.unused": ["float32", [-1]]}), "unread"),
    "a dtype of code": (text(unread={"weights.unused": ["__import__('os')", [1]]}), "unread"),
    "too large": (GOOD + b" " * MAX_MANIFEST_BYTES, "larger than"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_manifest_is_passed_over_and_named(kind: str, tmp_path: Path) -> None:
    data, reason = BAD[kind]
    path = tmp_path / "local" / f"{KEY.digest}.json"
    path.parent.mkdir()
    path.write_bytes(data)
    store = ManifestStore(tmp_path / "local")
    assert store.lookup(KEY.digest) is None
    assert reason in store.problems[KEY.digest]
    assert str(tmp_path / "local") in store.problems[KEY.digest]


def _link(path: Path) -> None:
    target = path.with_suffix(".target")
    target.write_bytes(GOOD)
    path.symlink_to(target)


THINGS: dict[str, Callable[[Path], object]] = {
    "a link": _link,
    "a folder": lambda path: path.mkdir(),
    "a pipe": lambda path: os.mkfifo(path),
}


@pytest.mark.parametrize("kind", THINGS)
def test_only_plain_files_are_read(kind: str, tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    THINGS[kind](tmp_path / "local" / f"{KEY.digest}.json")
    store = ManifestStore(tmp_path / "local")
    assert store.lookup(KEY.digest) is None
    assert "not a plain file" in store.problems[KEY.digest]


def test_a_good_remote_one_takes_the_place_of_a_bad_local_one(tmp_path: Path) -> None:
    remote = folder_tier(tmp_path / "remote")
    ManifestStore(tmp_path / "elsewhere", [remote]).publish(manifest())
    local = tmp_path / "local" / f"{KEY.digest}.json"
    local.parent.mkdir()
    local.write_bytes(GOOD[:100])
    found = ManifestStore(tmp_path / "local", [remote]).lookup(KEY.digest)
    assert found is not None
    assert (found.tier, found.manifest) == ("remote", manifest())
    again = ManifestStore(tmp_path / "local").lookup(KEY.digest)
    assert again is not None
    assert again.tier == "local"
    assert remote.keys() == []
    assert remote.manifest_keys() == [KEY.digest]
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(f".{KEY.digest}")]


def test_publishing_to_a_folder_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote" / ".manifests").write_text("")
    with pytest.raises(CacheError, match=r"decode_b1 can't be published to .*/\.manifests is not a folder: remove it"):
        ManifestStore(tmp_path / "local", [folder_tier(tmp_path / "remote")]).publish(manifest())


def test_a_folder_in_the_place_of_a_manifest_is_replaced(tmp_path: Path) -> None:
    remote = folder_tier(tmp_path / "remote")
    (tmp_path / "remote" / ".manifests" / f"{KEY.digest}.json" / "inner").mkdir(parents=True)
    assert ManifestStore(tmp_path / "local", [remote]).publish(manifest())
    found = ManifestStore(tmp_path / "elsewhere", [remote]).lookup(KEY.digest)
    assert found is not None
    assert found.manifest == manifest()


def test_where_nothing_can_be_stored_a_start_goes_on(tmp_path: Path) -> None:
    remote = folder_tier(tmp_path / "remote")
    ManifestStore(tmp_path / "elsewhere", [remote]).publish(manifest())
    store = ManifestStore(tmp_path / "local" / "folder", [remote])
    (tmp_path / "local").symlink_to(tmp_path / "nowhere" / "at all")
    found = store.lookup(KEY.digest)
    assert found is not None
    assert found.tier == "remote"


def test_the_nearest_is_of_the_same_graph_and_says_what_differs(tmp_path: Path) -> None:
    store = ManifestStore(tmp_path)
    assert store.nearest_difference(OTHER, "decode_b1", "some/model") is None
    store.store(manifest())
    fresh = ManifestStore(tmp_path)
    assert fresh.nearest_difference(OTHER, "decode_b1", "x") == "model.hidden_size: 4 there, 8 here"
    assert fresh.nearest_difference(OTHER, "decode_b2", "x") is None


def test_a_manifest_of_an_inconsistent_graph_is_not_made() -> None:
    with pytest.raises(ManifestError, match="2 names for 3 inputs"):
        make_manifest(KEY, "decode_b1", "some/model", MODULE, NAMES[:2], {})
