"""Division with a remainder, of integers and floats, bit for bit as in torch.

Compilers round the quotient first, which may reach the next integer, and contract or don't contract what follows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm_neuron.lowering.shared.half import HALF, wide

# A double: 11 bits of exponent, 52 of fraction.
_FRACTION = 52
_IMPLICIT = 1 << _FRACTION
_MAGNITUDE = (1 << 63) - 1
_LARGEST = 2046

Number = Tensor | float


def divide(x: Tensor, y: Number, *, rounding_mode: str | None = None) -> Any:
    """``div`` with a rounding mode."""
    if rounding_mode == "floor":
        return floor_divide(x, y)
    dtype = torch.result_type(x, y)
    if rounding_mode is None or not dtype.is_floating_point:
        return NotImplemented
    stepped = _stepped(dtype, y)
    return _rounded(_operand(x, dtype, stepped) / _operand(y, dtype, stepped), stepped).trunc().to(dtype)


def floor_divide(x: Number, y: Number) -> Tensor:
    """Rounded towards minus infinity; of floats in torch's steps, each of which is rounded."""
    dtype = torch.result_type(x, y)
    if not dtype.is_floating_point:
        dividend, divisor = (_operand(number, dtype, dtype) for number in (x, y))
        quotient = torch.div(dividend, divisor, rounding_mode="trunc")
        return quotient - _is_across(dividend - quotient * divisor, divisor).to(dtype)
    stepped = _stepped(dtype, y)
    dividend, divisor = (_operand(number, dtype, stepped) for number in (x, y))
    rest = _rest(dividend, divisor)
    quotient = _rounded(_rounded(dividend - rest, stepped) / divisor, stepped)
    quotient = torch.where(_is_across(rest, divisor), _rounded(quotient - 1, stepped), quotient)
    floor = quotient.floor()
    floor = torch.where(quotient - floor > 0.5, floor + 1, floor)
    plain = dividend / divisor
    floor = torch.where(quotient == 0, torch.copysign(torch.zeros_like(plain), plain), floor)
    return torch.where(divisor == 0, plain, floor).to(dtype)


def remainder(x: Number, y: Number) -> Tensor:
    """What is left after a division that rounds towards minus infinity: the sign is the divisor's."""
    dtype = torch.result_type(x, y)
    dividend, divisor = (_operand(number, dtype, dtype) for number in (x, y))
    rest = _rest(dividend, divisor)
    return torch.where(_is_across(rest, divisor), rest + divisor, rest).to(dtype)


def fmod(x: Number, y: Number) -> Tensor:
    """What is left after a division that rounds towards zero: the sign is the dividend's."""
    dtype = torch.result_type(x, y)
    dividend, divisor = (_operand(number, dtype, dtype) for number in (x, y))
    return _rest(dividend, divisor).to(dtype)


def _stepped(dtype: torch.dtype, divisor: Number) -> torch.dtype:
    """The dtype that torch rounds every step to: by one number, 16-bit floats are divided in 32 bits."""
    alone = not isinstance(divisor, Tensor) or not divisor.dim()
    return torch.float32 if dtype in HALF and alone else dtype


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """``value`` rounded to ``dtype``, and still of 32 bits where that has 16.

    In integers, because IREE leaves out a conversion to 16 bits that is followed by the one back.
    """
    if dtype not in HALF:
        return value
    bits = value.view(torch.int32)
    dropped = 16 if dtype == torch.bfloat16 else 13
    even = (bits >> dropped) & 1
    nearest = ((bits + ((1 << dropped - 1) - 1) + even) & -(1 << dropped)).view(torch.float32)
    if dtype == torch.float16:
        nearest = torch.where(value.abs() < 2.0**-14, (value * 2.0**24).round() * 2.0**-24, nearest)
        nearest = torch.where(nearest.abs() < 2.0**16, nearest, nearest * float("inf"))
    return torch.where(value.isnan(), value, nearest)


def _operand(number: Number, dtype: torch.dtype, stepped: torch.dtype) -> Tensor:
    """An operand as torch takes it: of the dtype of the result, or as it is where the steps are wider than that."""
    if not isinstance(number, Tensor):
        # Wrapped or rounded to its dtype, as in torch, and an operator's result: capture admits no constant tensor.
        exact = torch.float64 if isinstance(number, float) else torch.int64
        number = torch.full((), number, dtype=exact)
    elif number.dim():
        number = number.to(dtype)
    return number.to(stepped).to(wide(stepped))


def _rest(dividend: Tensor, divisor: Tensor) -> Tensor:
    if dividend.dtype.is_floating_point:
        return _float_rest(dividend.double(), divisor.double()).to(dividend.dtype)
    return dividend - torch.div(dividend, divisor, rounding_mode="trunc") * divisor


def _is_across(rest: Tensor, divisor: Tensor) -> Tensor:
    """Whether the signs differ, so that rounding towards minus infinity goes one step further."""
    return (rest != 0) & ((rest < 0) ^ (divisor < 0))


def _float_rest(dividend: Tensor, divisor: Tensor) -> Tensor:
    """The remainder of doubles with quotients below 2^53, exactly.

    In units of the divisor's last place, dividend and divisor are integers, and so is what is left. It has 54 bits, so
    that integers of 64, which wrap around, hold it whatever became of the product. The quotient may be one off.
    """
    bits, below = dividend.view(torch.int64), divisor.abs().view(torch.int64)
    exponent, scale = (torch.clamp((one & _MAGNITUDE) >> _FRACTION, min=1) for one in (bits, below))
    quotient = (dividend / divisor).abs()
    quotient = torch.where(quotient < 2.0**53, quotient, 0.0).to(torch.int64)
    unit = _integer(below)
    rest = (_integer(bits) << torch.clamp(exponent - scale, 0, 63)) - quotient * unit
    rest = torch.where(rest < 0, rest + unit, rest)
    rest = torch.where(rest >= unit, rest - unit, rest)
    # One power of two for the fraction, and one for the exponent: their product may have no double.
    size = rest.double() * 2.0**-_FRACTION * (torch.clamp(scale, max=_LARGEST) << _FRACTION).view(torch.float64)
    signed = torch.where(bits < 0, -size, size)
    signed = torch.where(dividend.abs() < divisor.abs(), dividend, signed)
    valid = (dividend.abs() < float("inf")) & (divisor.abs() > 0)
    return torch.where(valid, signed, float("nan"))


def _integer(bits: Tensor) -> Tensor:
    """The fraction of a double as an integer, with the leading one that its bits leave out."""
    return torch.where((bits & _MAGNITUDE) >= _IMPLICIT, _IMPLICIT, 0) | (bits & (_IMPLICIT - 1))
