"""The digest of a content by pieces, against what the definition says, computed otherwise."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest
from entries import FLAGS, MODULE

from vllm_neuron import digests
from vllm_neuron.cache.disk import file_digest
from vllm_neuron.cache.key import artifact_key

PIECE = 4 * 1024 * 1024


def defined(data: bytes) -> str:
    if len(data) <= PIECE:
        return hashlib.sha256(data).hexdigest()
    parts = b"".join(hashlib.sha256(data[n : n + PIECE]).digest() for n in range(0, len(data), PIECE))
    return hashlib.sha256(parts).hexdigest()


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 3 * PIECE + 17])
def test_digest_of_a_file_and_of_bytes(tmp_path: Path, size: int) -> None:
    data = (os.urandom(4096) * (size // 4096 + 1))[:size]
    (tmp_path / "file").write_bytes(data)
    with (tmp_path / "file").open("rb") as file:
        file.read(1)
        assert file_digest.of_file(file.fileno()) == defined(data)
    assert digests.of_bytes(data) == defined(data)


def test_pieces_cover_everything_once() -> None:
    for size in (0, 1, PIECE, PIECE + 1, 5 * PIECE + 3):
        spans = digests.pieces(size)
        assert [start for start, _ in spans[1:]] == [stop for _, stop in spans[:-1]]
        assert (spans[0][0], spans[-1][1]) == (0, size)


def test_key_of_a_module_of_several_pieces() -> None:
    data = MODULE.data * (2 * PIECE // len(MODULE.data))
    key = artifact_key(replace(MODULE, data=data), "iree", "3.13.0", FLAGS, "cpu:x86-64-v3", 2)
    assert len(data) > PIECE
    assert key.parts["module"] == defined(data)
