"""Token ids that a model has no row for: refused by name and limit, whoever brings them, and the engine lives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.conftest import BEYOND, ROWS
from tests.support.engine import run_cases
from tests.support.reference import greedy
from tools.server import Server

PROMPT = [7, 300, 12, 45]
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


def post(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json={"model": "tiny", "temperature": 0, **body}, timeout=120)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"echo": True, "logprobs": 1},
        {"prompt_logprobs": 1},
        {"repetition_penalty": 1.5},
        {"n": 2, "temperature": 1.0},
        {"stream": True},
    ],
    ids=lambda fields: "-".join(fields) or "plain",
)  # fmt: skip
def test_ids_of_a_prompt(dev_server: Server, fields: dict[str, Any]) -> None:
    check(post(dev_server, "/v1/completions", {"prompt": [5, BEYOND], "max_tokens": 2, **fields}))


def test_text_that_the_tokenizer_has_more_tokens_for(dev_server: Server, beyond_text: str) -> None:
    check(post(dev_server, "/v1/completions", {"prompt": f"a {beyond_text} b", "max_tokens": 2}))
    messages = [{"role": "user", "content": beyond_text}]
    check(post(dev_server, "/v1/chat/completions", {"messages": messages, "max_tokens": 2}))


def test_ids_for_the_generate_endpoint(dev_server: Server) -> None:
    check(post(dev_server, "/inference/v1/generate", {"token_ids": [BEYOND], "sampling_params": {"max_tokens": 2}}))


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": [BEYOND]},
        {"allowed_token_ids": [5, BEYOND]},
        {"logit_bias": {str(BEYOND): 1.0}},
        {"stop_token_ids": [BEYOND], "min_tokens": 2},
        {"logit_bias": {str(BEYOND): 1.0}, "stream": True},
    ],
    ids=lambda fields: "-".join(fields),
)  # fmt: skip
def test_ids_of_sampling(dev_server: Server, fields: dict[str, Any]) -> None:
    check(post(dev_server, "/v1/completions", {"prompt": PROMPT, "max_tokens": 2, **fields}))


def check(response: httpx.Response) -> None:
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert str(BEYOND) in message and str(ROWS - 1) in message


def test_ends_that_have_no_row_change_nothing(dev_server: Server, few_rows: Path, beyond_text: str) -> None:
    """Nor do words that can't be drawn; an answer is drawn from the rows that there are."""
    expected = greedy(few_rows, PROMPT, 6)
    cases: list[dict[str, Any]] = [{"min_tokens": 6}, {"min_tokens": 6, "bad_words": [beyond_text]}, {}]
    for fields in cases:
        body = {"prompt": PROMPT, "max_tokens": 6, "return_token_ids": True, **fields}
        answer = post(dev_server, "/v1/completions", body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"] == expected
    assert f"End tokens [-1, {BEYOND}] of this model's folder have no row" in dev_server.log.read_text()


def test_structured_output_of_a_larger_tokenizer(dev_server: Server) -> None:
    body = {"prompt": "pick", "max_tokens": 8, "min_tokens": 1, "structured_outputs": {"choice": ["yes", "no"]}}
    answer = post(dev_server, "/v1/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] in ("yes", "no")


def test_an_llm_raises_and_goes_on_and_a_failed_step_is_the_last(few_rows: Path) -> None:
    """In the caller's own process: nothing is left behind for the next call to wait for."""
    sizes = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 2}
    processors = {"logits_processors": ["tests.support.failing_processor:FailingProcessor"]}
    bad = {"prompts": [PROMPT, [5, BEYOND]], "params": GREEDY, "fails": True}
    good = {"prompts": [PROMPT], "params": GREEDY}
    params = [{**GREEDY, "allowed_token_ids": [BEYOND]}, {**GREEDY, "prompt_logprobs": 1}]
    fault = {**good, "params": {**GREEDY, "extra_args": {"fail": True}}, "fails": True}
    calls = [bad, {"prompts": [[-3], [5]], "params": params[1], "fails": True},
             {**good, "params": params[0], "fails": True}, good, fault, {**good, "fails": True}]  # fmt: skip
    with_tokenizer, without = run_cases(
        [
            {"do": "generate", "args": {"model": str(few_rows), **sizes, **processors}, "calls": calls},
            {
                "do": "generate",
                "args": {"model": str(few_rows), **sizes, "skip_tokenizer_init": True},
                "calls": [{**bad, "params": {**GREEDY, "detokenize": False}}],
            },
        ]
    )
    assert with_tokenizer["exit"] == without["exit"] == 0, with_tokenizer["log"] + without["log"]
    named = [*with_tokenizer["calls"][:3], *without["calls"]]
    for refused, token in zip(named, (BEYOND, -3, BEYOND, BEYOND), strict=True):
        assert "ValueError" in refused["kinds"]
        assert f"Token id {token} in " in refused["error"] and f"from 0 to {ROWS - 1} " in refused["error"]
    assert with_tokenizer["calls"][3][0]["outputs"][0]["ids"] == greedy(few_rows, PROMPT, 6)
    assert [failed["error"] for failed in with_tokenizer["calls"][4:]] == [
        "a fault of the test",
        "an earlier step of this engine failed (RuntimeError: a fault of the test), and it can't go on: make a new LLM",
    ]
