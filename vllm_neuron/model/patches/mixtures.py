"""What is changed of vLLM's mixtures of experts. Checked on vLLM 0.32.0 and 0.33.0."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Route = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def route_by(router: Any, route: Route) -> None:
    """Let ``route`` choose the experts of ``router``, given its logits: weights and ids, [tokens, k].

    vLLM's own routers call operators that are in its compiled builds alone. Can go when they ask their platform.
    """

    def compute_routing(
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return route(router_logits)

    router._compute_routing = compute_routing


def open_mixture(layer: Any) -> None:
    """Let ``layer``, a ``MoERunner``, call what its opaque operator stands for, so that capture sees through it.

    The runner of the Transformers backend has one more around it, which hands on what the model's own router chose.
    Can go when vLLM leaves the operators out where its own compiler is off (``CompilationMode.NONE``).
    """
    from vllm.model_executor.layers.fused_moe.runner import moe_runner

    shared = layer._shared_experts is not None
    layer._forward_entry = moe_runner._moe_forward_shared if shared else moe_runner._moe_forward
    if hasattr(layer, "_moe_state"):
        layer.forward = functools.partial(_forward_routed, layer)


def _forward_routed(
    layer: Any, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, **unused: Any
) -> torch.Tensor:
    """What ``TransformersMoERunner`` does in its operator."""
    layer._moe_state.topk_ids = topk_ids
    output: torch.Tensor = layer._forward_super(hidden_states, topk_weights.float())
    return output
