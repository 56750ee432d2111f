"""Tensors that a model's modules keep as plain attributes, which no list of weights names."""

from __future__ import annotations

import torch
from torch import nn


def name_constants(model: nn.Module) -> None:
    """Make a buffer of each tensor that a module of ``model`` keeps as a plain attribute.

    So it has a name, and is an input of a graph that is bound when the artifact is loaded, as every weight is. Empty
    tensors are left alone: they stand for what vLLM fills in later.
    """
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor) and value.numel():
                delattr(module, name)
                module.register_buffer(name, value, persistent=False)
