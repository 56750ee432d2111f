"""What a comparison reports, of executors whose faults are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from vllm_neuron.jobs.divergence import BucketResult, Comparison, Difference, Sizes
from vllm_neuron.model.buckets import Bucket

SIZES = Sizes(blocks=40, block_size=4, max_len=32, vocab_size=50)
BUCKETS = [
    Bucket("prefill", 8, 1, 32),
    Bucket("prefill", 16, 1, 32),
    Bucket("decode", 1, 4, 16, limited=True),
    Bucket("decode", 1, 4, 32),
]


class Rule:
    """Prefers token 7 t + 3 after token t, and remembers its inputs. ``fault`` is (graph, position, sequence)."""

    def __init__(self, fault: tuple[str, int, int] | None = None, amount: float = 0.0) -> None:
        self.fault, self.amount = fault, amount
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def prepare(self) -> None:
        """Nothing to do."""

    def run(self, bucket: Bucket, inputs: Any) -> torch.Tensor:
        self.seen.append((bucket.name, {name: array.copy() for name, array in inputs.items()}))
        rows = inputs["logits_indices"]
        logits = torch.zeros(len(rows), SIZES.vocab_size)
        logits[torch.arange(len(rows)), torch.from_numpy((7 * inputs["input_ids"][rows] + 3) % SIZES.vocab_size)] = 1
        for row, position in enumerate(inputs["positions"][rows].tolist()):
            if (bucket.name, position, row) == self.fault:
                logits[row, 49] += self.amount
        return logits


def compared(*others: Rule, steps: int = 6) -> tuple[Rule, list[BucketResult]]:
    reference = Rule()
    named = {str(index): other for index, other in enumerate(others)}
    return reference, list(Comparison(SIZES, BUCKETS, reference, named, steps).run())


def test_equal_executors_differ_nowhere() -> None:
    _, results = compared(Rule(), Rule())
    assert [(result.bucket, result.route) for result in results] == [
        (name, route) for name in ("prefill_s8", "prefill_s16", "decode_b4_c16", "decode_b4") for route in "01"
    ]
    assert [result.tokens for result in results] == [1, 1, 1, 1, 24, 24, 24, 24]
    assert all(result.max_error == 0 and result.difference is None for result in results)


def test_the_first_other_token_is_found_and_not_passed_on() -> None:
    reference, results = compared(Rule(("decode_b4", 18, 2), 1.5))
    _, _, short, long = results
    assert short.difference is None
    assert long.max_error == 1.5
    assert long.difference is not None
    assert (long.difference.step, long.difference.sequence, long.difference.found) == (2, 2, 49)
    token = [inputs for name, inputs in reference.seen if name == "decode_b4"][2]["input_ids"][2]
    assert long.difference.expected == (7 * token + 3) % SIZES.vocab_size
    assert long.difference.margin == 1.0


def test_an_error_that_changes_no_token() -> None:
    _, results = compared(Rule(("prefill_s16", 15, 0), 0.25))
    assert [(result.max_error, result.difference) for result in results[:2]] == [(0, None), (0.25, None)]


@pytest.mark.parametrize("amount", [float("nan"), float("inf")])
def test_a_logit_that_is_no_number(amount: float) -> None:
    _, results = compared(Rule(("prefill_s8", 7, 0), amount))
    assert results[0].max_error == float("inf")
    assert isinstance(results[0].difference, Difference)


def test_all_executors_get_the_same_inputs_whatever_they_answer() -> None:
    wrong = Rule(("decode_b4", 17, 0), 9.0)
    reference, _ = compared(wrong, Rule())
    assert len(reference.seen) == len(wrong.seen)
    for (name, expected), (other, found) in zip(reference.seen, wrong.seen, strict=True):
        assert name == other
        for key, array in expected.items():
            np.testing.assert_array_equal(array, found[key])


def test_every_context_position_was_written_before_and_by_nobody_else() -> None:
    """What the attention of a step would read is what the same sequence wrote, and nothing is in the null block."""
    reference, _ = compared()
    for bucket in BUCKETS:
        written: dict[int, int] = {}  # slot -> position
        for name, inputs in reference.seen:
            live = inputs["slot_mapping"] >= SIZES.block_size
            written |= dict(zip(inputs["slot_mapping"][live], inputs["positions"][live], strict=True))
            if name != bucket.name:
                continue
            assert inputs["block_tables"].max() < SIZES.blocks
            for row in range(bucket.seqs):
                last = inputs["positions"].reshape(bucket.seqs, -1)[row].max()
                table = inputs["block_tables"][row]
                slots = [
                    table[p // SIZES.block_size] * SIZES.block_size + p % SIZES.block_size for p in range(last + 1)
                ]
                assert [written[slot] for slot in slots] == list(range(last + 1))
