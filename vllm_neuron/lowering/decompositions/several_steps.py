"""Functions that are carried out in several steps: of 16-bit floats in 32 bits, and rounded once, as torch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only

from vllm_neuron.lowering.shared.half import HALF

_aten = torch.ops.aten
_SQRT_2_OVER_PI = 0.7978845608028654

_OPERATORS = (
    _aten.addcdiv.default, _aten.addcmul.default, _aten.addr.default, _aten.lerp.Scalar, _aten.lerp.Tensor,
    _aten.elu.default, _aten.logaddexp.default, _aten.linalg_cross.default,
    _aten.log_sigmoid_forward.default, _aten.mish.default, _aten.softplus.default,
)  # fmt: skip


def several_steps(table: dict[OpOverload, Callable[..., Any]]) -> dict[OpOverload, Callable[..., Any]]:
    """The decompositions; ``table`` has those that apply where they do not."""
    return {**{op: _rounded_once(op, table.get(op)) for op in _OPERATORS}, _aten.gelu.default: _gelu}


def _rounded_once(op: OpOverload, otherwise: Callable[..., Any] | None) -> Callable[..., Any]:
    def rounded_once(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        tensors = [x, *(arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor))]
        if any(tensor.dtype not in HALF for tensor in tensors):
            return otherwise(x, *args, **kwargs) if otherwise else NotImplemented
        wide_args, wide_kwargs = tree_map_only(Tensor, Tensor.float, ((x, *args), kwargs))
        return tree_map_only(Tensor, lambda result: result.to(x.dtype), op(*wide_args, **wide_kwargs))

    return rounded_once


def _gelu(x: Tensor, *, approximate: str = "none") -> Any:
    """In 64 bits by way of an exponential: IREE has no hyperbolic tangent of them."""
    if x.dtype in HALF:
        return _aten.gelu.default(x.float(), approximate=approximate).to(x.dtype)
    if x.dtype == torch.float64 and approximate == "tanh":
        return x * torch.sigmoid(2 * _SQRT_2_OVER_PI * (x + 0.044715 * x**3))
    return NotImplemented
