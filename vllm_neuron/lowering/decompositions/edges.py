"""Forms at the edge of what an operator takes, which torch's decompositions or torch-mlir overlook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

_aten = torch.ops.aten


def edges() -> dict[OpOverload, Callable[..., Any]]:
    """The decompositions of this file."""
    return {
        _aten.take.default: _take,
        _aten.unfold.default: _unfold,
        _aten.__lshift__.Tensor: lambda x, y: _aten.bitwise_left_shift.Tensor(x, y),
        _aten.__rshift__.Tensor: lambda x, y: _aten.bitwise_right_shift.Tensor(x, y),
        _aten.bitwise_left_shift.Tensor: _of_one_shape(_aten.bitwise_left_shift.Tensor),
        _aten.bitwise_right_shift.Tensor: _of_one_shape(_aten.bitwise_right_shift.Tensor),
    }


def _take(x: Tensor, index: Tensor) -> Tensor:
    """torch's own reads the value of an index without dimensions."""
    taken: Tensor = _aten.index.Tensor(x.reshape(-1), [index.reshape(-1)])
    return taken.view(index.shape)


def _unfold(x: Tensor, dimension: int, size: int, step: int) -> Tensor:
    if not x.dim():
        return x.reshape(1)[:size].clone()
    dimension %= x.dim()
    starts = torch.arange(0, x.shape[dimension] - size + 1, step, device=x.device)
    index = (starts[:, None] + torch.arange(size, device=x.device)).reshape(-1)
    shape = [*x.shape[:dimension], len(starts), size, *x.shape[dimension + 1 :]]
    return x.index_select(dimension, index).view(shape).movedim(dimension + 1, -1)


def _of_one_shape(op: OpOverload) -> Callable[[Tensor, Tensor], Any]:
    """torch-mlir ends the process on a shift between tensors that are both stretched."""

    def of_one_shape(x: Tensor, y: Tensor) -> Any:
        shape = torch.broadcast_shapes(x.shape, y.shape)  # type: ignore[no-untyped-call]
        return NotImplemented if shape in (x.shape, y.shape) else op(x.expand(shape), y)

    return of_one_shape
