"""The reciprocal, of denormal floats too: IREE 3.13 runs with denormals taken for zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Dtype to the integer of its size, the bits of its fraction, and the exponent of the least denormal without its sign.
_FORMATS = {torch.float64: (torch.int64, 52, 1074), torch.float32: (torch.int32, 23, 149)}


def reciprocal(x: Tensor) -> Any:
    """``1 / x`` as a decomposition: of a denormal, by the integer that its fraction is."""
    if x.is_complex():
        return NotImplemented
    if x.dtype not in _FORMATS:
        dtype = x.dtype if x.dtype.is_floating_point else torch.get_default_dtype()
        return x.to(torch.float32).reciprocal().to(dtype)
    integer, fraction, least = _FORMATS[x.dtype]
    bits = x.view(integer)
    magnitude = bits & torch.iinfo(integer).max
    is_denormal = (magnitude > 0) & (magnitude < 1 << fraction)
    units = magnitude.to(x.dtype)
    number = torch.where(is_denormal, torch.where(bits < 0, -units, units), x)
    result = torch.ones_like(x) / number
    # In two steps: the number of units in one is beyond the range.
    scaled = result * 2.0 ** (least // 2) * 2.0 ** (least - least // 2)
    return torch.where(is_denormal, scaled, result)
