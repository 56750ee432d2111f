"""What is changed of vLLM's mixtures of experts. Checked on vLLM 0.32.0 and 0.33.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def route_by(topk_softmax: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Let ``topk_softmax`` choose the experts of a mixture: vLLM's own operator is in its compiled builds alone.

    Can go when ``FusedTopKRouter`` asks its platform for the operator.
    """
    from vllm.model_executor.layers.fused_moe.router import fused_topk_router

    fused_topk_router.vllm_topk_softmax = topk_softmax


def open_mixture(layer: Any) -> None:
    """Let ``layer``, a ``MoERunner``, call what its opaque operator stands for, so that capture sees through it.

    Can go when vLLM leaves the operator out where its own compiler is off (``CompilationMode.NONE``).
    """
    from vllm.model_executor.layers.fused_moe.runner import moe_runner

    shared = layer._shared_experts is not None
    layer._forward_entry = moe_runner._moe_forward_shared if shared else moe_runner._moe_forward
