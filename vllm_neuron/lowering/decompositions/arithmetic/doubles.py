"""Functions of 64-bit floats near zero, where the compilers' forms of them lose the digits of a small argument.

After Kahan: what rounding does to ``1 + x`` is made up for by a factor that suffers the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

_aten = torch.ops.aten
_INFINITY = float("inf")


def doubles() -> dict[OpOverload, Callable[..., Any]]:
    """The decompositions of this file. They leave other dtypes alone."""
    rules = {
        _aten.log1p.default: _log1p, _aten.expm1.default: _expm1, _aten.sinh.default: _sinh,
        _aten.asinh.default: _asinh, _aten.acosh.default: _acosh, _aten.atanh.default: _atanh,
        _aten.elu.default: _elu,
    }  # fmt: skip
    return {op: _of_doubles(rule) for op, rule in rules.items()}


def _of_doubles(rule: Callable[..., Tensor]) -> Callable[[Tensor], Any]:
    @functools.wraps(rule)
    def of_doubles(x: Tensor, *factors: float) -> Any:
        return rule(x, *factors) if x.dtype == torch.float64 else NotImplemented

    return of_doubles


def _log1p(x: Tensor) -> Tensor:
    above = 1 + x
    near = above.log() * (x / (above - 1))
    return torch.where((above == 1) | (x == _INFINITY), x, near)


def _expm1(x: Tensor) -> Tensor:
    power = x.exp()
    rest = power - 1
    near = rest * (x / power.log())
    # Far from zero nothing is lost, and the logarithm may be infinite.
    return torch.where(power == 1, x, torch.where(x.abs() > 1, rest, near))


def _elu(x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    return torch.where(x > 0, x, (x * input_scale).expm1() * alpha) * scale


def _sinh(x: Tensor) -> Tensor:
    size = x.abs()
    rest, half = size.expm1(), (size * 0.5).exp()
    # Beyond 22 the other exponential does not count, and this one may exceed the range before it is halved.
    return torch.copysign(torch.where(size < 22, (rest + rest / (rest + 1)) * 0.5, half * 0.5 * half), x)


def _asinh(x: Tensor) -> Tensor:
    size = x.abs()
    square = size * size
    near = (size + square / (1 + (square + 1).sqrt())).log1p()
    return torch.copysign(torch.where(size < 2.0**28, near, size.log() + math.log(2)), x)


def _acosh(x: Tensor) -> Tensor:
    above = x - 1
    near = (above + (above * 2 + above * above).sqrt()).log1p()
    return torch.where(x < 2.0**28, near, x.log() + math.log(2))


def _atanh(x: Tensor) -> Tensor:
    size = x.abs()
    return torch.copysign((2 * size / (1 - size)).log1p() * 0.5, x)
