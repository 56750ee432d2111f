"""Reads and writes at places that a tensor names, all of which the shared passes have brought in range."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax
from torch._ops import OpOverload

from vllm_neuron.lowering.xla.call import Array, Call, Operator, array
from vllm_neuron.lowering.xla.shapes import bounds

_aten = torch.ops.aten


def _read(x: Array, places: tuple[Any, ...]) -> Array:
    return x.at[places].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _write(x: Array, places: tuple[Any, ...], values: Array, accumulate: bool = False) -> Array:
    target = x.at[places]
    options: dict[str, Any] = {"mode": "promise_in_bounds", "wrap_negative_indices": False}
    return target.add(values, **options) if accumulate else target.set(values, **options)


def _places(call: Call, indices: Sequence[Array | None]) -> tuple[Any, ...]:
    if any(index is not None and index.dtype == jnp.bool_ for index in indices):
        raise call.unsupported("a mask selects a number of elements that is not known before it runs")
    return tuple(slice(None) if index is None else index for index in indices)


def _along(x: Array, dim: int, index: Array) -> tuple[Any, ...]:
    """Places of a one-dimensional index along ``dim``."""
    dim %= max(x.ndim, 1)
    return (*[slice(None)] * dim, jnp.reshape(index, (-1,)))


def _aligned(x: Array, dim: int, index: Array) -> tuple[Array, ...]:
    """Places of an index that has the result's shape: itself along ``dim``, and each element's own elsewhere."""
    dim %= x.ndim
    return tuple(
        index if axis == dim else lax.broadcasted_iota(index.dtype, index.shape, axis) for axis in range(x.ndim)
    )


def _embedding(call: Call, weight: Array, index: Array, *padding: Any) -> Array:
    return _read(weight, (index,))


def _index(call: Call, x: Array, indices: Sequence[Array | None]) -> Array:
    return _read(x, _places(call, indices))


def _index_select(call: Call, x: Array, dim: int, index: Array) -> Array:
    return _read(x, _along(x, dim, index)) if x.ndim else x


def _gather(call: Call, x: Array, dim: int, index: Array, *, sparse_grad: bool = False) -> Array:
    return _read(x, _aligned(x, dim, index)) if x.ndim else jnp.broadcast_to(x, call.shape)


def _take(call: Call, x: Array, index: Array) -> Array:
    return _read(jnp.reshape(x, (-1,)), (index,))


def _index_put(
    call: Call, x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False, *unsafe: bool
) -> Array:
    return _write(x, _places(call, indices), array(values, call.dtype), accumulate)


def _index_copy(call: Call, x: Array, dim: int, index: Array, values: Array) -> Array:
    return _write(x, _along(x, dim, index), array(values, call.dtype))


def _index_add(call: Call, x: Array, dim: int, index: Array, values: Array, *, alpha: float = 1) -> Array:
    return _write(x, _along(x, dim, index), array(values, call.dtype) * array(alpha, call.dtype), True)


def _index_fill(call: Call, x: Array, dim: int, index: Array, value: Any) -> Array:
    return _write(x, _along(x, dim, index), array(value, call.dtype))


def _scatter(call: Call, x: Array, dim: int, index: Array, source: Any, *, accumulate: bool = False) -> Array:
    if not x.ndim:
        raise call.unsupported("a tensor without dimensions")
    values = array(source, call.dtype)
    if values.ndim:
        values = lax.slice(values, (0,) * values.ndim, index.shape)
    return _write(x, _aligned(x, dim, index), values, accumulate)


def _slice_scatter(
    call: Call, x: Array, source: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Array:
    dim %= x.ndim
    first, last = bounds(x.shape[dim], start, end)
    places = jnp.arange(first, last, step, dtype=jnp.int64)
    return _write(x, (*[slice(None)] * dim, places), array(source, call.dtype))


def _select_scatter(call: Call, x: Array, source: Array, dim: int, index: int) -> Array:
    dim %= x.ndim
    chosen = lax.broadcasted_iota(jnp.int64, x.shape, dim) == index % x.shape[dim]
    return jnp.where(chosen, jnp.expand_dims(array(source, call.dtype), dim), x)


TABLE: dict[OpOverload, Operator] = {
    _aten.embedding.default: _embedding,
    _aten.index.Tensor: _index,
    _aten._unsafe_index.Tensor: _index,
    _aten.index_select.default: _index_select,
    _aten.gather.default: _gather,
    _aten.take.default: _take,
    _aten.index_put.default: _index_put,
    _aten._unsafe_index_put.default: _index_put,
    _aten.index_copy.default: _index_copy,
    _aten.index_add.default: _index_add,
    _aten.index_fill.int_Scalar: _index_fill,
    _aten.index_fill.int_Tensor: _index_fill,
    _aten.scatter.src: _scatter,
    _aten.scatter.value: _scatter,
    _aten.scatter_add.default: lambda call, *arguments: _scatter(call, *arguments, accumulate=True),
    _aten.slice_scatter.default: _slice_scatter,
    _aten.select_scatter.default: _select_scatter,
}
