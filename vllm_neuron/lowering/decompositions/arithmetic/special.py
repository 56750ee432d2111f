"""Special functions that torch-mlir has no lowering of, as decompositions. They are computed in 64 bits."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

# log(erfc(z) * exp(z * z) / t) in powers of t = 2 / (2 + z), for z >= 0: a Chebyshev fit, with an error of 4e-14.
_ERFC = (
    -1.265512123484636, 0.9999999999904816, 0.3750000016541548, 0.08333321778287195, -0.08593320574882858,
    -0.14384797935138355, -0.09030145733721401, 0.01343011621733637, 0.2609857923034099, -0.6449955783502695,
    3.498604183585017, -12.793048046734905, 34.81733892744179, -75.63638927113861, 126.4939545412676,
    -157.95027403649547, 145.41578638743113, -97.6134907159673, 46.71302162443466, -15.216375577535949,
    3.0688883150574084, -0.3054231731629003, 0.005248058141618912,
)  # fmt: skip
# Lanczos' approximation of the gamma function, for g = 7.
_LANCZOS = (
    0.99999999999980993, 676.5203681218851, -1259.1392167224028, 771.32342877765313, -176.61502916214059,
    12.507343278686905, -0.13857109526572012, 9.9843695780195716e-6, 1.5056327351493116e-7,
)  # fmt: skip


def erfc(x: Tensor) -> Tensor:
    """One minus the error function, as exact where that is almost one."""
    z = x.to(torch.float64)
    size = z.abs()
    t = 2 / (2 + size)
    exponent = torch.full_like(t, _ERFC[-1])
    for coefficient in reversed(_ERFC[:-1]):
        exponent = exponent * t + coefficient
    # Infinity minus infinity would be no number.
    tail = t * torch.exp(exponent - size.clamp(max=40.0).square())
    return torch.where(z < 0, 2 - tail, tail).to(_result(x))


def lgamma(x: Tensor) -> Any:
    """The logarithm of the size of the gamma function. Of 64 bits there is none, for want of a sine."""
    if x.dtype == torch.float64:
        return NotImplemented
    z = x.to(torch.float64)
    mirrored = z < 0.5
    at = torch.where(mirrored, -z, z - 1)
    total = torch.full_like(at, _LANCZOS[0])
    for index, coefficient in enumerate(_LANCZOS[1:], 1):
        total = total + coefficient / (at + index)
    t = at + 7.5
    result = 0.5 * math.log(2 * math.pi) + (at + 0.5) * t.log() - t + total.log()
    # Of the size, since IREE 3.13 loses digits of the sine of small negative numbers.
    sine = torch.sin(math.pi * (z - z.round()).abs().to(torch.float32)).to(torch.float64)
    result = torch.where(mirrored, math.log(math.pi) - sine.log() - result, result)
    return torch.where(z.abs() == math.inf, math.inf, result).to(_result(x))


def hypot(x: Tensor, y: Tensor) -> Tensor:
    """The length of the hypotenuse, without overflow on the way."""
    dtype = torch.result_type(x, y)
    x, y = x.to(torch.float64).abs(), y.to(torch.float64).abs()
    longer, shorter = torch.maximum(x, y), torch.minimum(x, y)
    ratio = torch.where(longer == 0, 0.0, shorter / longer)
    result = longer * (1 + ratio * ratio).sqrt()
    return torch.where((x == math.inf) | (y == math.inf), math.inf, result).to(dtype)


def _result(x: Tensor) -> torch.dtype:
    return x.dtype if x.dtype.is_floating_point else torch.get_default_dtype()


def cdist(x: Tensor, y: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Tensor:
    """The distance of each row of ``x`` from each row of ``y``, by the norm ``p``."""
    apart = (x.unsqueeze(-2) - y.unsqueeze(-3)).abs()
    if p == 0:
        return (apart != 0).sum(-1).to(x.dtype)
    if p == math.inf:
        return apart.amax(-1)
    if p == 1:
        return apart.sum(-1)
    return apart.square().sum(-1).sqrt() if p == 2 else apart.pow(p).sum(-1).pow(1 / p)


def euclidean(x: Tensor, y: Tensor) -> Tensor:
    """``aten._euclidean_dist``."""
    return cdist(x, y)
