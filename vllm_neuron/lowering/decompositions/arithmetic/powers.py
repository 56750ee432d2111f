"""Powers, and logarithms to base 2 and 10, as decompositions that are exact where PyTorch is.

torch-mlir and JAX divide one rounded logarithm by another, and IREE's power is the exponential of a rounded product: a
whole result is off in its last bits. Here floats of 32 bits and fewer are computed in 64 and rounded once, those of 64
with some 100 bits. Few equal factors are multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from vllm_neuron.lowering.decompositions.arithmetic import floats
from vllm_neuron.lowering.decompositions.arithmetic.floats import narrowed, widened
from vllm_neuron.lowering.shared.numbers import is_exponent

_aten = torch.ops.aten

_Number = Tensor | float

_LOG10_2 = (0.3010299956639812, -2.8037281277851704e-18)
# The most factors that a whole exponent is made a product of.
_FACTORS = 64
# As torch computes them, but for float16, where the root of minus infinity is infinity.
_DIRECT: dict[float, Callable[[Tensor], Tensor]] = {
    0.5: torch.sqrt,
    -0.5: torch.rsqrt,
    -1: torch.reciprocal,
    2: lambda x: x * x,
    -2: lambda x: (x * x).reciprocal(),
    3: lambda x: x * x * x,
}


def powers(table: dict[OpOverload, Callable[..., Any]]) -> dict[OpOverload, Callable[..., Any]]:
    """The decompositions of this file; ``table`` has those that apply where they return ``NotImplemented``."""
    norm = _aten.linalg_vector_norm.default
    return {
        _aten.exp2.default: lambda x: _power(2.0, x),
        _aten.log2.default: _log2,
        _aten.log10.default: _log10,
        _aten.pow.Tensor_Scalar: _power,
        _aten.pow.Tensor_Tensor: _power,
        _aten.pow.Scalar: _power,
        _aten.rsqrt.default: _rsqrt,
        _aten.ldexp.Tensor: lambda x, exponent: x * torch.pow(2.0, exponent),
        _aten.frexp.Tensor: _frexp,
        _aten.logaddexp2.default: _logaddexp2,
        norm: lambda *args, **kwargs: (
            table[norm](*args, **kwargs) if (found := _norm(*args, **kwargs)) is NotImplemented else found
        ),
    }


def _log2(x: Tensor) -> Tensor:
    x = _as_float(x)
    wide = widened(x)
    return narrowed(floats.log2(wide)[0] if x.dtype == torch.float64 else wide.log() * math.log2(math.e), x.dtype)


def _log10(x: Tensor) -> Tensor:
    x = _as_float(x)
    if x.dtype != torch.float64:
        return narrowed(widened(x).log() * math.log10(math.e), x.dtype)
    logarithm = floats.log2(x)
    result = floats.multiply(logarithm, _LOG10_2)[0]
    return torch.where(logarithm[0].abs() < float("inf"), result, logarithm[0])


def _power(x: _Number, y: _Number) -> Any:
    dtype = torch.result_type(x, y)
    if not isinstance(y, Tensor) and not is_exponent(y, dtype):
        return NotImplemented  # The canonical graph refuses it, as eager PyTorch does.
    if not dtype.is_floating_point:
        return _whole_power(x, y, dtype)
    if isinstance(x, Tensor) and not isinstance(y, Tensor):
        # A square of these is left to the compilers, which multiply.
        if y == 2 and x.dtype == dtype and dtype in (torch.float32, torch.float64):
            return NotImplemented
        if y in _DIRECT and dtype != torch.float16:
            return _DIRECT[y](x.to(dtype))
        if float(y).is_integer() and abs(y) <= (1 if dtype == torch.float64 else _FACTORS):
            return narrowed(_product(widened(x.to(dtype)), int(y)), dtype)
    device = (x if isinstance(x, Tensor) else y).device  # type: ignore[union-attr]
    base, exponent = (
        widened(number.to(dtype))
        if isinstance(number, Tensor)
        else torch.full((), number, dtype=dtype, device=device).to(torch.float64)
        for number in (x, y)
    )
    return narrowed(_signed_power(base, exponent, dtype == torch.float64), dtype)


def _signed_power(base: Tensor, exponent: Tensor, is_exact: bool) -> Tensor:
    """In ``float64``. Signs are read off the bits, where a denormal number is not zero."""
    size, bits = base.abs(), base.view(torch.int64)
    result = _exact_power(size, exponent) if is_exact else (exponent * size.log()).exp()
    result = torch.where((exponent == 0) | (size == 1), 1.0, result)
    half, is_whole = exponent * 0.5, exponent.floor() == exponent
    is_odd = is_whole & (half.floor() != half)
    result = torch.where((bits < 0) & is_odd, -result, result)
    is_below = (bits < 0) & (bits != -(1 << 63)) & (size != float("inf"))
    return torch.where(is_below & ~is_whole, float("nan"), result)


def _exact_power(size: Tensor, exponent: Tensor) -> Tensor:
    logarithm = floats.log2(size)
    rough = exponent * logarithm[0]
    # Nothing is exact about infinities, which would make NaNs of the rests.
    is_moderate = rough.abs() < 1100
    high, low = (torch.where(is_moderate, part, 0.0) for part in logarithm)
    # Of the shape of the result: torch-mlir takes a choice between two equal numbers for the one number that it has.
    factor = torch.where(is_moderate, exponent, torch.zeros_like(rough))
    product = floats.multiply((high, low), (factor, torch.zeros_like(factor)))
    return floats.exp2((torch.where(is_moderate, product[0], rough), product[1]))


def _product(x: Tensor, count: int) -> Tensor:
    """``count`` factors ``x``; the reciprocal of as many, where it is negative."""
    result, factor = torch.ones_like(x), x
    for bit in reversed(bin(abs(count))[2:]):
        if bit == "1":
            result = result * factor
        factor = factor * factor
    return result.reciprocal() if count < 0 else result


def _whole_power(x: _Number, y: _Number, dtype: torch.dtype) -> Any:
    """Of integers, modulo the range of ``dtype``."""
    if not isinstance(y, Tensor):
        return _product(x.to(dtype), int(y)) if y >= 0 else NotImplemented  # type: ignore[union-attr]
    # The products of small integers are right in 32 bits, up to their own highest one.
    wide = torch.int64 if dtype == torch.int64 else torch.int32
    base = x.to(wide) if isinstance(x, Tensor) else torch.full((), x, dtype=wide, device=y.device)
    exponent = y.to(wide)
    result, factor = torch.ones_like(base + exponent), base
    for bit in range(8 * dtype.itemsize - dtype.is_signed):
        result = torch.where((exponent >> bit) & 1 == 1, result * factor, result)
        factor = factor * factor
    of_minus_one = torch.where(base == -1, 1 - 2 * (exponent & 1), 0)
    return torch.where(exponent < 0, torch.where(base == 1, 1, of_minus_one), result).to(dtype)


def _rsqrt(x: Tensor) -> Any:
    # IREE rounds the root to 16 bits before it divides.
    return x.to(torch.float32).rsqrt().to(torch.float16) if x.dtype == torch.float16 else NotImplemented


def _frexp(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = widened(x)
    size, exponent = floats.frexp(wide)
    bits = wide.view(torch.int64)
    is_number = (wide.abs() < float("inf")) & (bits & ~(-1 << 63) != 0)
    significand = torch.where(is_number, torch.where(bits < 0, -size, size), wide)
    return narrowed(significand, x.dtype), torch.where(is_number, exponent, 0).to(torch.int32)


def _logaddexp2(x: Tensor, y: Tensor) -> Tensor:
    dtype = torch.result_type(x, y)
    x, y = (widened(value.to(dtype)) for value in (x, y))
    larger = torch.maximum(x, y)
    added = _power(2.0, -(x - y).abs())
    total = added + 1
    rest = (added - (total - 1)) / total * math.log2(math.e)
    return narrowed(torch.where(larger.abs() == float("inf"), larger, larger + (_log2(total) + rest)), dtype)


def _norm(x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if ord in (0, 1, 2, float("inf"), float("-inf")):
        return NotImplemented
    dtype = dtype or x.dtype
    powers = x.to(torch.float32 if dtype.itemsize == 2 else dtype).abs() ** ord
    return (powers.sum(dim, keepdim) ** (1 / ord)).to(dtype)


def _as_float(x: Tensor) -> Tensor:
    return x if x.dtype.is_floating_point else x.to(torch.float32)
