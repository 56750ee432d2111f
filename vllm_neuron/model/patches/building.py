"""What is changed of how vLLM builds and loads a model. Checked on vLLM 0.32.0 and 0.33.0 with torch 2.13.0."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch


def without_accelerator() -> None:
    """Make nothing of three calls that torch raises at where there is no device.

    vLLM's model loader and its shutdown make them, whatever the platform. Can go when they ask ``current_platform``.
    """
    for name in ("synchronize", "empty_cache", "empty_host_cache"):
        if hasattr(torch.accelerator, name) and not torch.accelerator.is_available():
            setattr(torch.accelerator, name, lambda *args, **kwargs: None)


def set_ir_defaults(vllm_config: Any) -> None:
    """What the constructor of vLLM's worker does for its operators, in a process that has no worker.

    Can go when vLLM does it where the model is built.
    """
    from vllm import ir

    vllm_config.kernel_config.ir_op_priority.set_default()
    ir.set_default_torch_wrap(vllm_config.compilation_config.ir_enable_torch_wrap)


@contextlib.contextmanager
def building_without_values() -> Iterator[None]:
    """Inside, a model over fake tensors is built that shares nothing with the real ones of this process.

    vLLM keeps rotary modules of equal arguments for the whole process, in a dictionary: a fake one must not reach a
    real model, nor a real one a fake model. And it compares the addresses of weights, which fake ones have none of;
    torch warns at each. Both can go when vLLM keeps such modules by configuration.
    """
    from vllm.model_executor.layers import rotary_embedding

    shared = rotary_embedding._ROPE_DICT
    kept = dict(shared)
    shared.clear()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield
    finally:
        shared.clear()
        shared.update(kept)


def before_weights(loader: Any, check: Callable[[torch.nn.Module], None]) -> None:
    """Have ``loader``, one of vLLM's, call ``check`` with the model that it has built, before it reads any weight.

    Can go when vLLM builds a model and loads it in two calls.
    """
    load_weights = loader.load_weights

    def check_and_load(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        check(model)
        return load_weights(model, *args, **kwargs)

    loader.load_weights = check_and_load
