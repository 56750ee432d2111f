"""A vLLM model with its weights, refused before they are read."""

from __future__ import annotations

from typing import Any

from torch import nn
from vllm.model_executor.model_loader import get_model_loader

from vllm_neuron.model.patches.building import before_weights
from vllm_neuron.model.step import check_layers


def load_model(vllm_config: Any) -> nn.Module:
    """What vLLM's own ``get_model`` returns. Raises ``UnsupportedError`` between building the model and its weights."""
    loader: Any = get_model_loader(vllm_config.load_config)
    before_weights(loader, lambda model: check_layers(model, vllm_config))
    model: nn.Module = loader.load_model(vllm_config=vllm_config, model_config=vllm_config.model_config)
    return model
