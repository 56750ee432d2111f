"""The token ids that requests and model folders bring, against the rows that the model has.

A compiled graph clamps an id that has no row, and answers from another token's row; a sampler that is handed one ends
the engine. Both are kept from it here, where every request of ``LLM`` and of the server passes.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.renderers.base import BaseRenderer
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor

logger = logging.getLogger("vllm.neuron.requests")

_IDS_OF_PARAMS = ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids")


class TokenIdError(VLLMValidationError, ValueError):
    """A token id that the model has no row for: status 400 from a server, a ``ValueError`` from ``LLM``."""


@functools.cache
def check_requests() -> None:
    """Have vLLM check the ids of each request before an engine gets it; once per process.

    vLLM 0.32 accepts an id of the prompt that the tokenizer has or the model, skips the check without a tokenizer, and
    looks at none that come from the generation configuration. No hook of its platforms knows the model.
    """
    setattr(BaseRenderer, "validate_token_ids", _check_prompt)  # noqa: B010
    setattr(InputProcessor, "process_inputs", _checking(InputProcessor.process_inputs))  # noqa: B010
    setattr(AsyncLLM, "generate", _checking_at_once(AsyncLLM.generate))  # noqa: B010


def ids_without_a_row(ids: Collection[int], rows: int) -> list[int]:
    """Those of ``ids`` that are no index into ``rows``, in order."""
    if not ids or (min(ids) >= 0 and max(ids) < rows):
        return []
    return sorted({token for token in ids if not 0 <= token < rows})


def _check_prompt(renderer: Any, token_ids: Collection[int], *, parameter: str | None = None) -> None:
    _check("the prompt", token_ids, renderer.model_config.get_vocab_size(), parameter)


def _check_params(vllm_config: Any, params: Any) -> None:
    rows = vllm_config.model_config.get_vocab_size()
    for name in _IDS_OF_PARAMS:
        _check(name, getattr(params, name, None) or (), rows, name)
    if getattr(params, "thinking_token_budget", None) is not None and vllm_config.reasoning_config:
        forced = vllm_config.reasoning_config.reasoning_end_token_ids or ()
        _check("the end of reasoning, which thinking_token_budget forces", forced, rows, "thinking_token_budget")


def _checking(process: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(process)
    def process_and_check(self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        _check_params(self.vllm_config, params)
        request = process(self, request_id, prompt, params, *args, **kwargs)
        _drop_ends_without_a_row(request.sampling_params, self.model_config.get_vocab_size())
        return request

    return process_and_check


def _checking_at_once(generate: Callable[..., Any]) -> Callable[..., Any]:
    """The server asks for a generator before it sends a status, and takes from it after: too late for a 400."""

    @functools.wraps(generate)
    def check_and_generate(llm: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        _check_params(llm.vllm_config, sampling_params)
        if isinstance(prompt, dict):
            _check_prompt(llm.renderer, prompt.get("prompt_token_ids") or ())
        return generate(llm, prompt, sampling_params, *args, **kwargs)

    return check_and_generate


def _check(place: str, ids: Collection[int], rows: int, parameter: str | None) -> None:
    if missing := ids_without_a_row(ids, rows):
        shown = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        raise TokenIdError(
            f"Token id {shown} in {place} has no row in this model: its vocabulary has {rows}, so ids from 0 to "
            f"{rows - 1} are accepted. Where a tokenizer made it, that tokenizer has tokens which the model lacks",
            parameter=parameter,
        )


def _drop_ends_without_a_row(params: Any, rows: int) -> None:
    """An end token of the tokenizer or the generation configuration that can't be drawn need not be looked for either.

    ``min_tokens`` masks the end tokens in logits of ``rows`` columns, and a grammar refuses those that it can't mask.
    """
    if params is None:
        return
    if missing := ids_without_a_row(params._all_stop_token_ids, rows):
        params.stop_token_ids = [token for token in params.stop_token_ids if token not in missing]
        params._all_stop_token_ids = params._all_stop_token_ids.difference(missing)
        _warn_once(f"End tokens {missing} of this model's folder have no row in its vocabulary of {rows}: they never "
                   "end an answer")  # fmt: skip


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)
