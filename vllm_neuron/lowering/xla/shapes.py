"""Operators that move elements, and operators that make tensors from nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax
from torch._ops import OpOverload

from vllm_neuron.lowering.xla.call import Array, Call, Operator, array

_aten = torch.ops.aten
_prims = torch.ops.prims


def _reshape(call: Call, x: Array, *shape: Any) -> Array:
    return jnp.reshape(x, call.shape)


def _permute(call: Call, x: Array, dims: Sequence[int]) -> Array:
    return jnp.transpose(x, [dim % x.ndim for dim in dims])


def _transpose(call: Call, x: Array, first: int, second: int) -> Array:
    return jnp.swapaxes(x, first, second) if x.ndim else x


def _matrix_transpose(call: Call, x: Array) -> Array:
    return jnp.transpose(x)


def _expand(call: Call, x: Array, size: Sequence[int], implicit: bool = False) -> Array:
    return jnp.broadcast_to(x, call.shape)


def _repeat(call: Call, x: Array, repeats: Sequence[int]) -> Array:
    return jnp.tile(jnp.reshape(x, (1,) * (len(repeats) - x.ndim) + x.shape), tuple(repeats))


def _cat(call: Call, tensors: Sequence[Array], dim: int = 0) -> Array:
    # torch lets empty tensors of one dimension be joined to anything.
    given = [array(x, call.dtype) for x in tensors if not (x.ndim == 1 and x.size == 0 and call.value.dim() != 1)]
    return jnp.concatenate(given, axis=dim) if given else jnp.zeros(call.shape)


def _stack(call: Call, tensors: Sequence[Array], dim: int = 0) -> Array:
    return jnp.stack([array(x, call.dtype) for x in tensors], axis=dim)


def bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Start and end of a slice of ``size`` elements, as Python's own slices have them."""
    first, last, _ = slice(start, end).indices(size)
    return first, max(first, last)


def _slice(
    call: Call, x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Array:
    first, last = bounds(x.shape[dim], start, end)
    return lax.slice_in_dim(x, first, last, step, axis=dim % x.ndim)


def _select(call: Call, x: Array, dim: int, index: int) -> Array:
    return lax.index_in_dim(x, index % x.shape[dim], dim % x.ndim, keepdims=False)


def _split(call: Call, x: Array, sizes: int | Sequence[int], dim: int = 0) -> list[Array]:
    dim, parts, start = dim % x.ndim, [], 0
    for value in call.node.meta["val"]:
        parts.append(lax.slice_in_dim(x, start, start + value.shape[dim], axis=dim))
        start += value.shape[dim]
    return parts


def _unbind(call: Call, x: Array, dim: int = 0) -> list[Array]:
    return [lax.index_in_dim(x, index, dim % x.ndim, keepdims=False) for index in range(x.shape[dim])]


def _flip(call: Call, x: Array, dims: Sequence[int]) -> Array:
    return lax.rev(x, [dim % x.ndim for dim in dims])


def _roll(call: Call, x: Array, shifts: Any, dims: Any = ()) -> Array:
    if not dims:
        return jnp.reshape(_roll(call, jnp.reshape(x, (-1,)), shifts, [0]), x.shape)
    for shift, dim in zip(_as_list(shifts), _as_list(dims), strict=True):
        dim, size = dim % x.ndim, x.shape[dim]
        cut = -shift % size if size else 0
        parts = [lax.slice_in_dim(x, cut, size, axis=dim), lax.slice_in_dim(x, 0, cut, axis=dim)]
        x = jnp.concatenate(parts, axis=dim)
    return x


def _as_list(value: Any) -> list[int]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _pad(call: Call, x: Array, pad: Sequence[int], value: float = 0) -> Array:
    pairs = [(pad[i], pad[i + 1], 0) for i in range(0, len(pad), 2)]
    config = [(0, 0, 0)] * (x.ndim - len(pairs)) + pairs[::-1]
    return lax.pad(x, array(value or 0, call.dtype), config)


def _triangle(call: Call, x: Array, diagonal: int = 0, *, upper: bool) -> Array:
    rows = lax.broadcasted_iota(jnp.int64, x.shape, x.ndim - 2)
    columns = lax.broadcasted_iota(jnp.int64, x.shape, x.ndim - 1)
    kept = columns - rows >= diagonal if upper else columns - rows <= diagonal
    return jnp.where(kept, x, jnp.zeros((), x.dtype))


def _full(call: Call, size: Sequence[int], value: Any, **options: Any) -> Array:
    return jnp.broadcast_to(array(value, call.dtype), call.shape)


def _full_like(call: Call, x: Array, value: Any, **options: Any) -> Array:
    return jnp.broadcast_to(array(value, call.dtype), call.shape)


def _filled(value: float) -> Operator:
    return lambda call, *arguments, **options: jnp.full(call.shape, array(value, call.dtype))


def _eye(call: Call, *sizes: int, **options: Any) -> Array:
    rows, columns = (lax.broadcasted_iota(jnp.int64, call.shape, dim) for dim in (0, 1))
    return rows == columns


def _scalar(call: Call, value: Any, **options: Any) -> Array:
    return array(value, call.dtype)


def _arange(call: Call, start: float, end: float, step: float = 1, **options: Any) -> Array:
    (size,) = call.shape
    assert size == math.ceil((end - start) / step)
    places = lax.iota(jnp.int64, size)
    # torch computes in 64 bits whatever the result.
    number = torch.float64 if call.dtype.is_floating_point else torch.int64
    return array(start, number) + array(places, number) * array(step, number)


TABLE: dict[OpOverload, Operator] = {
    _aten.view.default: _reshape,
    _aten._unsafe_view.default: _reshape,
    _aten.reshape.default: _reshape,
    _aten.unsqueeze.default: _reshape,
    _aten.squeeze.default: _reshape,
    _aten.squeeze.dim: _reshape,
    _aten.squeeze.dims: _reshape,
    _prims.squeeze.default: _reshape,
    _prims.view_of.default: _reshape,
    _aten.permute.default: _permute,
    _aten.transpose.int: _transpose,
    _aten.t.default: _matrix_transpose,
    _aten.expand.default: _expand,
    _aten.repeat.default: _repeat,
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
    _aten.unbind.int: _unbind,
    _aten.flip.default: _flip,
    _aten.roll.default: _roll,
    _aten.constant_pad_nd.default: _pad,
    _aten.tril.default: lambda call, x, diagonal=0: _triangle(call, x, diagonal, upper=False),
    _aten.triu.default: lambda call, x, diagonal=0: _triangle(call, x, diagonal, upper=True),
    _aten.full.default: _full,
    _aten.full_like.default: _full_like,
    _aten.fill.Scalar: _full_like,
    _aten.fill.Tensor: _full_like,
    _aten.new_full.default: lambda call, x, size, value, **options: _full(call, size, value),
    _aten.zeros.default: _filled(0),
    _aten.zeros_like.default: _filled(0),
    _aten.new_zeros.default: _filled(0),
    _aten.ones.default: _filled(1),
    _aten.ones_like.default: _filled(1),
    _aten.new_ones.default: _filled(1),
    # What an uninitialized tensor holds, a graph can't depend on.
    _aten.empty.memory_format: _filled(0),
    _aten.empty_like.default: _filled(0),
    _aten.new_empty.default: _filled(0),
    _aten.empty_strided.default: _filled(0),
    _aten.new_empty_strided.default: _filled(0),
    _aten.scalar_tensor.default: _scalar,
    _aten.eye.default: _eye,
    _aten.eye.m: _eye,
    _aten.arange.default: lambda call, end, **options: _arange(call, 0, end),
    _aten.arange.start: _arange,
    _aten.arange.start_step: _arange,
}
