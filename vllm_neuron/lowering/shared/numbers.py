"""Numbers beside tensors: one that does not fit the tensor's dtype is an error where it is one in eager PyTorch."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

_aten = torch.ops.aten

# Where a call has numbers that are converted to the dtype of the result.
_POSITIONS: dict[Any, tuple[int, ...]] = {
    _aten.full.default: (1,),
    _aten.full_like.default: (1,),
    _aten.new_full.default: (2,),
    _aten.fill.Scalar: (1,),
    _aten.scalar_tensor.default: (0,),
    _aten.masked_fill.Scalar: (2,),
    _aten.scatter.value: (3,),
    _aten.index_fill.int_Scalar: (3,),
    _aten.constant_pad_nd.default: (2,),
    _aten.clamp.default: (1, 2),
    _aten.clamp_min.default: (1,),
    _aten.clamp_max.default: (1,),
    _aten.pow.Tensor_Scalar: (1,),
    _aten.add.Tensor: (),
    _aten.sub.Tensor: (),
    _aten.rsub.Scalar: (2,),
}
# Of these, eager PyTorch lets a single element overflow to infinity.
_FILLS = frozenset({_aten.full.default, _aten.full_like.default, _aten.new_full.default, _aten.scalar_tensor.default})
# Eager PyTorch takes a power of these dtypes to any exponent.
_ANY_POWER = (torch.float32, torch.float64)


def misfit(node: Node) -> str | None:
    """What eager PyTorch says of a number in ``node`` that does not fit; None where all do."""
    value = node.meta.get("val")
    if node.target not in _POSITIONS or not isinstance(value, torch.Tensor):
        return None
    if node.target is _aten.pow.Tensor_Scalar and is_exponent(node.args[1], value.dtype):
        return None
    numbers = [node.args[place] for place in _POSITIONS[node.target] if place < len(node.args)]
    count = min(value.numel(), 2) if node.target in _FILLS else 2
    for number in (*numbers, node.kwargs.get("alpha")):
        if isinstance(number, bool | int | float) and (said := _refused(number, value.dtype, count)):
            return said
    return None


def is_exponent(number: Any, dtype: torch.dtype) -> bool:
    """Whether eager PyTorch takes powers of ``dtype`` to ``number``."""
    return dtype in _ANY_POWER or _refused(number, dtype, 2) is None


@functools.cache
def _refused(number: float, dtype: torch.dtype, count: int) -> str | None:
    try:
        # Dynamo compiles while its own fake mode is active, which converts nothing.
        with _disable_current_modes():
            torch.full((count,), number, dtype=dtype)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None
