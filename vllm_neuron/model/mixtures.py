"""Mixtures of experts in plain tensor operations of static shape.

Two ways give the same: a small batch gathers the weights of the experts that were chosen, and reads no others; a larger
one has every expert see every token, and gates decide. Which one is known from shapes alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.router.custom_routing_router import CustomRoutingRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter
from vllm.model_executor.layers.fused_moe.runner import moe_runner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from vllm_neuron.model.patches.mixtures import open_mixture, route_by
from vllm_neuron.model.routing import SCORES, Routing, route

# A gathered expert is read, written and read again, where one that is used in place is read once.
_GATHERING_COSTS = 3


@UnquantizedFusedMoEMethod.register_oot
class PlainMoEMethod(UnquantizedFusedMoEMethod):
    """What vLLM's mixture layers call on this platform."""

    @property
    def is_monolithic(self) -> bool:
        return False

    def apply(  # type: ignore[override]
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[tokens, hidden] from x of [tokens, hidden] and the experts chosen for each token, [tokens, k]."""
        if layer.apply_router_weight_on_input:
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        experts = layer.w13_weight.shape[0]
        mix = mix_chosen if gathers(topk_ids.numel(), experts) else mix_all
        return mix(layer, x, topk_weights, topk_ids)


def gathers(choices: int, experts: int) -> bool:
    """Whether a step that makes so many choices, tokens * k, gathers the weights of the experts that are chosen."""
    return choices * _GATHERING_COSTS < experts


def mix_chosen(layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The mixture [tokens, hidden], from the weights of the chosen experts alone, gathered for each choice."""
    tokens, k = ids.shape
    rows = x.unsqueeze(1).expand(tokens, k, x.shape[-1]).reshape(tokens * k, 1, -1)
    outputs = _run_experts(layer, rows, ids.reshape(-1)).view(tokens, k, -1)
    return (outputs.float() * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def mix_all(layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The mixture [tokens, hidden], of which every expert computes every token, and gates take what was chosen."""
    # Not a scatter: its indices could repeat as far as a compiler knows, and experts are few.
    chosen = ids.unsqueeze(-1) == torch.arange(layer.w13_weight.shape[0], device=x.device)
    gates = (weights.unsqueeze(-1) * chosen).sum(1)
    outputs = _run_experts(layer, x.unsqueeze(0))
    return (outputs.float() * gates.t().unsqueeze(-1)).sum(0).to(x.dtype)


def _run_experts(layer: Any, rows: torch.Tensor, picked: torch.Tensor | None = None) -> torch.Tensor:
    """[experts, rows, hidden] from rows of [experts or 1, rows, hidden]; ``picked`` are the experts, otherwise all."""

    def project(rows: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_bias", None)
        if picked is not None:
            weight, bias = weight.index_select(0, picked), None if bias is None else bias.index_select(0, picked)
        found = torch.matmul(rows, weight.transpose(1, 2))
        return found if bias is None else found + bias.unsqueeze(1)

    return project(_ACTIVATIONS[layer.activation](layer, project(rows, "w13")), "w2")


def _gated(function: Callable[[torch.Tensor], torch.Tensor], layer: Any, hidden: torch.Tensor) -> torch.Tensor:
    gate, up = hidden.chunk(2, dim=-1)
    return function(gate) * up


def _plain(function: Callable[[torch.Tensor], torch.Tensor], layer: Any, hidden: torch.Tensor) -> torch.Tensor:
    return function(hidden)


def _swish_gated(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
    """SwiGLU; with a limit, both sides are clamped, and ``alpha`` and ``beta`` are as gpt-oss has them."""
    gate, up = hidden.chunk(2, dim=-1)
    if layer.swiglu_limit is None:
        return F.silu(gate) * up
    alpha = 1.0 if layer.swiglu_alpha is None else layer.swiglu_alpha
    beta = 0.0 if layer.swiglu_beta is None else layer.swiglu_beta
    return _clamped_swiglu(gate, up, layer.swiglu_limit, alpha, beta)


def _interleaved_swiglu(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
    """SwiGLU of gpt-oss: gate and up alternate, and its numbers are its own."""
    return _clamped_swiglu(hidden[..., ::2], hidden[..., 1::2], limit=7.0, alpha=1.702, beta=1.0)


def _clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float, alpha: float, beta: float) -> torch.Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + beta)


_gelu_tanh = functools.partial(F.gelu, approximate="tanh")

_ACTIVATIONS: dict[MoEActivation, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    MoEActivation.SILU: _swish_gated,
    MoEActivation.SWIGLUOAI: _interleaved_swiglu,
    MoEActivation.SWIGLUOAI_UNINTERLEAVE: _swish_gated,
    MoEActivation.GELU: functools.partial(_gated, F.gelu),
    MoEActivation.GELU_TANH: functools.partial(_gated, _gelu_tanh),
    MoEActivation.SILU_NO_MUL: functools.partial(_plain, F.silu),
    MoEActivation.GELU_NO_MUL: functools.partial(_plain, F.gelu),
    MoEActivation.GELU_TANH_NO_MUL: functools.partial(_plain, _gelu_tanh),
    MoEActivation.RELU2_NO_MUL: functools.partial(_plain, lambda hidden: F.relu(hidden).square()),
}


def open_mixtures(model: nn.Module) -> None:
    """Replace the opaque operators in and around a model's mixtures by what they stand for, so that capture sees it.

    What :func:`unsupported_in_mixtures` names has to be refused before.
    """
    for layer in _mixtures(model):
        open_mixture(layer)
        # A routing function of the model's own is plain tensor operations.
        if type(layer.router) is not CustomRoutingRouter:
            experts, routing = layer.routed_experts, _ROUTINGS[type(layer.router)](layer.router)
            route_by(layer.router, functools.partial(_route_for, experts, routing))


def _route_for(experts: Any, routing: Routing, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # The bias is looked up in its module, where capture has put the graph's input; the router keeps the tensor itself.
    return route(logits, routing, experts.e_score_correction_bias)


def _by_groups(router: Any) -> Routing:
    # As vLLM does, and for what it calls no valid grouping, by the scores of all experts.
    experts, groups = router.global_num_experts, router.num_expert_group
    grouped = experts > groups and experts % groups == 0
    return Routing(
        router.top_k,
        router.scoring_func,
        router.renormalize,
        router.routed_scaling_factor,
        groups=groups if grouped else 1,
        top_groups=router.topk_group if grouped else 1,
    )


_ROUTINGS: dict[type, Callable[[Any], Routing]] = {
    FusedTopKRouter: lambda router: Routing(router.top_k, router.scoring_func, router.renormalize),
    FusedTopKBiasRouter: lambda router: Routing(
        router.top_k, router.scoring_func, router.renormalize, router.routed_scaling_factor
    ),
    GroupedTopKRouter: _by_groups,
}


def unsupported_in_mixtures(model: nn.Module) -> list[str]:
    """What a model's mixtures of experts have, such as an activation or a routing, that is not implemented here."""
    found = {feature: None for layer in _mixtures(model) for feature in _unsupported(layer)}
    return [f"a mixture of experts with {feature}" for feature in found]


def _mixtures(model: nn.Module) -> Iterator[Any]:
    return (layer for layer in model.modules() if isinstance(layer, moe_runner.MoERunner))


def _unsupported(layer: Any) -> list[str]:
    experts, router = layer.routed_experts, layer.router
    scoring = getattr(router, "scoring_func", "softmax")
    unsupported = {
        f"routing by {type(router).__name__}": type(router) not in (CustomRoutingRouter, *_ROUTINGS),
        f"scores by {scoring}": scoring not in SCORES,
        "routing by token ids": getattr(router, "_hash_indices_table", None) is not None,
        "routing of its own for images": getattr(router, "bias_vl", None) is not None,
        "shared experts among the routed ones": getattr(router, "num_fused_shared_experts", 0) > 0,
        f"activation {experts.activation.value}": experts.activation not in _ACTIVATIONS,
    }
    return [feature for feature, found in unsupported.items() if found]
