"""Capture of the buckets of a vLLM model, from its shapes alone.

The model is built from vLLM's own classes over fake tensors: real names, shapes, dtypes and tying, and no values. So a
graph, and its key, is the same on a machine that has the weights and on one that has not.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from vllm_neuron import envs
from vllm_neuron.abi import InputName, TensorSpec
from vllm_neuron.compile.capture import capture
from vllm_neuron.errors import CaptureError, NeuronError
from vllm_neuron.graphs.trace_cache import CapturedGraph
from vllm_neuron.model.buckets import Bucket
from vllm_neuron.model.groups import init_groups
from vllm_neuron.model.kv import planned_blocks
from vllm_neuron.model.patches import building_without_values, set_ir_defaults, without_accelerator
from vllm_neuron.model.step import STEP_INPUTS, StepModel, step_inputs
from vllm_neuron.routes import Route, current_route, lower


class ModelCapture:
    """A model without values, and the captures of its buckets.

    ``route`` lowers them, by default the one in force. Raises :class:`CaptureError` where vLLM can't build the model.
    """

    def __init__(self, vllm_config: Any, route: Route | None = None) -> None:
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
        self._kv = kv_inputs(self.step_model, planned_blocks(self.step_model, self._config))

    def capture(self, bucket: Bucket) -> CapturedGraph:
        """Capture and lower one bucket. Raises :class:`CaptureError` or :class:`UnsupportedOpError`."""
        start = time.monotonic()
        step = {InputName.step(name): spec for name, spec in step_inputs(bucket, self.step_model.block_size).items()}
        specs = step | self._kv
        specs |= {InputName.weight(name): TensorSpec.of(tensor) for name, tensor in self._weights.items()}
        with _configured(self._config), self.step_model.context():
            graph = capture(self._forward, specs, self._kv, self._mode)
        module = lower(graph, self._route)
        seconds = time.monotonic() - start
        unread = {name: spec for name, spec in specs.items() if name not in graph.input_names and name not in step}
        return CapturedGraph(bucket, module, graph.input_names, seconds, unread)

    def _forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        weights = {f"model.{name}": inputs[InputName.weight(name)] for name in self._weights}
        caches = [[inputs[name] for name in self._kv if name.endswith(side)] for side in (".k", ".v")]
        step = [inputs[InputName.step(name)] for name in STEP_INPUTS]
        logits: torch.Tensor = torch.func.functional_call(self.step_model, weights, (*step, *caches))
        return logits


def kv_inputs(step: StepModel, num_blocks: int) -> dict[str, TensorSpec]:
    """The KV caches of every attention layer by the names that they have as inputs of a graph, in layer order."""
    return {
        InputName.kv(layer, side): spec
        for layer, pair in enumerate(step.kv_specs(num_blocks))
        for side, spec in zip("kv", pair, strict=True)
    }


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
    with mode, building_without_values():
        loader = ShapesLoader(vllm_config.load_config)
        model: nn.Module = loader.load_model(vllm_config=vllm_config, model_config=vllm_config.model_config)
    return model


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
    # Only the ranks meet there: whoever is killed later leaves nothing.
    with tempfile.TemporaryDirectory(prefix="vllm_neuron_") as folder, _configured(vllm_config):
        init_groups(vllm_config, 0, f"file://{Path(folder, 'group')}", 0)
    yield
