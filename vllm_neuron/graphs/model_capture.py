"""Capture of every bucket of a vLLM model, from its shapes alone.

The model is built from vLLM's own classes over fake tensors: real names, shapes, dtypes and tying, and no values. So a
graph, and its key, is the same on a machine that has the weights and on one that has not.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from vllm import ir
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from vllm_neuron import envs
from vllm_neuron.abi import TensorSpec
from vllm_neuron.compile.capture import capture
from vllm_neuron.errors import CaptureError, NeuronError
from vllm_neuron.graphs.trace_cache import TracedGraph
from vllm_neuron.model.buckets import Bucket
from vllm_neuron.model.groups import init_groups_alone
from vllm_neuron.model.kv import planned_blocks
from vllm_neuron.model.patches import without_accelerator
from vllm_neuron.model.step import STEP_INPUTS, StepModel, step_inputs
from vllm_neuron.routes import Route, current_route, lower

logger = logging.getLogger("vllm.neuron.tracing")


def trace_here(
    vllm_config: Any, buckets: Sequence[Bucket], num_blocks: int | None = None, route: Route | None = None
) -> Iterator[TracedGraph]:
    """Capture and lower ``buckets`` in this process, one after the other. See ``capture_workers.trace``."""
    tracer = Tracer(vllm_config, num_blocks, route)
    for bucket in buckets:
        yield told(tracer.trace(bucket))


def told(graph: TracedGraph) -> TracedGraph:
    """``graph``, which the log shows to be there."""
    logger.info("Captured %s in %.1f s", graph.bucket.name, graph.seconds)
    return graph


class Tracer:
    """A model without values, and the captures of its buckets."""

    def __init__(self, vllm_config: Any, num_blocks: int | None = None, route: Route | None = None) -> None:
        self._config = _private_copy(vllm_config)
        self._route = route or current_route()
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        without_accelerator()
        set_ir_defaults(self._config)
        with _model_parallel_state(self._config), _configured(self._config):
            with _refusals_in_one_line(self._config.model_config.model):
                model = _build(self._config, self._mode)
            self.step_model = StepModel(model, self._config)
        self._weights = dict(self.step_model.named_weights())
        if num_blocks is None:
            num_blocks = planned_blocks(self.step_model, self._config)
        self.num_blocks = num_blocks
        self._kv = kv_inputs(self.step_model, num_blocks)

    def trace(self, bucket: Bucket) -> TracedGraph:
        """Capture and lower one bucket."""
        start = time.monotonic()
        step = {f"inputs.{name}": spec for name, spec in step_inputs(bucket, self.step_model.block_size).items()}
        specs = step | self._kv
        specs |= {f"weights.{name}": _spec(tensor) for name, tensor in self._weights.items()}
        with _configured(self._config), self.step_model.context():
            graph = capture(self._forward, specs, self._kv, self._mode)
        module = lower(graph, self._route)
        seconds = time.monotonic() - start
        unread = {name: spec for name, spec in specs.items() if name not in graph.input_names and name not in step}
        return TracedGraph(bucket, module, graph.input_names, seconds, unread)

    def _forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        weights = {f"model.{name}": inputs[f"weights.{name}"] for name in self._weights}
        caches = [[inputs[name] for name in self._kv if name.endswith(side)] for side in (".k", ".v")]
        step = [inputs[f"inputs.{name}"] for name in STEP_INPUTS]
        logits: torch.Tensor = torch.func.functional_call(self.step_model, weights, (*step, *caches))
        return logits


def set_ir_defaults(vllm_config: Any) -> None:
    """What the constructor of vLLM's worker sets: a job has no worker."""
    vllm_config.kernel_config.ir_op_priority.set_default()
    ir.set_default_torch_wrap(vllm_config.compilation_config.ir_enable_torch_wrap)


def kv_inputs(step: StepModel, num_blocks: int) -> dict[str, TensorSpec]:
    """The KV caches of every attention layer by the names that they have as inputs of a graph, in layer order."""
    return {
        f"kv.{layer}.{side}": spec
        for layer, pair in enumerate(step.kv_specs(num_blocks))
        for side, spec in zip("kv", pair, strict=True)
    }


def _spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _private_copy(vllm_config: Any) -> Any:
    """A configuration whose model can be built beside the caller's: layers register themselves in it, by name."""
    private = copy.copy(vllm_config)
    private.compilation_config = copy.copy(vllm_config.compilation_config)
    private.compilation_config.static_forward_context = {}
    return private


class ShapesLoader(BaseModelLoader):
    """Builds a model and leaves its parameters without values."""

    def download_model(self, model_config: Any) -> None:
        """There is nothing to download."""

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """There is nothing to load."""


def _build(vllm_config: Any, mode: FakeTensorMode) -> nn.Module:
    # vLLM shares rotary modules of equal arguments in the whole process: a fake one must not reach a real model, nor
    # a real one a fake model.
    shared = rotary_embedding._ROPE_DICT
    kept = dict(shared)
    shared.clear()
    try:
        with mode, warnings.catch_warnings():
            # vLLM looks at the addresses of weights, which fake ones have none of; it only compares them.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            loader = ShapesLoader(vllm_config.load_config)
            model: nn.Module = loader.load_model(vllm_config=vllm_config, model_config=vllm_config.model_config)
        return model
    finally:
        shared.clear()
        shared.update(kept)


@contextlib.contextmanager
def _refusals_in_one_line(model: str) -> Iterator[None]:
    """What vLLM's classes raise while they are built, as a ``CaptureError``.

    They raise anything for a configuration that they do not take, and not all of it can be sent by a worker.
    """
    try:
        yield
    except NeuronError:
        raise
    except Exception as error:
        raise CaptureError(
            f"vLLM could not build the model {model} from its configuration: {_reason(error)}. "
            f"{envs.LOG_LEVEL.name}=DEBUG shows where"
        ) from error


def _reason(error: Exception) -> str:
    """One line; of an assertion that says nothing, its code."""
    text = str(error).rstrip(".")
    if not text:
        text = traceback.extract_tb(error.__traceback__)[-1].line or "no reason given"
    return f"{type(error).__name__}: {' '.join(text.split())}"


@contextlib.contextmanager
def _configured(vllm_config: Any) -> Iterator[None]:
    with set_current_vllm_config(vllm_config):
        yield


@contextlib.contextmanager
def _model_parallel_state(vllm_config: Any) -> Iterator[None]:
    """vLLM's process groups, which its layers ask for their rank: this process's own, or a group of one."""
    if parallel_state.model_parallel_is_initialized():  # type: ignore[no-untyped-call]
        yield
        return
    with _configured(vllm_config):
        init_groups_alone(vllm_config)
    yield
