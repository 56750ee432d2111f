"""Every architecture of the matrix generates what Hugging Face's own implementation of it generates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.engine import run_cases
from tests.support.models import ARCHITECTURES, SLIDING_WINDOW
from tests.support.reference import greedy

FAST = ["llama", "gemma2"]
REST = [name for name in ARCHITECTURES if name not in FAST]
TOKENS = 24
PROMPTS = [
    "x",
    "def main(",
    "for i in range(10): print(i",
    "# The quick brown fox jumps over the lazy dog, then returns a value that is longer than any window by some tokens",
    "import os\nclass Foo:",
]


@pytest.mark.parametrize("architectures", [FAST, pytest.param(REST, marks=pytest.mark.slow)], ids="-".join)
@pytest.mark.parametrize(
    "mode", ["eager", pytest.param("compiled", marks=pytest.mark.slow), "compiled by the XLA route"]
)
def test_greedy_tokens_equal_the_reference(tiny: Callable[[str], Path], architectures: list[str], mode: str) -> None:
    compare(tiny, architectures, mode)


@pytest.mark.slow
def test_a_mixture_that_gathers_the_experts_it_chose(tiny: Callable[[str], Path]) -> None:
    """Groups, a bias of the scores, a shared expert; one token at a time reads the chosen experts alone."""
    compare(tiny, ["glm4_moe"], "compiled")


def compare(tiny: Callable[[str], Path], architectures: list[str], mode: str) -> None:
    cases = [
        {
            "do": "generate",
            "args": {"model": str(tiny(name)), "dtype": "float32", "max_model_len": 128, "max_num_seqs": 4},
            "calls": [{"prompts": PROMPTS, "params": {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}}],
        }
        for name in architectures
    ]
    for name, result in zip(architectures, run_cases(cases, mode), strict=True):
        assert result["exit"] == 0, f"{name}: {result['log']}"
        (requests,) = result["calls"]
        assert max(len(request["prompt_ids"]) for request in requests) > SLIDING_WINDOW
        for request in requests:
            expected = greedy(tiny(name), request["prompt_ids"], TOKENS)
            assert request["outputs"][0]["ids"] == expected, name
            # A model that repeats one token would pass whatever attention does.
            assert len(set(expected)) > TOKENS / 3, name
