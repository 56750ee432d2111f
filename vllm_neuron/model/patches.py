"""What vLLM takes for granted of torch's accelerator, on a machine that has none."""

from __future__ import annotations

import torch


def without_accelerator() -> None:
    """vLLM's model loader and its shutdown call these unconditionally, and torch raises where there is no device."""
    for name in ("synchronize", "empty_cache", "empty_host_cache"):
        if hasattr(torch.accelerator, name) and not torch.accelerator.is_available():
            setattr(torch.accelerator, name, lambda *args, **kwargs: None)
