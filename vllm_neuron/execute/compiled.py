"""The compiled graphs of a model, loaded and bound: what the runner calls at every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_neuron.abi import InputName, TensorSpec
from vllm_neuron.errors import NeuronError
from vllm_neuron.execute.base import Inputs
from vllm_neuron.execute.start_report import StartClock
from vllm_neuron.graphs.graph_set import PreparedGraph
from vllm_neuron.graphs.loaded_model import LoadedModel
from vllm_neuron.host.cpu import check_features
from vllm_neuron.lowering.shared.carriers import carried, carried_spec
from vllm_neuron.model.buckets import Bucket
from vllm_neuron.model.step import StepModel
from vllm_neuron.runtime.base import BoundCall
from vllm_neuron.runtime.iree import ALIGNMENT, IreeExecutable


class BindingError(NeuronError, RuntimeError):
    """A graph expects an input that the loaded model does not have, or has in another shape or dtype."""

    code = "binding"


class GraphSource(Protocol):
    """Whoever prepares the graphs, while the weights load."""

    def wait(self, loaded: LoadedModel) -> Sequence[PreparedGraph]:
        """Every graph, ready to be bound to the ``loaded`` model."""


@dataclass(frozen=True)
class _LoadedGraph:
    call: BoundCall
    staging: dict[str, torch.Tensor]


class CompiledExecutor:
    """Runs steps on artifacts. Weights and KV caches are bound once, shared by all buckets; step inputs are staged.

    ``model`` is the loaded model, and ``model_inputs`` are its weights (``weights.<name>``) and KV caches
    (``kv.<layer>.k``, ``.v``) by the names that graphs use. Raises :class:`BindingError` where they are not what a
    graph was compiled for, and :class:`IncompatibleHostError` where an artifact needs a CPU feature that this host
    lacks.
    """

    def __init__(
        self, graphs: GraphSource, model: StepModel, model_inputs: Mapping[str, torch.Tensor], clock: StartClock
    ) -> None:
        self._source = graphs
        self._model = model
        self._clock = clock
        self._inputs = dict(model_inputs)
        self._graphs: dict[Bucket, _LoadedGraph] = {}

    def prepare(self) -> None:
        """Wait for every graph and load it. What was compiled in this start is tried, on zeros, in the null block.

        Raises :class:`CacheMissError` in strict mode, for all misses at once.
        """
        with self._clock.phase("wait_for_graphs"):
            specs = {name: carried_spec(TensorSpec.of(tensor)) for name, tensor in self._inputs.items()}
            graphs = self._source.wait(LoadedModel(self._model, specs))
        with self._clock.phase("load_graphs"):
            self._graphs = {graph.bucket: self._load(graph) for graph in graphs}
        with self._clock.phase("try_new_graphs"):
            for graph in graphs:
                if graph.fresh:
                    self._graphs[graph.bucket].call()

    def run(self, bucket: Bucket, inputs: Inputs) -> torch.Tensor:
        """Logits [bucket.seqs, vocabulary] of one step; the KV caches are written in place.

        ``inputs`` are the step inputs of ``model.step.step_inputs``, each of the bucket's exact shape. Raises
        :class:`NeuronError` for a bucket that was not compiled at start-up: nothing is compiled while serving.
        """
        graph = self._graphs.get(bucket)
        if graph is None:
            known = ", ".join(known.name for known in self._graphs)
            raise NeuronError(f"no graph was compiled for {bucket.name}; the graphs of this server are: {known}")
        for name, tensor in graph.staging.items():
            tensor.copy_(torch.from_numpy(inputs[name]))
        (logits,) = graph.call()
        return logits

    def _load(self, graph: PreparedGraph) -> _LoadedGraph:
        abi = graph.entry.abi
        if len(graph.input_names) != len(abi.inputs):
            raise BindingError(
                f"{graph.bucket.name}: the artifact {graph.entry.key} has {len(abi.inputs)} inputs, the graph has "
                f"{len(graph.input_names)}"
            )
        staging: dict[str, torch.Tensor] = {}
        arguments = []
        for name, spec in zip(map(InputName, graph.input_names), abi.inputs, strict=True):
            if name.is_step:
                tensor = torch.zeros(spec.shape, dtype=spec.torch_dtype)
                staging[name.bare] = tensor
            else:
                tensor = self._model_input(graph.bucket, name, spec)
            arguments.append(tensor)
        check_features(graph.entry.metadata.required_features)
        return _LoadedGraph(IreeExecutable(graph.entry.artifact_path, abi).bind(arguments), staging)

    def _model_input(self, bucket: Bucket, name: InputName, spec: TensorSpec) -> torch.Tensor:
        tensor = self._inputs.get(name)
        if tensor is None:
            raise BindingError(f"{bucket.name} needs {name}, which the loaded model does not have")
        tensor = carried(tensor)
        found = TensorSpec.of(tensor)
        if found != spec:
            raise BindingError(f"{bucket.name} needs {name} as {spec}; the loaded model has it as {found}")
        if not tensor.is_contiguous() or tensor.data_ptr() % ALIGNMENT:
            if name.is_kv:
                raise BindingError(f"{name} must be contiguous and aligned to {ALIGNMENT} bytes to be written in place")
            # One copy for all buckets.
            tensor = self._inputs[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
        return tensor.detach()
