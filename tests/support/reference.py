"""What Hugging Face's own implementation of a model says: the expected values of generation tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


@functools.cache
def _model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    # The fused attention of torch leaves out Gemma 2's soft cap.
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def logits(folder: Path, ids: list[int]) -> torch.Tensor:
    """float32 [tokens, vocabulary] of one sequence."""
    with torch.no_grad():
        found: torch.Tensor = _model(folder)(torch.tensor([ids])).logits[0]
    return found


def greedy(
    folder: Path, prompt: list[int], count: int, adjust: Callable[[torch.Tensor, list[int]], torch.Tensor] | None = None
) -> list[int]:
    """The ``count`` likeliest tokens after ``prompt``, one by one, without a cache.

    ``adjust`` changes the last logits, float32 [vocabulary], given the tokens generated so far.
    """
    ids = list(prompt)
    for _ in range(count):
        last = logits(folder, ids)[-1]
        if adjust is not None:
            last = adjust(last.clone(), ids[len(prompt) :])
        ids.append(int(last.argmax()))
    return ids[len(prompt) :]
