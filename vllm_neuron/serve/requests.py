"""The running requests: vLLM's persistent batch, kept in step with the scheduler."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.sampling_params import SamplingType
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.sample.logits_processor import build_logitsprocs
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from vllm_neuron.errors import UnsupportedError
from vllm_neuron.execute.batch import Requests


class RunningRequests:
    """Requests that the worker knows of, and those of them that are in the current batch.

    The scheduler sends differences only, so every request is kept from when it is new until it is finished, whether
    it is in the batch, waits for its turn, or was preempted.
    """

    def __init__(self, vllm_config: Any, block_size: int) -> None:
        model_config, scheduler = vllm_config.model_config, vllm_config.scheduler_config
        custom = tuple(model_config.logits_processors or ())
        device = torch.device("cpu")
        self.states: dict[str, CachedRequestState] = {}
        self.batch: Any = InputBatch(
            max_num_reqs=scheduler.max_num_seqs,
            max_model_len=model_config.max_model_len,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            device=device,
            vocab_size=model_config.get_vocab_size(),
            block_sizes=[block_size],
            max_num_blocks_per_req=[-(-model_config.max_model_len // block_size)],
            logitsprocs=build_logitsprocs(vllm_config, device, False, False, custom),
            # Nobody knows whether a custom processor looks at the tokens so far.
            logitsprocs_need_output_token_ids=bool(custom),
            reasoning_config=vllm_config.reasoning_config,
        )
        self.views = Requests(self.batch.token_ids_cpu, self.batch.block_table[0].get_numpy_array())

    def update(self, scheduled: SchedulerOutput) -> None:
        """Apply what the scheduler changed. After it, the batch is exactly what is scheduled."""
        for req_id in scheduled.finished_req_ids:
            self.states.pop(req_id, None)
            self.batch.remove_request(req_id)
        # A request that is preempted and resumed in one step gets new blocks: out, and in again.
        staying = scheduled.num_scheduled_tokens.keys() - scheduled.scheduled_cached_reqs.resumed_req_ids
        for req_id in list(self.batch.req_id_to_index.keys() - staying):
            self.batch.remove_request(req_id)
        joining = [self._new(data) for data in scheduled.scheduled_new_reqs]
        joining += self._advance(scheduled.scheduled_cached_reqs)
        for state in joining:
            self.batch.add_request(state)
        self.batch.condense()
        self.batch.refresh_metadata()

    def starts(self) -> npt.NDArray[np.int64]:
        """Per request of the batch, the position of its first token in this step."""
        starts: npt.NDArray[np.int64] = self.batch.num_computed_tokens_cpu[: self.batch.num_reqs].astype(np.int64)
        return starts

    def append(self, index: int, token: int) -> None:
        """A token that was sampled for the request at ``index`` of the batch."""
        end = int(self.batch.num_tokens_no_spec[index])
        # The last token that fits a request is never read again.
        if end < self.batch.max_model_len:
            self.batch.token_ids_cpu[index, end] = token
            self.batch.is_token_ids[index, end] = True
        self.batch.num_tokens_no_spec[index] = end + 1
        self.states[self.batch.req_ids[index]].output_token_ids.append(token)

    def _new(self, data: NewRequestData) -> CachedRequestState:
        if data.req_id in self.states:
            raise UnsupportedError("A request whose prompt arrives in parts is not supported on the Neuron platform")
        params, generator = data.sampling_params, None
        assert params is not None, "only generation is supported"
        if params.sampling_type == SamplingType.RANDOM_SEED:
            assert params.seed is not None
            generator = torch.Generator().manual_seed(params.seed)
        state = CachedRequestState(
            req_id=data.req_id,
            prompt_token_ids=data.prompt_token_ids,
            mm_features=[],
            sampling_params=params,
            generator=generator,
            block_ids=data.block_ids,
            num_computed_tokens=data.num_computed_tokens,
            output_token_ids=[],
        )
        self.states[data.req_id] = state
        return state

    def _advance(self, cached: Any) -> list[CachedRequestState]:
        """Requests seen before: their progress and new blocks. Returns those that are not in the batch."""
        joining = []
        for i, req_id in enumerate(cached.req_ids):
            state, blocks = self.states[req_id], cached.new_block_ids[i]
            state.num_computed_tokens = cached.num_computed_tokens[i]
            if req_id in cached.resumed_req_ids:
                state.block_ids = blocks
            elif blocks is not None:
                for known, new in zip(state.block_ids, blocks, strict=True):
                    known.extend(new)
            index = self.batch.req_id_to_index.get(req_id)
            if index is None:
                joining.append(state)
                continue
            self.batch.num_computed_tokens_cpu[index] = state.num_computed_tokens
            if blocks is not None:
                self.batch.block_table.append_row(blocks, index)
        return joining
