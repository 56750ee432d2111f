"""What can be told of a model's folder before vLLM looks at it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm_neuron.errors import ConfigError

_CONFIGURATIONS = ("config.json", "params.json")


def check_model_folder(model: str) -> None:
    """Raises :class:`ConfigError` where ``model`` is meant as a path and is not the folder of a model.

    A name that could be a hub id passes: only the hub can tell.
    """
    path = Path(os.path.expanduser(model))  # noqa: PTH111, pathlib's raises where there is no home
    if path.is_dir():
        if not any((path / name).is_file() for name in _CONFIGURATIONS):
            raise ConfigError(
                f"The model folder {model} has no config.json. It needs the model's configuration and tokenizer files; "
                "to compile, no weights"
            )
    elif path.exists():
        raise ConfigError(f"The model {model} is a file. Name a folder with config.json, or a hub id")
    elif path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ConfigError(f"There is no model folder {model}. Name a folder with config.json, or a hub id")


def check_dtype_known(vllm_config: Any, dtype_option: str) -> None:
    """Raises :class:`ConfigError` where a compile job would have to guess the dtype that production reads from weights.

    vLLM takes it from the option, else the model's configuration, else the weights' headers, else it guesses.
    """
    model = vllm_config.model_config
    if dtype_option != "auto" or getattr(model.hf_text_config, "dtype", None) is not None:
        return
    if any(Path(model.model).glob("*.safetensors")):
        return
    raise ConfigError(
        f"The configuration of {model.model} names no dtype, and there are no weights to take it from: "
        "give --dtype, the same as in production"
    )
