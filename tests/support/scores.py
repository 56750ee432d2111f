"""One small request to a model without a tokenizer, whose log-probabilities are held against Hugging Face's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.reference import logits

SIZES = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 1, "max_num_batched_tokens": 128}
_PROMPT = [5, 17, 300, 41]
_TOKENS = 4
_PARAMS = {"temperature": 0, "max_tokens": _TOKENS, "ignore_eos": True, "detokenize": False, "logprobs": 5}


def score(folder: Path, env: dict[str, str]) -> dict[str, Any]:
    """The case for ``run_cases``."""
    args = {"model": str(folder), "skip_tokenizer_init": True, **SIZES}
    return {"do": "generate", "args": args, "calls": [{"prompts": [_PROMPT], "params": _PARAMS}], "env": env}


def assert_scored(result: dict[str, Any], reference: Path, bias: torch.Tensor | float = 0.0) -> None:
    """The likeliest tokens have the log-probabilities that the model in ``reference`` gives, with ``bias`` on its
    logits."""
    assert result["exit"] == 0, result["log"][-3000:]
    output = result["calls"][0][0]["outputs"][0]
    assert len(output["ids"]) == _TOKENS
    expected = logits(reference, _PROMPT + output["ids"])[len(_PROMPT) - 1 : -1] + bias
    for row, found in zip(torch.log_softmax(expected, -1), output["logprobs"], strict=True):
        for token, (logprob, _) in found.items():
            assert logprob == pytest.approx(float(row[int(token)]), abs=1e-4)
