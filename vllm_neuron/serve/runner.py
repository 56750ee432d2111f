"""One scheduler step: which graphs run, over which rows, and what is sampled from their logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsTensors, ModelRunnerOutput
from vllm.v1.sample.sampler import Sampler
from vllm.v1.structured_output.utils import apply_grammar_bitmask

from vllm_neuron import metrics
from vllm_neuron.execute.base import GraphExecutor, Inputs
from vllm_neuron.execute.batch import StepBuilder
from vllm_neuron.model.buckets import Bucket
from vllm_neuron.serve.prompt_logprobs import PromptLogprobs
from vllm_neuron.serve.requests import RunningRequests


class NeuronRunner:
    """Runs steps. ``execute`` computes logits, and ``sample`` makes the output of the step from them."""

    def __init__(self, vllm_config: Any, buckets: Sequence[Bucket], executor: GraphExecutor) -> None:
        model_config, block_size = vllm_config.model_config, vllm_config.cache_config.block_size
        self._vocab_size: int = model_config.get_vocab_size()
        self._executor = executor
        self._steps = StepBuilder(buckets, block_size)
        self._requests = RunningRequests(vllm_config, block_size)
        self._sampler = Sampler(logprobs_mode=model_config.logprobs_mode)
        self._prompt_logprobs = PromptLogprobs(self._sampler, self._vocab_size, model_config.logprobs_mode)
        self._pending: tuple[SchedulerOutput, torch.Tensor] | None = None

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run the model. None means that ``sample`` has to be called for the output."""
        self._requests.update(scheduled)
        if not scheduled.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        self._pending = scheduled, self._logits(scheduled)
        return None

    def sample(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """The output of the step whose logits are pending."""
        assert self._pending is not None, "sample without execute"
        (scheduled, logits), self._pending = self._pending, None
        batch = self._requests.batch
        if grammar is not None:
            apply_grammar_bitmask(scheduled, grammar, batch, logits)
        partial = self._partial_prefills(scheduled)
        # A prefill that goes on draws no token, so it must not use up random numbers either.
        untouched = {i: batch.generators[i].get_state() for i in partial if i in batch.generators}
        sampled = self._sampler(logits=logits, sampling_metadata=batch.sampling_metadata)
        for i, state in untouched.items():
            batch.generators[i].set_state(state)
        tokens: list[list[int]] = sampled.sampled_token_ids.tolist()
        for i in partial:
            tokens[i] = []
        for i, row in enumerate(tokens):
            if row:
                self._requests.append(i, row[0])
        logprobs = sampled.logprobs_tensors
        return ModelRunnerOutput(
            req_ids=batch.req_ids.copy(),
            req_id_to_index=batch.req_id_to_index.copy(),
            sampled_token_ids=tokens,
            logprobs=None if logprobs is None else logprobs.tolists(),
            prompt_logprobs_dict=self._finished_prompt_logprobs(),
        )

    def _logits(self, scheduled: SchedulerOutput) -> torch.Tensor:
        """float32 [requests, vocabulary]: of each request's last scheduled token, in the order of the batch."""
        batch, starts = self._requests.batch, self._requests.starts()
        counts = np.array([scheduled.num_scheduled_tokens[req_id] for req_id in batch.req_ids])
        scored = [i for i, req_id in enumerate(batch.req_ids) if self._wants_prompt_logprobs(req_id)]
        decoding = counts == 1
        decoding[scored] = False
        rows = np.flatnonzero(decoding)
        if len(rows) == len(counts):
            return self._decode(rows, starts)
        logits = torch.empty(len(counts), self._vocab_size, dtype=torch.float32)
        if len(rows):
            logits[torch.from_numpy(rows)] = self._decode(rows, starts[rows])
        for i in np.flatnonzero(~decoding).tolist():
            run = self._score if i in scored else self._prefill
            logits[i] = run(i, int(starts[i]), int(counts[i]))
        return logits

    def _decode(self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> torch.Tensor:
        """float32 [rows, vocabulary] of one token each."""
        bucket, inputs = self._steps.decode(self._requests.views, rows, positions)
        metrics.count_padding(bucket.seqs - len(rows), 0)
        return self._run(bucket, inputs)[: len(rows)].float()

    def _prefill(self, row: int, start: int, count: int) -> torch.Tensor:
        """float32 [vocabulary] of the last of ``count`` tokens."""
        bucket, inputs = self._steps.prefill(self._requests.views, row, start, count)
        metrics.count_padding(0, bucket.tokens - count)
        return self._run(bucket, inputs)[0].float()

    def _score(self, row: int, start: int, count: int) -> torch.Tensor:
        """As ``_prefill``, for a request that wants the logits of every prompt token.

        A prefill graph has logits of one row. A decode graph has them of every row, and its rows may be successive
        tokens of one request: in each layer all keys are written before any is read.
        """
        state = self._requests.states[self._requests.batch.req_ids[row]]
        for first in range(start, start + count, self._steps.table.largest_decode):
            positions = np.arange(first, min(first + self._steps.table.largest_decode, start + count))
            logits = self._decode(np.full_like(positions, row), positions)
            self._prompt_logprobs.add(state, first, logits)
        return logits[-1]

    def _run(self, bucket: Bucket, inputs: Inputs) -> torch.Tensor:
        metrics.count_execution(bucket.name)
        return self._executor.run(bucket, inputs)

    def _partial_prefills(self, scheduled: SchedulerOutput) -> list[int]:
        """Requests of the batch that have tokens left to compute before their next one is sampled."""
        batch, starts = self._requests.batch, self._requests.starts()
        ends = starts + [scheduled.num_scheduled_tokens[req_id] for req_id in batch.req_ids]
        partial: list[int] = np.flatnonzero(ends < batch.num_tokens_no_spec[: batch.num_reqs]).tolist()
        return partial

    def _wants_prompt_logprobs(self, req_id: str) -> bool:
        state = self._requests.states[req_id]
        assert state.sampling_params is not None
        # Once a token is sampled they have been returned, even if the prompt is computed again after a preemption.
        return state.sampling_params.prompt_logprobs is not None and not state.output_token_ids

    def _finished_prompt_logprobs(self) -> dict[str, LogprobsTensors | None]:
        return {req_id: self._prompt_logprobs.take(req_id) for req_id in self._prompt_logprobs.finished()}
