"""What this package changes of vLLM and torch in a process: each change, its reason, and when it can go.

Whoever supports another release looks here first: everything that reaches into their modules to replace something is in
this file, or for a server and its requests in ``serve/patches.py``. All of it was looked up in vLLM 0.32.0 and 0.33.0
with torch 2.13.0. What vLLM offers for extensions, such as ``register_oot`` in ``mixtures``, is used where it belongs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vllm_neuron.errors import ConfigError
from vllm_neuron.model.level import settle_level


def set_vllm_variables() -> None:
    """Settle what vLLM reads from variables, before it reads them.

    Its scheduler speaks the dialect of one runner or the other, and takes the second where its own GPU kernels are
    installed: ours is of the first kind. Can go when ``NeuronRunner`` follows the second, or vLLM asks its platform.
    A first start compiles everything, which takes longer than vLLM waits for an engine; a user's own value stays.
    """
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    os.environ.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", str(24 * 3600))


def without_accelerator() -> None:
    """Make nothing of three calls that torch raises at where there is no device.

    vLLM's model loader and its shutdown make them, whatever the platform. Can go when they ask ``current_platform``.
    """
    for name in ("synchronize", "empty_cache", "empty_host_cache"):
        if hasattr(torch.accelerator, name) and not torch.accelerator.is_available():
            setattr(torch.accelerator, name, lambda *args, **kwargs: None)


@functools.cache
def extend_configurations() -> None:
    """Settle the optimization level as a configuration is made, and raise our own refusals as they are.

    pydantic turns a ``ConfigError`` that one of the platform's hooks raises into four lines about types and a web page.
    That can go when vLLM calls its platform outside of its validators; for the level, see ``level``.
    """
    from vllm.config import ModelConfig, VllmConfig

    setattr(ModelConfig, "__init__", _unwrapping(ModelConfig.__init__))  # noqa: B010
    setattr(VllmConfig, "__init__", _with_level(_unwrapping(VllmConfig.__init__)))  # noqa: B010


def _with_level(make: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(make)
    def make_with_level(*args: Any, **kwargs: Any) -> None:
        settle_level(kwargs)
        make(*args, **kwargs)

    return make_with_level


def _unwrapping(make: Callable[..., None]) -> Callable[..., None]:
    from pydantic import ValidationError

    @functools.wraps(make)
    def make_or_refuse(*args: Any, **kwargs: Any) -> None:
        try:
            make(*args, **kwargs)
        except ValidationError as error:
            causes = [detail.get("ctx", {}).get("error") for detail in error.errors()]
            ours = next((cause for cause in causes if isinstance(cause, ConfigError)), None)
            raise (ours or error) from None

    return make_or_refuse


def after_parsing(parser: Any, use: Callable[[Any], None]) -> None:
    """Call ``use`` with the arguments each time that vLLM's ``parser`` has read a command line.

    The platform is handed the parser before anything is parsed, and asked no more until the model has been looked at,
    which is late for a misspelt option. Can go when vLLM calls its platform with the arguments.
    """
    parse_known_args = parser.parse_known_args

    def parse_and_use(*args: Any, **kwargs: Any) -> Any:
        namespace, rest = parse_known_args(*args, **kwargs)
        use(namespace)
        return namespace, rest

    parser.parse_known_args = parse_and_use


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


def route_by(topk_softmax: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Let ``topk_softmax`` choose the experts of a mixture: vLLM's own operator is in its compiled builds alone.

    Can go when ``FusedTopKRouter`` asks its platform for the operator.
    """
    from vllm.model_executor.layers.fused_moe.router import fused_topk_router

    fused_topk_router.vllm_topk_softmax = topk_softmax


def open_mixture(layer: Any) -> None:
    """Let ``layer``, a ``MoERunner``, call what its opaque operator stands for, so that capture sees through it.

    Can go when vLLM leaves the operator out where its own compiler is off (``CompilationMode.NONE``).
    """
    from vllm.model_executor.layers.fused_moe.runner import moe_runner

    shared = layer._shared_experts is not None
    layer._forward_entry = moe_runner._moe_forward_shared if shared else moe_runner._moe_forward


def before_weights(loader: Any, check: Callable[[torch.nn.Module], None]) -> None:
    """Have ``loader``, one of vLLM's, call ``check`` with the model that it has built, before it reads any weight.

    Can go when vLLM builds a model and loads it in two calls.
    """
    load_weights = loader.load_weights

    def check_and_load(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        check(model)
        return load_weights(model, *args, **kwargs)

    loader.load_weights = check_and_load
