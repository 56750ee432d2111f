"""Batching, scheduling and sampling, against values that are computed without any of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engine import run_cases
from tests.support.reference import greedy, logits

GREEDY = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "max_tokens": 16, "ignore_eos": True}
SHORT = [[7, 300, 12, 45], [9], [200, 201, 202, 203, 204, 205, 206]]
LONG = [[(17 * i * i + 31 * i + offset) % 1000 + 10 for i in range(length)] for offset, length in ((0, 120), (5, 150))]
SHARED = [*LONG[0][:64], 5, 6, 7]

Result = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path]) -> Path:
    return tiny("llama")


@pytest.fixture(scope="module")
def results(folder: Path, mode: str) -> dict[str, Result]:
    """What each engine made of its calls: vLLM is imported once for all."""
    plain = {"model": str(folder), "dtype": "float32", "max_model_len": 256, "max_num_seqs": 4}
    chunks = {"num_batched_tokens_buckets": [4, 16], "decode_context_length_buckets": [128]}
    chunked = {**plain, "max_num_batched_tokens": 16, "additional_config": {"neuron_config": chunks}}
    cases = {
        "plain": {"args": {**plain, "enable_prefix_caching": False}, "calls": _plain_calls()},
        "chunked": {"args": chunked, "calls": _chunked_calls()},
        "crowded": {
            "args": {**plain, "max_model_len": 64, "num_gpu_blocks_override": 9, "enable_prefix_caching": False},
            "calls": [
                {"prompts": SHORT * 2, "params": {**GREEDY, "max_tokens": 40}},
                {"prompts": SHORT * 2, "params": [{**SAMPLED, "max_tokens": 40, "seed": i} for i in range(6)]},
            ],
        },
        "roomy": {
            "args": {**plain, "max_model_len": 64},
            "calls": [{"prompts": SHORT * 2, "params": [{**SAMPLED, "max_tokens": 40, "seed": i} for i in range(6)]}],
        },
    }
    answers = run_cases([{"do": "generate", **case} for case in cases.values()], mode)
    for answer in answers:
        assert answer["exit"] == 0, answer["log"]
    return dict(zip(cases, answers, strict=True))


def _plain_calls() -> list[dict[str, Any]]:
    seeded = [{**SAMPLED, "seed": seed} for seed in (1, 2, 3)]
    return [
        {"prompts": SHORT + LONG, "params": GREEDY},
        {"prompts": SHORT, "params": seeded},
        {"prompts": list(reversed(SHORT)), "params": list(reversed(seeded))},
        {"prompts": [SHORT[0]] * 2, "params": [{**SAMPLED, "seed": 1}, {**SAMPLED, "seed": 9}]},
        {"prompts": [SHORT[0]], "params": {**GREEDY, "repetition_penalty": 1.5}},
        {"prompts": [SHORT[0]], "params": {**GREEDY, "presence_penalty": 0.8, "frequency_penalty": 0.6}},
        {"prompts": [SHORT[2]], "params": {**GREEDY, "logprobs": 5, "prompt_logprobs": 3}},
        {"prompts": [SHORT[0]], "params": {**GREEDY, "logit_bias": {"77": 100.0}}},
        {"prompts": [SHORT[0]], "params": {**GREEDY, "allowed_token_ids": [40, 41, 42]}},
        {"prompts": [SHORT[0]], "params": {**SAMPLED, "seed": 4, "n": 3}},
        {"prompts": [LONG[1]], "params": {**GREEDY, "max_tokens": 500}},
        {"prompts": ["pick"], "params": {"max_tokens": 8, "structured_outputs": {"choice": ["yes", "no"]}}},
        {"prompts": [*SHORT, SHORT[0]], "params": [GREEDY, {**SAMPLED, "seed": 2}, {**GREEDY, "logprobs": 1}, GREEDY]},
        {"prompts": [LONG[1]], "params": {**SAMPLED, "seed": 3}},
    ]


def _chunked_calls() -> list[dict[str, Any]]:
    return [
        {"prompts": LONG, "params": GREEDY},
        {"prompts": [*LONG, SHARED], "params": GREEDY},
        {"prompts": [LONG[1], *SHORT], "params": [{**SAMPLED, "seed": seed} for seed in (3, 1, 2, 3)]},
        {"prompts": [LONG[0][:40]], "params": {**GREEDY, "prompt_logprobs": 0}},
    ]


def ids(requests: list[Result]) -> list[list[int]]:
    return [request["outputs"][0]["ids"] for request in requests]


def test_greedy_over_short_and_long_prompts(results: dict[str, Result], folder: Path) -> None:
    assert ids(results["plain"]["calls"][0]) == [greedy(folder, prompt, 16) for prompt in SHORT + LONG]


def test_prompts_in_chunks_beside_decodes_and_over_two_context_lengths(
    results: dict[str, Result], folder: Path
) -> None:
    assert ids(results["chunked"]["calls"][0]) == [greedy(folder, prompt, 16) for prompt in LONG]


def test_cached_prefixes(results: dict[str, Result], folder: Path) -> None:
    assert ids(results["chunked"]["calls"][1]) == [greedy(folder, prompt, 16) for prompt in [*LONG, SHARED]]
    # All whole blocks of 16 of the two long prompts, and those of the part that the third one shares.
    assert results["chunked"]["metrics"]["vllm:prefix_cache_hits"] >= 112 + 144 + 64


def test_preempted_requests_go_on_where_they_were(results: dict[str, Result], folder: Path) -> None:
    crowded = results["crowded"]
    assert crowded["metrics"]["vllm:num_preemptions"] > 0
    assert ids(crowded["calls"][0]) == [greedy(folder, prompt, 40) for prompt in SHORT * 2]


def test_preemption_does_not_change_what_a_seed_draws(results: dict[str, Result]) -> None:
    assert ids(results["crowded"]["calls"][1]) == ids(results["roomy"]["calls"][0])


def test_a_seed_draws_the_same_in_any_batch(results: dict[str, Result]) -> None:
    calls = results["plain"]["calls"]
    assert ids(calls[1]) == list(reversed(ids(calls[2])))
    same, other = ids(calls[3])
    assert same == ids(calls[1])[0] != other


def test_chunks_of_a_prompt_draw_nothing(results: dict[str, Result]) -> None:
    """The long prompt is prefilled in many steps; its seeded neighbours and itself draw as if it were one."""
    seeded = [
        ids(results["chunked"]["calls"][2]),
        ids(results["plain"]["calls"][1]),
        ids(results["plain"]["calls"][13]),
    ]
    assert seeded[0] == [seeded[2][0], *seeded[1]]


def test_repetition_penalty(results: dict[str, Result], folder: Path) -> None:
    prompt = SHORT[0]

    def adjust(last: torch.Tensor, generated: list[int]) -> torch.Tensor:
        seen = sorted({*prompt, *generated})
        last[seen] = torch.where(last[seen] > 0, last[seen] / 1.5, last[seen] * 1.5)
        return last

    assert ids(results["plain"]["calls"][4]) == [greedy(folder, prompt, 16, adjust)]


def test_presence_and_frequency_penalties(results: dict[str, Result], folder: Path) -> None:
    def adjust(last: torch.Tensor, generated: list[int]) -> torch.Tensor:
        for token in generated:
            last[token] -= 0.6
        for token in set(generated):
            last[token] -= 0.8
        return last

    assert ids(results["plain"]["calls"][5]) == [greedy(folder, SHORT[0], 16, adjust)]


def test_logprobs_of_tokens_and_of_the_prompt(results: dict[str, Result], folder: Path) -> None:
    (request,) = results["plain"]["calls"][6]
    output, prompt = request["outputs"][0], request["prompt_ids"]
    expected = torch.log_softmax(logits(folder, prompt + output["ids"]), dim=-1)
    for position, found in enumerate(output["logprobs"]):
        _check_row(expected[len(prompt) - 1 + position], found, output["ids"][position], 5)
    assert request["prompt_logprobs"][0] is None
    for position in range(1, len(prompt)):
        _check_row(expected[position - 1], request["prompt_logprobs"][position], prompt[position], 3)


def test_prompt_logprobs_over_chunks(results: dict[str, Result], folder: Path) -> None:
    (request,) = results["chunked"]["calls"][3]
    prompt = request["prompt_ids"]
    expected = torch.log_softmax(logits(folder, prompt), dim=-1)
    assert len(request["prompt_logprobs"]) == len(prompt)
    for position in range(1, len(prompt)):
        value, _ = request["prompt_logprobs"][position][str(prompt[position])]
        assert math.isclose(value, float(expected[position - 1, prompt[position]]), abs_tol=1e-4)
    assert request["outputs"][0]["ids"] == greedy(folder, prompt, 16)


def _check_row(expected: torch.Tensor, found: dict[str, list[float]], token: int, top: int) -> None:
    likeliest = set(expected.topk(top).indices.tolist())
    assert {int(key) for key in found} == likeliest | {token}
    for key, (value, rank) in found.items():
        assert math.isclose(value, float(expected[int(key)]), abs_tol=1e-4)
        assert rank == int((expected > expected[int(key)]).sum()) + 1


def test_logit_bias_and_allowed_tokens(results: dict[str, Result], folder: Path) -> None:
    assert ids(results["plain"]["calls"][7]) == [[77] * 16]

    def only(last: torch.Tensor, generated: list[int]) -> torch.Tensor:
        kept = torch.full_like(last, -math.inf)
        kept[40:43] = last[40:43]
        return kept

    assert ids(results["plain"]["calls"][8]) == [greedy(folder, SHORT[0], 16, only)]


def test_several_samples_of_one_prompt(results: dict[str, Result]) -> None:
    (request,) = results["plain"]["calls"][9]
    drawn = [tuple(output["ids"]) for output in request["outputs"]]
    assert len(set(drawn)) == 3


def test_generation_ends_at_max_model_len(results: dict[str, Result], folder: Path) -> None:
    (request,) = results["plain"]["calls"][10]
    count = 256 - len(request["prompt_ids"])
    assert request["outputs"][0]["reason"] == "length"
    assert request["outputs"][0]["ids"] == greedy(folder, request["prompt_ids"], count)


def test_structured_output(results: dict[str, Result]) -> None:
    (request,) = results["plain"]["calls"][11]
    assert request["outputs"][0]["text"] in ("yes", "no")


def test_one_batch_of_requests_with_different_sampling(results: dict[str, Result], folder: Path) -> None:
    first, seeded, _, last = ids(results["plain"]["calls"][12])
    assert first == last == greedy(folder, SHORT[0], 16)
    assert seeded == ids(results["plain"]["calls"][1])[1]
