"""Mixtures of experts in plain tensor operations of static shape: every expert sees every token, and gates decide.

That is right for any batch and costs what all experts cost, which is little more than the memory traffic of a decode
step, and much more than needed for a prefill.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.router import fused_topk_router
from vllm.model_executor.layers.fused_moe.runner import moe_runner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from vllm_neuron.model.patches.mixtures import open_mixture, route_by


@UnquantizedFusedMoEMethod.register_oot
class DenseMoEMethod(UnquantizedFusedMoEMethod):
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
        experts = layer.w13_weight.shape[0]
        # Not a scatter: its indices could repeat as far as a compiler knows, and experts are few.
        chosen = topk_ids.unsqueeze(-1) == torch.arange(experts, device=x.device)
        gates = (topk_weights.unsqueeze(-1) * chosen).sum(1)
        gate, up = torch.matmul(x.unsqueeze(0), layer.w13_weight.transpose(1, 2)).chunk(2, dim=-1)
        outputs = torch.matmul(F.silu(gate) * up, layer.w2_weight.transpose(1, 2))
        return (outputs.float() * gates.t().unsqueeze(-1)).sum(0).to(x.dtype)


def open_mixtures(model: nn.Module) -> None:
    """Replace the opaque operators around a model's mixtures by what they stand for, so that capture sees it.

    What :func:`unsupported_in_mixtures` names has to be refused before.
    """
    for layer in _mixtures(model):
        open_mixture(layer)


def unsupported_in_mixtures(model: nn.Module) -> list[str]:
    """What a model's mixtures of experts have, such as an activation or a routing, that is not implemented here."""
    found = {feature: None for layer in _mixtures(model) for feature in _unsupported(layer)}
    return [f"a mixture of experts with {feature}" for feature in found]


def _mixtures(model: nn.Module) -> Iterator[Any]:
    return (layer for layer in model.modules() if isinstance(layer, moe_runner.MoERunner))


def _unsupported(layer: Any) -> list[str]:
    experts, router = layer.routed_experts, layer.router
    plain_routing = type(router) is fused_topk_router.FusedTopKRouter and router.scoring_func == "softmax"
    unsupported = {
        "routing other than the softmax of the router's scores": not plain_routing,
        f"activation {experts.activation}": experts.activation is not MoEActivation.SILU,
        "biases": experts.quant_method.moe.has_bias,
        "router weights on the input": experts.apply_router_weight_on_input,
    }
    return [feature for feature, found in unsupported.items() if found]


def _topk_softmax(
    topk_weights: torch.Tensor,
    topk_indices: torch.Tensor,
    token_expert_indices: torch.Tensor,
    gating_output: torch.Tensor,
    renormalize: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's operator of that name, which only its own builds have."""
    scores = torch.softmax(gating_output.float(), dim=-1)
    weights, indices = torch.topk(scores, topk_indices.shape[-1], dim=-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, indices.to(topk_indices.dtype)


route_by(_topk_softmax)
