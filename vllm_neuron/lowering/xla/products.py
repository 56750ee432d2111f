"""Products of matrices, convolutions and pooling. Floats of 16 bits are added up in 32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax
from torch._ops import OpOverload

from vllm_neuron.lowering.xla.call import Array, Call, Operator, array, jax_dtype

_aten = torch.ops.aten


def _matmul(call: Call, x: Array, y: Array) -> Array:
    if not x.size or not y.size:
        return jnp.zeros(call.shape, jax_dtype(call.compute_dtype))  # IREE 3.13 divides by the number of elements
    return jnp.matmul(x, y, preferred_element_type=jax_dtype(call.compute_dtype), precision=lax.Precision.HIGHEST)


def _add_product(call: Call, bias: Array, x: Array, y: Array, *, beta: float = 1, alpha: float = 1) -> Array:
    dtype = call.compute_dtype
    product = _matmul(call, x, y)
    if alpha != 1:
        product = product * array(alpha, dtype)
    if beta == 0:
        return product
    return product + (array(bias, dtype) if beta == 1 else array(bias, dtype) * array(beta, dtype))


def _convolution(
    call: Call,
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Array:
    if transposed:
        raise call.unsupported("a transposed convolution")
    dims = x.ndim - 2
    # IREE 3.13 makes a product of one with a window of one element, and takes the types of its operands and result for
    # equal.
    x, weight = array(x, call.compute_dtype), array(weight, call.compute_dtype)
    result = lax.conv_general_dilated(
        x,
        weight,
        window_strides=_each(stride, dims),
        padding=[(size, size) for size in _each(padding, dims)],
        rhs_dilation=_each(dilation, dims),
        feature_group_count=groups,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jax_dtype(call.compute_dtype),
    )
    return result if bias is None else result + jnp.reshape(array(bias, call.compute_dtype), (-1, *[1] * dims))


def _each(values: Sequence[int], dims: int) -> list[int]:
    return list(values) if len(values) == dims else list(values) * dims


def _windows(x: Array, size: Sequence[int], stride: Any, padding: Any, ceil: bool, call: Call) -> dict[str, Any]:
    dims = len(size)
    if ceil:
        raise call.unsupported("ceil_mode")
    batch = x.ndim - dims
    steps = _each(stride or size, dims)
    pads = [(value, value) for value in _each(padding or [0], dims)]
    return {
        "window_dimensions": (*[1] * batch, *size),
        "window_strides": (*[1] * batch, *steps),
        "padding": [*[(0, 0)] * batch, *pads],
    }


def _average_pool(
    call: Call,
    x: Array,
    size: Sequence[int],
    stride: Any = None,
    padding: Any = None,
    ceil: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Array:
    if any(padding or []) and not count_include_pad:
        raise call.unsupported("count_include_pad=False")
    dtype = jax_dtype(call.compute_dtype)
    windows = _windows(x, size, stride, padding, ceil, call)
    total: Array = lax.reduce_window(x.astype(dtype), jnp.zeros((), dtype), lax.add, **windows)
    count = 1
    for length in size:
        count *= length
    return total / jnp.asarray(divisor_override or count, dtype)


TABLE: dict[OpOverload, Operator] = {
    _aten.mm.default: _matmul,
    _aten.bmm.default: _matmul,
    _aten.mv.default: _matmul,
    _aten.dot.default: _matmul,
    _aten.matmul.default: _matmul,
    _aten.addmm.default: _add_product,
    _aten.baddbmm.default: _add_product,
    _aten.convolution.default: _convolution,
    _aten.avg_pool1d.default: _average_pool,
    _aten.avg_pool2d.default: _average_pool,
}
