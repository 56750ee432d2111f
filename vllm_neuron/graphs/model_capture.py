"""Capture of the buckets of a vLLM model, from its shapes alone.

The model is built from vLLM's own classes over fake tensors: real names, shapes, dtypes and tying, and no values. So a
graph, and its key, is the same on a machine that has the weights and on one that has not.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.utils import get_model_architecture

from vllm_neuron.abi import InputName, TensorSpec
from vllm_neuron.compile.capture import capture
from vllm_neuron.graphs.trace_cache import CapturedGraph
from vllm_neuron.lowering.shared.carriers import carried_spec
from vllm_neuron.model.buckets import Bucket
from vllm_neuron.model.groups import init_groups_alone
from vllm_neuron.model.kv import planned_blocks
from vllm_neuron.model.late_weights import create_late_weights
from vllm_neuron.model.patches.building import building_without_values, set_ir_defaults, without_accelerator
from vllm_neuron.model.refusals import in_one_line, refused_model
from vllm_neuron.model.step import STEP_INPUTS, StepModel, step_inputs
from vllm_neuron.routes import Route, current_route, lower


class ModelCapture:
    """A model without values, and the captures of its buckets.

    ``route`` lowers them, by default the one in force. A model that has been ``loaded`` takes the place of one without
    values; only the shapes of its weights are used. Raises :class:`CaptureError` where vLLM can't build the model.
    """

    def __init__(self, vllm_config: Any, route: Route | None = None, loaded: StepModel | None = None) -> None:
        self._config = _private_copy(vllm_config)
        self._route = route or current_route()
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.step_model = loaded or self._without_values()
        self._weights = dict(self.step_model.named_weights())
        self._kv = kv_inputs(self.step_model, planned_blocks(self.step_model, self._config))

    def _without_values(self) -> StepModel:
        without_accelerator()
        set_ir_defaults(self._config)
        with model_parallel_state(self._config), _configured(self._config):
            with in_one_line(functools.partial(refused_model, self._config.model_config.model)):
                model = _build(self._config, self._mode)
            return StepModel(model, self._config)

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
        # As the inputs of the graph are told: a loaded model is compared with both.
        unread = {
            name: carried_spec(spec)
            for name, spec in specs.items()
            if name not in graph.input_names and name not in step
        }
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

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config.load_config)
        self._config = vllm_config

    def download_model(self, model_config: Any) -> None:
        """There is nothing to download."""

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """There is nothing to load; but what loading would create is created."""
        create_late_weights(model, self._config)


def _build(vllm_config: Any, mode: FakeTensorMode) -> nn.Module:
    # Imported first, so that tensors that its module keeps are real in the whole process.
    get_model_architecture(vllm_config.model_config)
    with mode, building_without_values():
        loader = ShapesLoader(vllm_config)
        model: nn.Module = loader.load_model(vllm_config=vllm_config, model_config=vllm_config.model_config)
    return model


@contextlib.contextmanager
def _configured(vllm_config: Any) -> Iterator[None]:
    with set_current_vllm_config(vllm_config):
        yield


@contextlib.contextmanager
def model_parallel_state(vllm_config: Any) -> Iterator[None]:
    """vLLM's process groups, which its layers ask for their rank: this process's own, or a group of one."""
    if parallel_state.model_parallel_is_initialized():  # type: ignore[no-untyped-call]
        yield
        return
    with _configured(vllm_config):
        init_groups_alone(vllm_config)
    yield
