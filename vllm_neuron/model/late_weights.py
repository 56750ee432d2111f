"""Weights that a model has only once it is loaded, because its loader creates them for what a checkpoint brings.

The Transformers backend of vLLM 0.32 and 0.33 does so with the bias of the output head. A graph that was captured
without it would compute other logits, so a model without values is given it as well.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

logger = logging.getLogger("vllm.neuron.capture")

_INDEX = "model.safetensors.index.json"

Shapes = dict[str, tuple[int, ...]]


def create_late_weights(model: nn.Module, vllm_config: Any) -> None:
    """Have ``model``, which is without values, create what loading its checkpoint would, by its own ``load_weights``.

    What the checkpoint has is told by the headers of its files; where they are not at hand, by the transformers class
    of the configuration. Where that is not there either, the model stays as it is. Raises what ``load_weights`` does.
    """
    places = set(_empty_places(model))
    if not places or vllm_config.load_config.load_format == "dummy":
        return
    dtype = vllm_config.model_config.dtype
    late = [
        (name, torch.empty(shape, dtype=dtype))
        for name, shape in _checkpoint_shapes(model, vllm_config).items()
        if _name_in_model(model, name) in places
    ]
    if late:
        load: Any = model.load_weights
        load(late)


def _empty_places(model: nn.Module) -> Iterator[str]:
    for prefix, module in model.named_modules():
        yield from (f"{prefix}.{name}" for name, weight in module._parameters.items() if weight is None)


def _name_in_model(model: nn.Module, name: str) -> str | None:
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    found: str | None = name if mapper is None else mapper.map_name(name)
    return found


def _checkpoint_shapes(model: nn.Module, vllm_config: Any) -> Shapes:
    return header_shapes(Path(vllm_config.model_config.model)) or _class_shapes(model, vllm_config.model_config)


def header_shapes(folder: Path) -> Shapes:
    """The shape of each weight of a folder's safetensors files, without reading one; empty where there are none."""
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    index = folder / _INDEX
    if index.is_file():
        listed = set(json.loads(index.read_text())["weight_map"].values())
        files = [file for file in files if file.name in listed]
    shapes: Shapes = {}
    for file in files:
        with safe_open(file, "pt") as weights:
            shapes |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}
    return shapes


def _class_shapes(model: nn.Module, model_config: Any) -> Shapes:
    """The weights of the model's own class in transformers, for a model that vLLM runs by that class."""
    from transformers import AutoModelForCausalLM
    from vllm.model_executor.models.transformers.base import Base

    if not isinstance(model, Base):
        return {}
    try:
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                model_config.hf_config, trust_remote_code=model_config.trust_remote_code
            )
    except Exception as error:  # A class may raise anything; then nothing is known, and the loaded model is compared.
        logger.debug("transformers has no class for the output head of %s: %s", model_config.model, error)
        return {}
    return {name: tuple(weight.shape) for name, weight in built.state_dict().items()}
