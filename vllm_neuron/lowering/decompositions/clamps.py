"""Clamps between tensors, and the greater and the lesser of two truth values, as decompositions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

_aten = torch.ops.aten


def clamps() -> dict[OpOverload, Callable[..., Any]]:
    """The decompositions of this file. Clamps torch-mlir has with bounds of the input's own dtype and shape."""
    return {
        _aten.clamp.Tensor: _clamp,
        _aten.clamp_min.Tensor: _clamp,
        _aten.clamp_max.Tensor: lambda x, bound: _clamp(x, None, bound),
        _aten.maximum.default: _greater_truth,
        _aten.minimum.default: _lesser_truth,
    }


def _clamp(x: Tensor, min: Tensor | None = None, max: Tensor | None = None) -> Tensor:
    bounds = [bound for bound in (min, max) if bound is not None]
    _, dtype = elementwise_dtypes(x, *bounds, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)
    x = x.to(dtype)
    if min is not None:
        x = torch.maximum(x, min.to(dtype))
    return x if max is None else torch.minimum(x, max.to(dtype))


def _greater_truth(x: Tensor, y: Tensor) -> Any:
    """``maximum`` of ``bool``, which torch-mlir compares as if a truth value had a sign."""
    return torch.logical_or(x, y) if x.dtype == y.dtype == torch.bool else NotImplemented


def _lesser_truth(x: Tensor, y: Tensor) -> Any:
    """``minimum`` of ``bool``."""
    return torch.logical_and(x, y) if x.dtype == y.dtype == torch.bool else NotImplemented
