"""Operators that work element by element, and conversions of dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch._ops import OpOverload

from vllm_neuron.lowering.xla.call import Array, Call, Operator, array

_aten = torch.ops.aten
_prims = torch.ops.prims


def _computed(function: Callable[..., Array]) -> Operator:
    """``function`` of all numbers and arrays among the arguments, in the dtype of the result."""

    def run(call: Call, *arguments: Any, **options: Any) -> Array:
        dtype = call.compute_dtype
        return function(
            *(array(argument, dtype) for argument in arguments),
            **{name: array(option, dtype) for name, option in options.items()},
        )

    return run


def _compared(function: Callable[..., Array]) -> Operator:
    """``function`` of two arguments in the dtype that torch compares them in."""
    return lambda call, *arguments: function(*call.promoted(*arguments))


def _of_truth(function: Callable[..., Array]) -> Operator:
    return lambda call, *arguments: function(*(array(argument, torch.bool) for argument in arguments))


def _inspected(function: Callable[[Array], Array]) -> Operator:
    """``function`` of one array in the array's own dtype."""
    return lambda call, x: function(x)


def _same(call: Call, x: Array, *arguments: Any, **options: Any) -> Array:
    # The interpreter converts to the dtype of the result.
    return x


def _add(x: Array, y: Array, alpha: Any = 1) -> Array:
    return jnp.add(x, y) if isinstance(alpha, int) else jnp.add(x, jnp.multiply(alpha, y))


def _subtract(x: Array, y: Array, alpha: Any = 1) -> Array:
    return lax.sub(*jnp.broadcast_arrays(x, y if isinstance(alpha, int) else jnp.multiply(alpha, y)))


def _reverse_subtract(x: Array, y: Array, alpha: Any = 1) -> Array:
    return _subtract(y, x, alpha)


def _divide(call: Call, x: Any, y: Any, *, rounding_mode: str | None = None) -> Array:
    dtype = call.compute_dtype
    x, y = jnp.broadcast_arrays(array(x, dtype), array(y, dtype))
    # Of the quotients that are rounded, capture leaves those of integers towards zero.
    return jnp.true_divide(x, y) if rounding_mode is None else lax.div(x, y)


def _power(call: Call, x: Array, y: float) -> Array:
    if y != 2:
        raise call.unsupported("capture leaves squares only")
    return lax.integer_pow(array(x, call.compute_dtype), 2)


def _clamp(call: Call, x: Any, low: Any = None, high: Any = None, **limits: Any) -> Array:
    low, high = limits.get("min", low), limits.get("max", high)
    dtype = call.compute_dtype
    x = array(x, dtype)
    if low is not None:
        x = jnp.maximum(x, array(low, dtype))
    return x if high is None else jnp.minimum(x, array(high, dtype))


def _where(call: Call, condition: Array, x: Any, y: Any) -> Array:
    return jnp.where(array(condition, torch.bool), array(x, call.dtype), array(y, call.dtype))


def _gelu(call: Call, x: Array, *, approximate: str = "none") -> Array:
    x = array(x, call.compute_dtype)
    if approximate == "tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1 + jnp.tanh(inner))
    return 0.5 * x * (1 + lax.erf(x * 0.7071067811865476))


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + jnp.exp(-x))


def _elu(call: Call, x: Array, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Array:
    x = array(x, call.compute_dtype)
    return scale * jnp.where(x > 0, x, alpha * jnp.expm1(jnp.minimum(x, 0) * input_scale))


def _softplus(call: Call, x: Array, beta: float = 1, threshold: float = 20) -> Array:
    x = array(x, call.compute_dtype)
    scaled = x * beta
    return jnp.where(scaled > threshold, x, jnp.log1p(jnp.exp(jnp.minimum(scaled, threshold))) / beta)


def _leaky_relu(x: Array, slope: Any = 0.01) -> Array:
    return jnp.where(x > 0, x, x * slope)


def _sign(x: Array) -> Array:
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype) if x.dtype != jnp.bool_ else x


def _copysign(call: Call, x: Any, y: Any) -> Array:
    x, y = (array(argument, call.compute_dtype) for argument in (x, y))
    return jnp.where(jnp.signbit(y), -jnp.abs(x), jnp.abs(x))


def _shift(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda x, y: function(*jnp.broadcast_arrays(x, y))


def _right_shift(x: Array, y: Array) -> Array:
    signed = jnp.issubdtype(x.dtype, jnp.signedinteger)
    return (lax.shift_right_arithmetic if signed else lax.shift_right_logical)(x, y)


def _invert(x: Array) -> Array:
    return lax.bitwise_not(x)


_COMPUTED: dict[str, Callable[..., Array]] = {
    "abs": jnp.abs,
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "addcdiv": lambda x, y, z, value=1: x + value * (y / z),
    "addcmul": lambda x, y, z, value=1: x + value * y * z,
    "asin": jnp.arcsin,
    "asinh": jnp.arcsinh,
    "atan": jnp.arctan,
    "atan2": jnp.arctan2,
    "atanh": jnp.arctanh,
    "ceil": lambda x: jnp.ceil(x) if jnp.issubdtype(x.dtype, jnp.floating) else x,
    "cos": jnp.cos,
    "cosh": jnp.cosh,
    "erf": lax.erf,
    "exp": jnp.exp,
    "expm1": jnp.expm1,
    "floor": lambda x: jnp.floor(x) if jnp.issubdtype(x.dtype, jnp.floating) else x,
    "fmax": jnp.fmax,
    "fmin": jnp.fmin,
    "frac": lambda x: x - jnp.trunc(x),
    "log": jnp.log,
    "log1p": jnp.log1p,
    "logaddexp": jnp.logaddexp,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "neg": jnp.negative,
    "reciprocal": lambda x: 1 / x,
    "relu": lambda x: jnp.maximum(x, jnp.zeros((), x.dtype)),
    "round": lambda x: jnp.round(x) if jnp.issubdtype(x.dtype, jnp.floating) else x,
    "rsqrt": lax.rsqrt,
    "sgn": _sign,
    "sigmoid": _sigmoid,
    "sign": _sign,
    "silu": lambda x: x * _sigmoid(x),
    "sin": jnp.sin,
    "sinh": jnp.sinh,
    "sqrt": jnp.sqrt,
    "square": lambda x: x * x,
    "tan": jnp.tan,
    "tanh": jnp.tanh,
    "trunc": lambda x: jnp.trunc(x) if jnp.issubdtype(x.dtype, jnp.floating) else x,
    "add": _add,
    "sub": _subtract,
    "rsub": _reverse_subtract,
    "mul": jnp.multiply,
    "lerp": lambda x, y, weight: x + weight * (y - x),
    "leaky_relu": _leaky_relu,
    "bitwise_and": jnp.bitwise_and,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor,
    "bitwise_not": _invert,
    "bitwise_left_shift": _shift(lax.shift_left),
    "bitwise_right_shift": _shift(_right_shift),
}  # fmt: skip
_COMPARED: dict[str, Callable[..., Array]] = {
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
}
_INSPECTED: dict[str, Callable[[Array], Array]] = {
    "isnan": lambda x: x != x,
    "isinf": lambda x: jnp.abs(x) == jnp.inf,
    "isfinite": jnp.isfinite,
    "signbit": lambda x: jnp.signbit(x) if jnp.issubdtype(x.dtype, jnp.floating) else x < 0,
}
_OF_TRUTH: dict[str, Callable[..., Array]] = {
    "logical_and": jnp.logical_and,
    "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor,
    "logical_not": jnp.logical_not,
}
_OTHER: dict[str, Operator] = {
    "div": _divide,
    "pow": _power,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda call, x, high: _clamp(call, x, None, high),
    "where": _where,
    "gelu": _gelu,
    "elu": _elu,
    "softplus": _softplus,
    "copysign": _copysign,
    "clone": _same,
    "contiguous": _same,
    "_to_copy": _same,
    "copy": lambda call, x, y, non_blocking=False: jnp.broadcast_to(y, call.shape),
}
_DTYPE: dict[OpOverload, Operator] = {
    _prims.convert_element_type.default: _same,
    _aten.view.dtype: lambda call, x, dtype: jax.lax.bitcast_convert_type(x, jnp.dtype(str(dtype)[6:])),
}


def _overloads(name: str) -> list[OpOverload]:
    packet = getattr(_aten, name)
    return [getattr(packet, overload) for overload in packet.overloads() if "out" not in overload]


def _table() -> dict[OpOverload, Operator]:
    kinds: list[tuple[dict[str, Any], Callable[[Any], Operator]]] = [
        (_COMPUTED, _computed),
        (_COMPARED, _compared),
        (_INSPECTED, _inspected),
        (_OF_TRUTH, _of_truth),
        (_OTHER, lambda operator: operator),
    ]
    found = {
        overload: kind(function)
        for functions, kind in kinds
        for name, function in functions.items()
        for overload in _overloads(name)
    }
    return {**found, **_DTYPE}


TABLE: dict[OpOverload, Operator] = _table()
