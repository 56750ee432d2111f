"""Log probabilities of prompt tokens, gathered while a prompt is computed."""

from __future__ import annotations

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import CachedRequestState


class PromptLogprobs:
    """Collects, per request, the scores of its prompt tokens given those before."""

    def __init__(self, sampler: Sampler, vocab_size: int, mode: str) -> None:
        self._sampler, self._vocab_size = sampler, vocab_size
        self._as_logits = mode.endswith("logits")
        self._finished: dict[str, LogprobsTensors] = {}

    def add(self, state: CachedRequestState, start: int, logits: torch.Tensor) -> None:
        """``logits``, float32 [tokens, vocabulary], of the tokens of ``state`` from position ``start``."""
        prompt = state.prompt_token_ids
        assert prompt is not None and state.sampling_params is not None
        wanted = state.sampling_params.prompt_logprobs
        assert wanted is not None
        wanted = self._vocab_size if wanted == -1 else wanted
        scores = state.in_progress_prompt_logprobs_cpu
        if scores is None:
            scores = LogprobsTensors.empty_cpu(len(prompt) - 1, wanted + 1)
            state.in_progress_prompt_logprobs_cpu = scores
        # Each token is scored by the row before it, and the last row scores what is sampled.
        targets = torch.tensor(prompt[start + 1 : start + 1 + len(logits)])
        count = len(targets)
        if count:
            rows = logits[:count] if self._as_logits else self._sampler.compute_logprobs(logits[:count])
            ids, values, ranks, *_ = self._sampler.gather_logprobs(rows, wanted, targets)
            place = slice(start, start + count)
            scores.logprob_token_ids[place] = ids
            scores.logprobs[place] = values
            scores.selected_token_ranks[place] = ranks
        if start + len(logits) >= len(prompt):
            state.in_progress_prompt_logprobs_cpu = None
            self._finished[state.req_id] = scores

    def finished(self) -> list[str]:
        """Requests whose whole prompt is scored, and not yet taken."""
        return list(self._finished)

    def take(self, req_id: str) -> LogprobsTensors:
        """The scores of a finished request: [prompt tokens - 1, wanted + 1]."""
        return self._finished.pop(req_id)
