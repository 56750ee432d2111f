"""Both ways to mix experts, against a loop over tokens and their experts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from vllm_neuron.model.mixtures import gathers, mix_all, mix_chosen

EXPERTS, TOKENS, K, HIDDEN, INNER = 6, 5, 2, 8, 12


def made(bias: bool) -> Any:
    torch.manual_seed(0)
    shapes = {"w13_weight": (EXPERTS, 2 * INNER, HIDDEN), "w2_weight": (EXPERTS, HIDDEN, INNER)}
    if bias:
        shapes |= {"w13_bias": (EXPERTS, 2 * INNER), "w2_bias": (EXPERTS, HIDDEN)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    return SimpleNamespace(activation=MoEActivation.SILU, swiglu_limit=None, **tensors)


def silu_gated(hidden: torch.Tensor) -> torch.Tensor:
    return F.silu(hidden[:INNER]) * hidden[INNER:]


def clamped(hidden: torch.Tensor) -> torch.Tensor:
    """As gpt-oss has it, with gate and up one after the other."""
    gate, up = hidden[:INNER].clamp(max=2.0), hidden[INNER:].clamp(-2.0, 2.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1.0)


def by_a_loop(
    layer: Any,
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    activation: Callable[[torch.Tensor], torch.Tensor] = silu_gated,
) -> torch.Tensor:
    zeros = [torch.zeros(EXPERTS, 2 * INNER), torch.zeros(EXPERTS, HIDDEN)]
    inner, outer = (getattr(layer, name, zero) for name, zero in zip(("w13_bias", "w2_bias"), zeros, strict=True))
    output = torch.zeros_like(x)
    for token in range(TOKENS):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            hidden = F.linear(x[token], layer.w13_weight[expert], inner[expert])
            output[token] += weight * F.linear(activation(hidden), layer.w2_weight[expert], outer[expert])
    return output


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mix", [mix_all, mix_chosen])
def test_experts_are_mixed(mix: Any, bias: bool) -> None:
    layer, x = made(bias), torch.randn(TOKENS, HIDDEN)
    ids = torch.stack([torch.randperm(EXPERTS)[:K] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, K)
    torch.testing.assert_close(mix(layer, x, weights, ids), by_a_loop(layer, x, weights, ids))


def test_a_limit_clamps_gate_and_up() -> None:
    layer, x = made(bias=True), torch.randn(TOKENS, HIDDEN)
    limit = {"swiglu_limit": 2.0, "swiglu_alpha": 1.702, "swiglu_beta": 1.0}
    vars(layer).update(limit, activation=MoEActivation.SWIGLUOAI_UNINTERLEAVE)
    ids, weights = torch.tensor([[0, 3]] * TOKENS), torch.rand(TOKENS, K)
    torch.testing.assert_close(mix_all(layer, x, weights, ids), by_a_loop(layer, x, weights, ids, clamped))


def test_few_choices_gather_their_experts() -> None:
    assert gathers(2, 16) and not gathers(8, 16) and not gathers(2, 6)
