"""The Dynamo backends: ``torch.compile(model, backend="neuron_native")``.

=================================  ==================================================================================
``neuron_native``, ``neuron``      compiles each graph through the cache, and runs it on this machine
``vllm_neuron``                    the same by the deprecated XLA route
``neuron_libtorch_graph_capture``  compiles each graph for the target, and runs nothing: what it returns are zeros
=================================  ==================================================================================

They are for inference: under ``torch.no_grad()`` or ``torch.inference_mode()``, or for tensors that need no gradient.
With ``VLLM_NEURON_CPU_COMPILE`` set, the first two run nothing either; with ``VLLM_NEURON_CPU_MODE``, they leave
everything to PyTorch. The last follows the route in force. A graph of dynamic shape is compiled anew for each shape
and each Python number that it is called with.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
from torch.fx import GraphModule, Node

from vllm_neuron import __version__, envs, logs
from vllm_neuron.cache.entry import Entry
from vllm_neuron.cache.source import Source
from vllm_neuron.compile.outputs import View, take_outputs
from vllm_neuron.compile.patches import accept_recurrent_modules
from vllm_neuron.compile.pipeline import Pipeline
from vllm_neuron.compile.specialize import Specializer, is_dynamic, take_floats
from vllm_neuron.errors import ConfigError, UnsupportedError
from vllm_neuron.host.cpu import check_features
from vllm_neuron.lowering.canonical import CanonicalGraph, canonicalize
from vllm_neuron.lowering.decompositions.table import decomposition_table
from vllm_neuron.lowering.shared.boundary import with_carriers
from vllm_neuron.lowering.shared.carriers import carried, restored
from vllm_neuron.routes import Route, check_available, current_route, default_level, lower, warn_of_deprecation
from vllm_neuron.runtime.iree import IreeExecutable
from vllm_neuron.targets import compile_target

logger = logging.getLogger("vllm.neuron.backends")
logs.set_level()
accept_recurrent_modules()

Compiled = Callable[..., Any]
_HOW = {
    Source.LOCAL: "found in the local tier",
    Source.REMOTE: "fetched from a remote tier",
    Source.COMPILED: "compiled",
}
# Makes the callable for one canonical graph: inputs in the graph's order, to results.
_Finish = Callable[[CanonicalGraph, Entry], Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]]


def neuron_native(gm: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Compiled:
    """Compile a Dynamo graph for this machine; the callable that Dynamo is to run in its place.

    Raises :class:`UnsupportedOpError` for an operator without a lowering, :class:`UnsupportedError` for inputs that
    require grad, :class:`ConfigError` for options and for a target that does not run here, and what
    :meth:`Pipeline.resolve` raises. Dynamo shows them inside its own ``BackendCompilerFailed``.
    """
    return _compile_or_capture(gm, example_inputs, Route.NATIVE, options)


def vllm_neuron(gm: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Compiled:
    """As :func:`neuron_native`, by the deprecated XLA route.

    Raises as it does, and :class:`ConfigError` where JAX is not installed.
    """
    warn_of_deprecation()
    return _compile_or_capture(gm, example_inputs, Route.XLA, options)


def graph_capture(gm: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Compiled:
    """Compile a Dynamo graph by the route and for the target in force, into the cache, and run nothing.

    The callable returns zeros of the right shapes, dtypes and strides, so that a program of several graphs can
    be captured in one go, and leaves mutated inputs as they are. Raises as :func:`neuron_native` does.
    """
    _refuse_options(options)
    return _compile(gm, example_inputs, current_route(), _zeros)


def _compile_or_capture(
    gm: GraphModule, example_inputs: Sequence[Any], route: Route, options: dict[str, Any]
) -> Compiled:
    _refuse_options(options)
    if envs.CPU_MODE.get():
        return gm
    if envs.CPU_COMPILE.get():
        return _compile(gm, example_inputs, route, _zeros)
    target = compile_target()
    if not target.runs_here:
        raise ConfigError(
            f"the target is {target.name}, which does not run here: compile ahead with backend="
            "'neuron_libtorch_graph_capture', or unset NEURON_PLATFORM_TARGET_OVERRIDE"
        )
    return _compile(gm, example_inputs, route, _load)


def _refuse_options(options: dict[str, Any]) -> None:
    if options:
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise ConfigError(f"torch.compile was given {given}, but the Neuron backends take no options and no mode")


def _compile(gm: GraphModule, example_inputs: Sequence[Any], route: Route, finish: _Finish) -> Compiled:
    check_available(route)
    if torch.is_grad_enabled() and any(map(_requires_grad, gm.graph.output_node().all_input_nodes)):
        raise UnsupportedError(
            "a compiled graph has no backward pass, and a result requires grad, as an input or a parameter does: call "
            "the model under torch.no_grad() or torch.inference_mode(), or detach its inputs"
        )

    def compile_static(inputs: Sequence[Any]) -> Compiled:
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def compile_graph(aten: GraphModule, _: Sequence[Any]) -> Compiled:
            boxed: Compiled = make_boxed_func(_Graph(aten, route, finish))
            return boxed

        backend = aot_autograd(
            fw_compiler=compile_graph,
            inference_compiler=compile_graph,
            decompositions=decomposition_table(),
            keep_inference_input_mutations=True,
        )
        compiled: Compiled = backend(gm, list(inputs))
        return compiled

    if any(is_dynamic(value) for value in example_inputs):
        return Specializer(compile_static, take_floats(gm))
    return compile_static(example_inputs)


def _requires_grad(node: Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.requires_grad


class _Graph:
    """One AOTAutograd graph, compiled: called with its inputs, returns the list of its outputs."""

    def __init__(self, aten: GraphModule, route: Route, finish: _Finish) -> None:
        placeholders = [node for node in aten.graph.nodes if node.op == "placeholder"]
        self.outputs, self.layouts = take_outputs(aten)
        graph = canonicalize(with_carriers(aten), [f"input{index}" for index in range(len(placeholders))])
        self.positions = graph.input_positions
        # Nothing is left to compile where all outputs are views of inputs: AOTAutograd makes those itself.
        self.run = finish(graph, _resolve(graph, route)) if graph.abi.outputs else None

    def __call__(self, *inputs: Any) -> list[Any]:
        results = self.run([carried(inputs[position]) for position in self.positions]) if self.run else []
        laid_out = [
            layout.apply(restored(result, layout.dtype)) for layout, result in zip(self.layouts, results, strict=True)
        ]
        return [output.of(laid_out) if isinstance(output, View) else output for output in self.outputs]


def _resolve(graph: CanonicalGraph, route: Route) -> Entry:
    provenance = {
        "graph": "a graph of user code",
        "inputs": [str(spec) for spec in graph.abi.inputs],
        "versions": {"vllm-neuron": __version__, "torch": torch.__version__},
    }
    found = Pipeline.from_environment(default_level(route)).resolve(lower(graph, route), provenance)
    logger.info("A graph of user code has key %s: %s, %.1f s", found.key.digest, _HOW[found.source], found.seconds)
    return found.entry


def _load(graph: CanonicalGraph, entry: Entry) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    """What runs the artifact: of a process that loads it, and of the children that it forks, which load it again."""
    check_features(entry.metadata.required_features)
    artifact, abi = entry.artifact_path.absolute(), graph.abi
    loaded = functools.cache(lambda process: IreeExecutable(artifact, abi))
    loaded(os.getpid())
    return lambda inputs: loaded(os.getpid())(inputs)


def _zeros(graph: CanonicalGraph, entry: Entry) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    logger.info("Captured a graph of user code as %s; it is not run, and its results are zeros", entry.key)

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.zeros(spec.shape, dtype=spec.torch_dtype) for spec in graph.abi.results]

    return run
