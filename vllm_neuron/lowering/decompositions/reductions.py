"""Reductions and pools in the forms that torch-mlir and the device compilers get right, as decompositions.

torch-mlir starts an extreme of ``bool`` and ``uint8`` from the wrong end, as if they had a sign, and ends the process
on some operators without dimensions. Compilers accumulate in the type of the result, which for 16-bit floats is wrong
by any amount, while torch accumulates in 32 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from vllm_neuron.lowering.decompositions import pools
from vllm_neuron.lowering.shared.half import HALF

_aten = torch.ops.aten

Rule = Callable[..., Any]
"""A decomposition that returns ``NotImplemented`` for what it leaves to others."""

_UNSIGNED = (torch.bool, torch.uint8)


def first_of(*rules: Rule | None) -> Rule:
    """The rule that takes the first of ``rules`` that applies. None is no rule."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        for one in filter(None, rules):
            result = one(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return NotImplemented

    return rule


def reductions(table: dict[OpOverload, Rule]) -> dict[OpOverload, Rule]:
    """The decompositions of this file; ``table`` has those that apply where they do not."""
    a = _aten
    wide = (a.mean.default, a.mean.dim, a.prod.default, a.prod.dim_int, a.linalg_vector_norm.default)
    maxima = {a.max_pool2d_with_indices.default: 2, a.max_pool3d_with_indices.default: 3}
    averages = {a.avg_pool1d.default: 1, a.avg_pool2d.default: 2, a.avg_pool3d.default: 3}
    return {
        **{op: _widened(op) for op in wide},
        **{op: _in_32_bits(op) for op in (a.amax.default, a.amin.default, a.max.default, a.min.default)},
        **{op: _of_truths(op) for op in (a.any.default, a.any.dim, a.any.dims, a.all.default, a.all.dim, a.all.dims)},
        **{op: first_of(_in_32_bits(op), functools.partial(pools.maxima, dims)) for op, dims in maxima.items()},
        **{
            op: first_of(_widened(op), functools.partial(pools.average, op, dims), table.get(op))
            for op, dims in averages.items()
        },
        a.sum.default: first_of(_sum_to_truth, table.get(a.sum.default)),
        a.sum.dim_IntList: first_of(_sum_to_truth, _widened(a.sum.dim_IntList)),
        a.index_add.default: first_of(_added_truths(a.index_add.default), table.get(a.index_add.default)),
        a.scatter_add.default: first_of(_added_truths(a.scatter_add.default), _widened(a.scatter_add.default)),
        a.index_put.default: _put_truths,
        a.max.dim: first_of(_of_one(a.max.dim), _in_32_bits(a.max.dim), functools.partial(_extreme, torch.amax)),
        a.min.dim: first_of(_of_one(a.min.dim), _in_32_bits(a.min.dim), functools.partial(_extreme, torch.amin)),
        a.argmax.default: first_of(
            _of_one(a.argmax.default), _in_32_bits(a.argmax.default), functools.partial(_place, torch.amax)
        ),
        a.argmin.default: first_of(
            _of_one(a.argmin.default), _in_32_bits(a.argmin.default), functools.partial(_place, torch.amin)
        ),
        a._softmax.default: first_of(_of_one(a._softmax.default), _widened(a._softmax.default)),
        a._log_softmax.default: first_of(_of_one(a._log_softmax.default), table.get(a._log_softmax.default)),
        a.logsumexp.default: first_of(_of_one(a.logsumexp.default), table.get(a.logsumexp.default)),
        a.var.correction: functools.partial(_variance, a.var.correction),
        a.var_mean.correction: functools.partial(_variance, a.var_mean.correction),
    }


def _widened(op: OpOverload) -> Rule:
    """Of 16-bit floats, in 32 bits."""

    def widened(x: Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        result = dtype or x.dtype
        if result not in HALF or not x.dtype.is_floating_point:
            return NotImplemented
        x, args = tree_map(_widen, (x, args))
        return op(x, *args, **kwargs).to(result)

    return widened


def _widen(value: Any) -> Any:
    return value.to(torch.float32) if isinstance(value, Tensor) and value.dtype in HALF else value


def _in_32_bits(op: OpOverload) -> Rule:
    """Of ``bool`` and ``uint8``, as ``int32``, which holds each of their values."""

    def in_32_bits(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dtype not in _UNSIGNED:
            return NotImplemented
        results = op(x.to(torch.int32), *args, **kwargs)
        return tree_map(lambda one: one.to(x.dtype) if one.dtype == torch.int32 else one, results)

    return in_32_bits


def _of_truths(op: OpOverload) -> Rule:
    """Of ``uint8``, of which torch makes a 0 or a 1 of the same type."""

    def of_truths(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return op(x != 0, *args, **kwargs).to(x.dtype) if x.dtype == torch.uint8 else NotImplemented

    return of_truths


def _sum_to_truth(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """Whether any is true: torch-mlir adds single bits, so that two truths make a falsehood."""
    if dtype != torch.bool:
        return NotImplemented
    truths = x != 0
    return _aten.any.dims(truths, list(dim or range(x.dim())), keepdim) if x.dim() else truths.clone()


def _added_truths(op: OpOverload) -> Rule:
    """Truth values added at places, as ``int32``: single bits would cancel each other."""

    def added_truths(x: Tensor, dim: int, index: Tensor, source: Tensor, **options: Any) -> Any:
        if x.dtype != torch.bool:
            return NotImplemented
        return op(x.to(torch.int32), dim, index, source.to(torch.int32), **options) != 0

    return added_truths


def _put_truths(x: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Any:
    if x.dtype != torch.bool or not accumulate:
        return NotImplemented
    return _aten.index_put.default(x.to(torch.int32), indices, values.to(torch.int32), True) != 0


def _of_one(op: OpOverload) -> Rule:
    """Of a tensor without dimensions, as of one with a single element."""

    def of_one(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dim():
            return NotImplemented
        return tree_map(lambda one: one.reshape(()), op(x.reshape(1), *args, **kwargs))

    return of_one


def _extreme(reduce: Callable[..., Tensor], x: Tensor, dim: int, keepdim: bool = False) -> Any:
    """The extreme and its first place. A NaN is one: IREE passes it over where it looks for both at once."""
    if not x.dtype.is_floating_point or x.dim() == 0:
        return NotImplemented
    extreme, size = reduce(x, dim, keepdim=True), x.shape[dim]
    places = torch.arange(size, dtype=torch.int32, device=x.device).view(-1, *[1] * (x.dim() - dim % x.dim() - 1))
    first = torch.where((x == extreme) | x.isnan(), places, size).amin(dim, keepdim).to(torch.int64)
    return extreme if keepdim else extreme.squeeze(dim), first


def _place(reduce: Callable[..., Tensor], x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    if not x.dtype.is_floating_point or x.dim() == 0:
        return NotImplemented
    if dim is not None:
        return _extreme(reduce, x, dim, keepdim)[1]
    place = _extreme(reduce, x.reshape(-1), 0)[1]
    return place.reshape([1] * x.dim()) if keepdim else place


def _variance(
    op: OpOverload, x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> Any:
    """Of no elements, NaN, for which torch-mlir divides by minus one; of 16-bit floats, in 32 bits."""
    if not x.numel():
        mean = x.mean(dim, keepdim)
        return (mean, mean) if op is _aten.var_mean.correction else mean
    if x.dtype not in HALF:
        return NotImplemented
    results = op(x.to(torch.float32), dim, correction=correction, keepdim=keepdim)
    return tree_map(lambda one: one.to(x.dtype), results)
