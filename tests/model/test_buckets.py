"""Which buckets a configuration has, which one a step gets, and every rule of the options."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_neuron.errors import ConfigError
from vllm_neuron.execute.base import staging
from vllm_neuron.model.buckets import BucketTable, buckets_for


def configuration(tokens: int, seqs: int, length: int, options: Any = None, **additional: Any) -> Any:
    """The parts of vLLM's configuration that buckets depend on."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=tokens, max_num_seqs=seqs),
        model_config=SimpleNamespace(max_model_len=length),
        additional_config={**additional, **({} if options is None else {"neuron_config": options})},
    )


def names(*args: Any, **kwargs: Any) -> list[str]:
    return [bucket.name for bucket in buckets_for(configuration(*args, **kwargs))]


@pytest.mark.parametrize(
    ("tokens", "seqs", "length", "expected"),
    [
        (512, 4, 2048, "prefill_s128 prefill_s256 prefill_s512 decode_b1 decode_b2 decode_b4"),
        (8192, 1, 300, "prefill_s128 prefill_s256 prefill_s300 decode_b1"),
        (128, 1, 128, "prefill_s128 decode_b1"),
        (2048, 3, 64, "prefill_s64 decode_b1 decode_b2 decode_b3"),
        (100, 6, 4096, "prefill_s100 decode_b1 decode_b2 decode_b4 decode_b6"),
        (129, 1, 4096, "prefill_s128 prefill_s129 decode_b1"),
    ],
)
def test_defaults(tokens: int, seqs: int, length: int, expected: str) -> None:
    assert names(tokens, seqs, length) == expected.split()


def test_options() -> None:
    options = {
        "num_batched_tokens_buckets": [4, 512],
        "num_seqs_buckets": [3, 5],
        "decode_context_length_buckets": [128, 384],
    }
    expected = "prefill_s4 prefill_s512 decode_b3_c128 decode_b3_c384 decode_b3 decode_b5_c128 decode_b5_c384 decode_b5"
    assert names(512, 5, 1000, options) == expected.split()
    contexts = [bucket.context for bucket in buckets_for(configuration(512, 5, 1000, options))]
    assert contexts == [1000, 1000, 128, 384, 1000, 128, 384, 1000]


def test_an_option_of_none_and_options_of_others_mean_the_default() -> None:
    plain = names(512, 4, 2048)
    assert names(512, 4, 2048, {"num_seqs_buckets": None}) == plain
    assert names(512, 4, 2048, somebody_elses=1) == plain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "neuron_config must be an object, not []"),
        ({"num_seq_buckets": [4]}, "neuron_config has no option 'num_seq_buckets': did you mean num_seqs_buckets?"),
        ({"colour": 1}, "neuron_config has no option 'colour': The options are num_batched_tokens_buckets, "),
        ({"num_seqs_buckets": 4}, "num_seqs_buckets must be a list of positive integers, not 4"),
        ({"num_seqs_buckets": []}, "num_seqs_buckets must be a list of positive integers, not []"),
        ({"num_seqs_buckets": [0, 4]}, "num_seqs_buckets must be a list of positive integers, not [0, 4]"),
        ({"num_seqs_buckets": [True, 4]}, "num_seqs_buckets must be a list of positive integers, not [True, 4]"),
        ({"num_seqs_buckets": ["1", 4]}, "num_seqs_buckets must be a list of positive integers, not ['1', 4]"),
        ({"num_seqs_buckets": [2, 1, 4]}, "num_seqs_buckets must be ascending, without repeats: [2, 1, 4]"),
        ({"num_batched_tokens_buckets": [64, 64, 512]}, "must be ascending, without repeats: [64, 64, 512]"),
        (
            {"num_batched_tokens_buckets": [128, 256]},
            "The largest of num_batched_tokens_buckets must equal max_num_batched_tokens (512), not 256: "
            "change the list, or set --max-num-batched-tokens 256",
        ),
        (
            {"num_seqs_buckets": [1, 8]},
            "The largest of num_seqs_buckets must equal max_num_seqs (4), not 8: "
            "change the list, or set --max-num-seqs 8",
        ),
        ({"decode_context_length_buckets": [100]}, "must be multiples of 128: 100 is not"),
        ({"decode_context_length_buckets": [128, 2048]}, "must be below max_model_len (2048)"),
        ({"decode_context_length_buckets": [256, 128]}, "must be ascending, without repeats: [256, 128]"),
    ],
)
def test_each_broken_rule_is_named(options: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        names(512, 4, 2048, options)
    assert message in str(caught.value)


def test_a_step_gets_the_smallest_bucket_that_holds_it() -> None:
    options = {"decode_context_length_buckets": [128, 512]}
    table = BucketTable(buckets_for(configuration(512, 4, 2048, options)))
    assert [table.prefill(tokens).name for tokens in (2, 128, 129, 512)] == [
        "prefill_s128",
        "prefill_s128",
        "prefill_s256",
        "prefill_s512",
    ]
    steps = [(1, 1), (1, 128), (1, 129), (3, 512), (4, 513), (2, 2048)]
    assert [table.decode(*step).name for step in steps] == [
        "decode_b1_c128",
        "decode_b1_c128",
        "decode_b1_c512",
        "decode_b4_c512",
        "decode_b4",
        "decode_b2",
    ]
    for too_large in (lambda: table.prefill(513), lambda: table.decode(5, 1), lambda: table.decode(1, 2049)):
        with pytest.raises(IndexError):
            too_large()


def test_step_inputs_are_aligned_and_as_wide_as_the_context() -> None:
    (decode,) = [b for b in buckets_for(configuration(512, 4, 1000, {"num_seqs_buckets": [4]})) if b.kind == "decode"]
    inputs = staging(decode, block_size=16)
    assert {name: array.shape for name, array in inputs.items()} == {
        "input_ids": (4,),
        "positions": (4,),
        "slot_mapping": (4,),
        "block_tables": (4, 63),
        "logits_indices": (4,),
    }
    assert all(array.ctypes.data % 64 == 0 and not array.any() for array in inputs.values())
