"""Step inputs say what the requests say, whatever was in the arrays before."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_neuron.execute.batch import Requests, StepBuilder
from vllm_neuron.model.buckets import Bucket

BLOCK = 4
LENGTH = 32
BUCKETS = [
    Bucket("prefill", 8, 1, LENGTH),
    Bucket("prefill", 16, 1, LENGTH),
    Bucket("decode", 1, 2, 8, limited=True),
    Bucket("decode", 1, 2, LENGTH),
    Bucket("decode", 1, 4, 8, limited=True),
    Bucket("decode", 1, 4, LENGTH),
]


@pytest.fixture
def requests() -> Requests:
    """Three requests; request ``r`` has token 100 r + p at position p, and its block b is number 10 (r + 1) + b."""
    tokens = np.array([[100 * r + p for p in range(LENGTH)] for r in range(3)], np.int32)
    blocks = np.array([[10 * (r + 1) + b for b in range(LENGTH // BLOCK)] for r in range(3)], np.int32)
    return Requests(tokens, blocks)


def slot(request: int, position: int) -> int:
    return (10 * (request + 1) + position // BLOCK) * BLOCK + position % BLOCK


def test_decode(requests: Requests) -> None:
    steps = StepBuilder(BUCKETS, BLOCK)
    steps.decode(requests, np.array([0, 1, 2, 0]), np.array([31, 30, 29, 28]))  # what is left over must not show
    bucket, inputs = steps.decode(requests, np.array([2, 0, 1]), np.array([9, 0, 20]))
    assert bucket.name == "decode_b4"
    assert inputs["input_ids"].tolist() == [209, 0, 120, 0]
    assert inputs["positions"].tolist() == [9, 0, 20, 0]
    assert inputs["slot_mapping"].tolist() == [slot(2, 9), slot(0, 0), slot(1, 20), 0]
    assert inputs["block_tables"][:, :2].tolist() == [[30, 31], [10, 11], [20, 21], [0, 0]]
    assert inputs["logits_indices"].tolist() == [0, 1, 2, 3]


def test_decode_within_a_short_context_has_short_block_tables(requests: Requests) -> None:
    bucket, inputs = StepBuilder(BUCKETS, BLOCK).decode(requests, np.array([1]), np.array([7]))
    assert bucket.name == "decode_b2_c8"
    assert inputs["block_tables"].tolist() == [[20, 21], [0, 0]]
    bucket, _ = StepBuilder(BUCKETS, BLOCK).decode(requests, np.array([1]), np.array([8]))
    assert bucket.name == "decode_b2"


def test_prefill(requests: Requests) -> None:
    steps = StepBuilder(BUCKETS, BLOCK)
    steps.prefill(requests, 2, 0, 8)
    bucket, inputs = steps.prefill(requests, 1, 5, 6)
    assert bucket.name == "prefill_s8"
    assert inputs["input_ids"].tolist() == [105, 106, 107, 108, 109, 110, 0, 0]
    assert inputs["positions"].tolist() == [5, 6, 7, 8, 9, 10, 0, 0]
    assert inputs["slot_mapping"].tolist() == [slot(1, p) for p in range(5, 11)] + [0, 0]
    assert inputs["block_tables"].tolist() == [list(range(20, 28))]
    assert inputs["logits_indices"].tolist() == [5]


def test_a_bucket_keeps_its_arrays(requests: Requests) -> None:
    """Executors bind them once."""
    steps = StepBuilder(BUCKETS, BLOCK)
    _, first = steps.prefill(requests, 0, 0, 8)
    before = {name: array.ctypes.data for name, array in first.items()}
    _, second = steps.prefill(requests, 1, 4, 7)
    assert {name: array.ctypes.data for name, array in second.items()} == before
