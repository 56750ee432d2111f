"""Floats of 16 bits, which torch computes with in 32."""

from __future__ import annotations

import torch

HALF = (torch.bfloat16, torch.float16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """``float32`` for floats of 16 bits; other dtypes as they are."""
    return torch.float32 if dtype in HALF else dtype
