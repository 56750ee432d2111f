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

_aten = torch.ops.aten

Rule = Callable[..., Any]
"""A decomposition that returns ``NotImplemented`` for what it leaves to others."""

_UNSIGNED = (torch.bool, torch.uint8)
_HALF = (torch.bfloat16, torch.float16)


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
    wide = (
        a.sum.dim_IntList, a.mean.default, a.mean.dim, a.prod.default, a.prod.dim_int, a.linalg_vector_norm.default,
        a.avg_pool1d.default, a.avg_pool2d.default, a.avg_pool3d.default, a.scatter_add.default,
    )  # fmt: skip
    pools = {a.max_pool2d_with_indices.default: 2, a.max_pool3d_with_indices.default: 3}
    return {
        **{op: _widened(op) for op in wide},
        **{op: _in_32_bits(op) for op in (a.amax.default, a.amin.default, a.max.default, a.min.default)},
        **{op: _of_truths(op) for op in (a.any.default, a.any.dim, a.any.dims, a.all.default, a.all.dim, a.all.dims)},
        **{op: first_of(_as_floats(op), functools.partial(_pool, op, dims)) for op, dims in pools.items()},
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
        if result not in _HALF or not x.dtype.is_floating_point:
            return NotImplemented
        x, args = tree_map(_widen, (x, args))
        return op(x, *args, **kwargs).to(result)

    return widened


def _widen(value: Any) -> Any:
    return value.to(torch.float32) if isinstance(value, Tensor) and value.dtype in _HALF else value


def _in_32_bits(op: OpOverload) -> Rule:
    """Of ``bool`` and ``uint8``, as ``int32``, which holds each of their values."""

    def in_32_bits(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dtype not in _UNSIGNED:
            return NotImplemented
        results = op(x.to(torch.int32), *args, **kwargs)
        return tree_map(lambda one: one.to(x.dtype) if one.dtype == torch.int32 else one, results)

    return in_32_bits


def _as_floats(op: OpOverload) -> Rule:
    """Of integers of 8 and 16 bits, as ``float32``, which holds each of their values.

    torch-mlir ends the process on a pool of ``int8``, and has none with places of integers.
    """

    def as_floats(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dtype not in (torch.uint8, torch.int8, torch.int16):
            return NotImplemented
        values, places = op(x.to(torch.float32), *args, **kwargs)
        return values.to(x.dtype), places

    return as_floats


def _of_truths(op: OpOverload) -> Rule:
    """Of ``uint8``, of which torch makes a 0 or a 1 of the same type."""

    def of_truths(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return op(x != 0, *args, **kwargs).to(x.dtype) if x.dtype == torch.uint8 else NotImplemented

    return of_truths


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
    if x.dtype not in _HALF:
        return NotImplemented
    results = op(x.to(torch.float32), dim, correction=correction, keepdim=keepdim)
    return tree_map(lambda one: one.to(x.dtype), results)


def _pool(
    op: OpOverload,
    dims: int,
    x: Tensor,
    kernel_size: list[int],
    stride: list[int] | None = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Any:
    """The input is made to end where its last window does: in the least value, or before what no window holds.

    torch-mlir does not give a window that is not whole its place, and IREE fails on a volume of which something is left
    over. How many windows there are is as in PyTorch's documentation of ``ceil_mode``: none begins beyond the input and
    its padding on the left.
    """
    kernel, stride, padding, dilation = (
        _each(value, dims) for value in (kernel_size, stride or kernel_size, padding, dilation)
    )
    sizes, more = x.shape[-dims:], []
    for size, k, s, p, d in zip(sizes, kernel, stride, padding, dilation, strict=True):
        span = size + 2 * p - d * (k - 1) - 1
        windows = (-(-span // s) if ceil_mode else span // s) + 1
        if ceil_mode and (windows - 1) * s >= size + p:
            windows -= 1
        more.append((windows - 1) * s - span)
    if not ceil_mode and not any(more):
        return NotImplemented
    least = float("-inf") if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    around = [number for p, extra in zip(reversed(padding), reversed(more), strict=True) for number in (p, p + extra)]
    values, places = op(_aten.constant_pad_nd.default(x, around, least), kernel, stride, [0] * dims, dilation)
    place, step = torch.zeros_like(places), 1
    for size, p, extra in reversed(list(zip(sizes, padding, more, strict=True))):
        whole = size + 2 * p + extra
        place = place + (places % whole - p) * step
        places, step = places // whole, step * size
    return values, place


def _each(value: Any, dims: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values
