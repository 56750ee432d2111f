"""Sums, extremes, scans and orders along dimensions, and what is normalized by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax
from torch._ops import OpOverload

from vllm_neuron.lowering.xla.call import Array, Call, Operator, array

_aten = torch.ops.aten

Dims = int | Sequence[int] | None


def _axes(x: Array, dims: Dims) -> tuple[int, ...]:
    """The dimensions to reduce; all of them where none is given."""
    given = [dims] if isinstance(dims, int) else list(dims or range(x.ndim))
    return tuple(dim % x.ndim for dim in given) if x.ndim else ()


def _reduced(function: Callable[..., Array]) -> Operator:
    """``function`` over ``dims``, in the dtype of the result, or in 32 bits for floats of 16."""

    def run(call: Call, x: Array, dims: Dims = None, keepdim: bool = False, **options: Any) -> Array:
        return function(array(x, call.compute_dtype), axis=_axes(x, dims), keepdims=keepdim)

    return run


def _extreme(function: Callable[..., Array]) -> Operator:
    def run(call: Call, x: Array, dims: Dims = None, keepdim: bool = False) -> Array:
        return function(x, axis=_axes(x, dims), keepdims=keepdim)

    return run


def _truth(function: Callable[..., Array]) -> Operator:
    def run(call: Call, x: Array, dims: Dims = None, keepdim: bool = False) -> Array:
        return function(array(x, torch.bool), axis=_axes(x, dims), keepdims=keepdim)

    return run


def _arg(function: Callable[..., Array]) -> Operator:
    def run(call: Call, x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
        if not x.ndim:
            return jnp.zeros((), jnp.int64)
        found = function(jnp.reshape(x, (-1,)) if dim is None else x, axis=0 if dim is None else dim % x.ndim)
        return jnp.reshape(found, call.shape)

    return run


def _with_place(extreme: Callable[..., Array], place: Callable[..., Array]) -> Operator:
    """The extreme along one dimension, and where it is."""

    def run(call: Call, x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
        if not x.ndim:
            return x, jnp.zeros((), jnp.int64)
        axis = dim % x.ndim
        return extreme(x, axis=axis, keepdims=keepdim), place(x, axis=axis, keepdims=keepdim)

    return run


def _variance(call: Call, x: Array, dims: Dims, correction: float | None, keepdim: bool) -> tuple[Array, Array]:
    axes = _axes(x, dims)
    x = array(x, call.compute_dtype)
    mean = jnp.mean(x, axis=axes, keepdims=True)
    count = 1
    for axis in axes:
        count *= x.shape[axis]
    rest = max(count - (1 if correction is None else correction), 0)
    squares = jnp.sum((x - mean) ** 2, axis=axes, keepdims=keepdim)
    return squares / array(float(rest), call.compute_dtype), mean if keepdim else jnp.squeeze(mean, axes)


def _var(call: Call, x: Array, dims: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Array:
    return _variance(call, x, dims, correction, keepdim)[0]


def _var_mean(
    call: Call, x: Array, dims: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Array, Array]:
    return _variance(call, x, dims, correction, keepdim)


def _norm(call: Call, x: Array, order: float = 2, dims: Dims = None, keepdim: bool = False, **options: Any) -> Array:
    axes, x = _axes(x, dims), jnp.abs(array(x, call.compute_dtype))
    if abs(order) == float("inf"):
        return (jnp.max if order > 0 else jnp.min)(x, axis=axes, keepdims=keepdim)
    if order == 0:
        return jnp.sum((x != 0).astype(x.dtype), axis=axes, keepdims=keepdim)
    # Capture makes powers of norms of other orders than 1 and 2.
    total = jnp.sum(x * x if order == 2 else x, axis=axes, keepdims=keepdim)
    return jnp.sqrt(total) if order == 2 else total


def _softmax(call: Call, x: Array, dim: int, *rest: Any) -> Array:
    if not x.ndim:
        return jnp.ones((), x.dtype)
    x = array(x, call.compute_dtype)
    exponentials = jnp.exp(x - jnp.max(x, axis=dim, keepdims=True))
    return exponentials / jnp.sum(exponentials, axis=dim, keepdims=True)


def _log_softmax(call: Call, x: Array, dim: int, *rest: Any) -> Array:
    if not x.ndim:
        return jnp.zeros((), x.dtype)
    x = array(x, call.compute_dtype)
    x = x - jnp.max(x, axis=dim, keepdims=True)
    return x - jnp.log(jnp.sum(jnp.exp(x), axis=dim, keepdims=True))


def _layer_norm(
    call: Call, x: Array, shape: Sequence[int], weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    dims, dtype = list(range(x.ndim - len(shape), x.ndim)), call.compute_dtype
    variance, mean = _variance(call, x, dims, 0, True)
    scale = lax.rsqrt(variance + array(eps, dtype))
    result = (array(x, dtype) - mean) * scale
    if weight is not None:
        result = result * array(weight, dtype)
    return result if bias is None else result + array(bias, dtype), mean, scale


def _cumsum(call: Call, x: Array, dim: int, **options: Any) -> Array:
    """A scan in log2(n) steps, each of which adds the sum of the previous ``step`` elements."""
    x = array(x, call.compute_dtype)
    if not x.ndim:
        return x
    axis, step = dim % x.ndim, 1
    while step < x.shape[axis]:
        config = [(step, -step, 0) if i == axis else (0, 0, 0) for i in range(x.ndim)]
        x = x + lax.pad(x, jnp.zeros((), x.dtype), config)
        step *= 2
    return x


def _sort(call: Call, x: Array, dim: int = -1, descending: bool = False, **options: Any) -> tuple[Array, Array]:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    dim %= x.ndim
    # Backwards, so that what is last and equal stays so when the result is turned around: NaN is the largest.
    x = lax.rev(x, [dim]) if descending else x
    places = lax.broadcasted_iota(jnp.int32, x.shape, dim)
    values, order = lax.sort((x, places), dimension=dim, is_stable=True, num_keys=1)
    if descending:
        values, order = lax.rev(values, [dim]), x.shape[dim] - 1 - lax.rev(order, [dim])
    return values, order.astype(jnp.int64)


def _topk(
    call: Call, x: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Array, Array]:
    values, order = _sort(call, x, dim, largest)
    if not x.ndim:
        return values, order
    return tuple(lax.slice_in_dim(part, 0, k, axis=dim % x.ndim) for part in (values, order))  # type: ignore[return-value]


TABLE: dict[OpOverload, Operator] = {
    _aten.sum.default: _reduced(jnp.sum),
    _aten.sum.dim_IntList: _reduced(jnp.sum),
    _aten.mean.default: _reduced(jnp.mean),
    _aten.mean.dim: _reduced(jnp.mean),
    _aten.prod.default: _reduced(jnp.prod),
    _aten.prod.dim_int: _reduced(jnp.prod),
    _aten.amax.default: _extreme(jnp.max),
    _aten.amin.default: _extreme(jnp.min),
    _aten.max.default: _extreme(jnp.max),
    _aten.min.default: _extreme(jnp.min),
    _aten.max.dim: _with_place(jnp.max, jnp.argmax),
    _aten.min.dim: _with_place(jnp.min, jnp.argmin),
    _aten.argmax.default: _arg(jnp.argmax),
    _aten.argmin.default: _arg(jnp.argmin),
    _aten.any.default: _truth(jnp.any),
    _aten.any.dim: _truth(jnp.any),
    _aten.any.dims: _truth(jnp.any),
    _aten.all.default: _truth(jnp.all),
    _aten.all.dim: _truth(jnp.all),
    _aten.all.dims: _truth(jnp.all),
    _aten.var.correction: _var,
    _aten.var_mean.correction: _var_mean,
    _aten.linalg_vector_norm.default: _norm,
    _aten._softmax.default: _softmax,
    _aten._log_softmax.default: _log_softmax,
    _aten.softmax.int: _softmax,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.cumsum.default: _cumsum,
    _aten.sort.default: _sort,
    _aten.sort.stable: lambda call, x, stable=None, dim=-1, descending=False: _sort(call, x, dim, descending),
    _aten.topk.default: _topk,
}
