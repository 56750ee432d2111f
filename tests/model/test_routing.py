"""Routing chooses what Hugging Face's own routers choose, with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4TopKRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from vllm_neuron.model.routing import Routing, route

EXPERTS, TOKENS, HIDDEN = 16, 64, 32


class RouterConfig:
    """What the routers read of a configuration."""

    def __init__(self, **others: Any) -> None:
        self.num_experts = self.num_local_experts = EXPERTS
        self.hidden_size, self.num_experts_per_tok, self.moe_norm_min = HIDDEN, 3, 1e-12
        vars(self).update(others)


def made(router: type, **config: Any) -> Any:
    """A router with random weights and biases. A bias is wide enough to change what is chosen, and always positive."""
    torch.manual_seed(0)
    module = router(RouterConfig(**config))
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.copy_(torch.rand(tensor.shape) if tensor.numel() == EXPERTS else torch.randn(tensor.shape) * 0.3)
    return module


GROUPED = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
CASES: list[tuple[type, dict[str, Any], Routing, str | None]] = [
    (Qwen3MoeTopKRouter, {"norm_topk_prob": False}, Routing(3), None),
    (Qwen3MoeTopKRouter, {"norm_topk_prob": True}, Routing(3, renormalize=True), None),
    (Qwen3MoeTopKRouter, {"norm_topk_prob": False, "num_experts_per_tok": 1}, Routing(1), None),
    (GptOssTopKRouter, {}, Routing(3, renormalize=True), None),
    (Ernie4_5_MoeTopKRouter, {}, Routing(3, renormalize=True), "moe_statics.e_score_correction_bias"),
    (Glm4MoeTopkRouter, {**GROUPED, "norm_topk_prob": True},
     Routing(3, "sigmoid", True, 2.5, groups=4, top_groups=2), "e_score_correction_bias"),
    (Glm4MoeTopkRouter, {**GROUPED, "norm_topk_prob": False},
     Routing(3, "sigmoid", False, 2.5, groups=4, top_groups=2), "e_score_correction_bias"),
    (DeepseekV4TopKRouter, {"scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5},
     Routing(3, "sqrtsoftplus", True, 1.5), "e_score_correction_bias"),
]  # fmt: skip


@pytest.mark.parametrize(("router", "config", "routing", "bias"), CASES)
def test_routing_equals_the_reference(router: type, config: dict[str, Any], routing: Routing, bias: str | None) -> None:
    module = made(router, **config)
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        logits, expected, ids = module(torch.randn(TOKENS, HIDDEN))
        found, chosen = route(logits, routing, tensors[bias].flatten() if bias else None)
        unbiased = route(logits, routing)[1]
    dense = torch.zeros(TOKENS, EXPERTS)
    torch.testing.assert_close(dense.scatter(1, chosen, found), dense.scatter(1, ids, expected))
    if bias:
        assert (chosen.sort().values != unbiased.sort().values).any()


def test_groups_without_a_bias_are_as_good_as_their_best_expert() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 2.1, 1.0, -1.0]])
    weights, ids = route(logits, Routing(2, groups=3, top_groups=1))
    assert ids.tolist() == [[1, 0]]
    torch.testing.assert_close(weights, torch.softmax(logits, -1)[:, [1, 0]])
