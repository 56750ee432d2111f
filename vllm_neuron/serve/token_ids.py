"""The token ids that requests and model folders bring, against the rows that the model has.

A compiled graph clamps an id that has no row, and answers from another token's row; a sampler that is handed one ends
the engine. Both are kept from it here, where every request of ``LLM`` and of the server passes.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection
from typing import Any

from vllm.exceptions import VLLMValidationError

from vllm_neuron.errors import NeuronError
from vllm_neuron.serve import patches

logger = logging.getLogger("vllm.neuron.requests")

_IDS_OF_PARAMS = ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids")


class TokenIdError(NeuronError, VLLMValidationError, ValueError):
    """A token id that the model has no row for: status 400 from a server, a ``ValueError`` from ``LLM``."""

    code = "token-id"


def check_requests() -> None:
    """Have every request that is made in this process checked. Those that fail raise :class:`TokenIdError`."""
    patches.check_requests(_check_prompt, _check_params, _drop_ends_without_a_row)


def _check_prompt(model_config: Any, token_ids: Collection[int], parameter: str | None) -> None:
    _check("the prompt", token_ids, model_config, parameter)


def _check_params(vllm_config: Any, params: Any) -> None:
    model_config, reasoning = vllm_config.model_config, vllm_config.reasoning_config
    for name in _IDS_OF_PARAMS:
        _check(name, getattr(params, name, None) or (), model_config, name)
    if getattr(params, "thinking_token_budget", None) is not None and reasoning:
        forced = reasoning.reasoning_end_token_ids or ()
        name = "thinking_token_budget"
        _check(f"the end of reasoning, which {name} forces", forced, model_config, name)


def _check(place: str, ids: Collection[int], model_config: Any, parameter: str | None) -> None:
    rows = model_config.get_vocab_size()
    if missing := _without_a_row(ids, rows):
        shown = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        raise TokenIdError(
            f"Token id {shown} in {place} has no row in this model: its vocabulary has {rows}, so ids from 0 to "
            f"{rows - 1} are accepted. Where a tokenizer made it, that tokenizer has tokens which the model lacks",
            parameter=parameter,
        )


def _without_a_row(ids: Collection[int], rows: int) -> list[int]:
    if not ids or (min(ids) >= 0 and max(ids) < rows):
        return []
    return sorted({token for token in ids if not 0 <= token < rows})


def _drop_ends_without_a_row(vllm_config: Any, params: Any) -> None:
    """An end token of the tokenizer or the generation configuration that can't be drawn need not be looked for either.

    ``min_tokens`` masks the end tokens in logits of as many columns, and a grammar refuses those that it can't mask.
    """
    rows = vllm_config.model_config.get_vocab_size()
    if missing := _without_a_row(params._all_stop_token_ids, rows):
        params.stop_token_ids = [token for token in params.stop_token_ids if token not in missing]
        params._all_stop_token_ids = params._all_stop_token_ids.difference(missing)
        _warn_once(f"End tokens {missing} of this model's folder have no row in its vocabulary of {rows}: they never "
                   "end an answer")  # fmt: skip


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)
