"""Floating-point numbers as significand and exponent, and sums of two of them, which hold 106 bits.

For decompositions: built from operators that both routes have. IREE's CPU code takes denormal numbers for zero, so they
are read and written here as the whole numbers that their bits are.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
"""A number as a sum of two ``float64``: the nearest one, and the rest."""

_BITS = 52  # of a significand, after the one that is always there
_BIAS = 1023
_SIZE = (1 << 63) - 1  # all but the sign
_INFINITY = 0x7FF << _BITS
# Splits 53 bits into 26 and 27: Veltkamp.
_SPLITTER = 134217729.0

_LOG2_E = (1.4426950408889634, 2.0355273740931033e-17)
_LN_2 = (0.6931471805599453, 2.3190468138462996e-17)
_THIRD = (1 / 3, 1.850371707708594e-17)


def widened(x: Tensor) -> Tensor:
    """``x`` as ``float64``, denormal numbers too."""
    if x.dtype in (torch.float64, torch.float16) or not x.dtype.is_floating_point:
        return x.to(torch.float64)
    x = x.to(torch.float32)
    bits = x.view(torch.int32)
    denormal = (bits & 0x7FFFFF).to(torch.float64) * 2.0**-149
    is_denormal = (bits & 0x7F800000) == 0
    return torch.where(is_denormal, torch.where(bits < 0, -denormal, denormal), x.to(torch.float64))


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``float64`` rounded to ``dtype``, to 16 bits by way of 32 as torch does."""
    if dtype == torch.float64:
        return x
    size = x.abs()
    is_denormal = size < 2.0**-126
    bits = torch.where(is_denormal, size * 2.0**149, 0.0).round().to(torch.int32)
    bits = torch.where(x.view(torch.int64) < 0, bits | -(1 << 31), bits)
    return torch.where(is_denormal, bits.view(torch.float32), x.to(torch.float32)).to(dtype)


def frexp(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of finite ``float64`` that are not zero: significands from 0.5 to 1 without sign, and ``int64`` exponents."""
    bits = x.view(torch.int64) & _SIZE
    is_denormal = bits < 1 << _BITS
    bits = torch.where(is_denormal, bits.to(torch.float64).view(torch.int64), bits)
    exponent = (bits >> _BITS) - torch.where(is_denormal, _BIAS - 1 + 1074, _BIAS - 1)
    return (bits & ((1 << _BITS) - 1) | (_BIAS - 1) << _BITS).view(torch.float64), exponent


def ldexp(x: Tensor, exponent: Tensor) -> Tensor:
    """``x * 2**exponent`` of positive ``float64`` from 0.5 to 2, rounded once."""
    exponent = exponent.clamp(-1100, 1100)
    half = exponent >> 1
    normal = x * _power_of_two(half) * _power_of_two(exponent - half)
    denormal = (x * _power_of_two(exponent.clamp(max=1 - _BIAS) + 1074)).round().to(torch.int64)
    return torch.where(exponent < 2 - _BIAS, denormal.view(torch.float64), normal)


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + _BIAS) << _BITS).view(torch.float64)


def log2(x: Tensor) -> Pair:
    """The logarithm of ``float64``, exact to some 100 bits. Minus infinity, infinity and NaN are in the first part."""
    significand, exponent = frexp(x)
    is_small = significand < math.sqrt(0.5)
    significand = torch.where(is_small, significand * 2, significand)
    exponent = (exponent - is_small.to(torch.int64)).to(torch.float64)
    # ln(m) is twice the area tangent of (m - 1) / (m + 1): the powers of s**2 over 1, 3, 5, ...
    above, (below, rest) = significand - 1, _sum(significand, torch.ones_like(significand))
    s = above / below
    product, error = _product(s, below)
    s_rest = ((above - product) - error - s * rest) / below
    square = multiply((s, s_rest), (s, s_rest))
    tail = torch.zeros_like(s)
    for divisor in range(29, 3, -2):
        tail = tail * square[0] + 1 / divisor
    tail = tail * square[0]
    factor, error = _sum(torch.full_like(s, _THIRD[0]), tail)
    series = multiply(square, (factor, error + _THIRD[1]))
    series_and_one = _sum(torch.ones_like(s), series[0])
    series = _sum(series_and_one[0], series_and_one[1] + series[1])
    logarithm = multiply(multiply((s, s_rest), series), (2 * _LOG2_E[0], 2 * _LOG2_E[1]))
    whole, rest = _sum(exponent, logarithm[0])
    whole, rest = _sum(whole, rest + logarithm[1])
    bits = x.view(torch.int64)
    is_positive = (bits > 0) & (bits < _INFINITY)
    is_below = (bits < 0) & (bits != -1 << 63)
    special = torch.where(is_below, float("nan"), x.log())
    return torch.where(is_positive, whole, special), torch.where(is_positive, rest, 0.0)


def exp2(x: Pair) -> Tensor:
    """Two to the power of ``x``, rounded once but for some 2% of the last place. Beyond 1100, zero or infinity."""
    is_moderate = x[0].abs() < 1100
    high, low = (torch.where(is_moderate, part, 0.0) for part in x)
    whole = high.round()
    g, g_rest = multiply(_sum(high - whole, low), _LN_2)
    tail = torch.zeros_like(g)
    for degree in range(16, 2, -1):
        tail = tail * g + 1 / math.factorial(degree)
    square, square_rest = _product(g, g)
    total, first = _sum(torch.ones_like(g), g)
    total, second = _sum(total, square / 2)
    rest = first + (second + (g_rest + (square_rest / 2 + g * g_rest + square * g * tail)))
    return torch.where(is_moderate, ldexp(total + rest, whole.to(torch.int64)), x[0].exp())


def multiply(x: Pair, y: Pair | tuple[float, float]) -> Pair:
    """The product of two sums of two numbers, each the nearest one and a rest."""
    product, error = _product(x[0], y[0])
    return _sum(product, error + (x[0] * y[1] + x[1] * y[0]))


def _sum(x: Tensor, y: Tensor) -> Pair:
    """The rounded sum and what was rounded off: Knuth."""
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


def _product(x: Tensor, y: Tensor | float) -> Pair:
    """The rounded product and what was rounded off: Dekker."""
    (x_high, x_low), (y_high, y_low) = _halves(x), _halves(y)
    product = x * y
    return product, ((x_high * y_high - product) + x_high * y_low + x_low * y_high) + x_low * y_low


def _halves(x: Any) -> tuple[Any, Any]:
    scaled = x * _SPLITTER
    high = scaled - (scaled - x)
    return high, x - high
