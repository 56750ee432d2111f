"""From a canonical graph to StableHLO, by torch-mlir."""

from __future__ import annotations

import importlib.util
import operator
import sys
import types
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from vllm_neuron.errors import UnsupportedOpError
from vllm_neuron.lowering.canonical import CanonicalGraph
from vllm_neuron.lowering.module import LoweredModule
from vllm_neuron.lowering.native import checks, import_forms, literals
from vllm_neuron.lowering.shared import passes
from vllm_neuron.lowering.stablehlo import copy_insertion, dispatches, rewrites

_PIPELINES = (
    "builtin.module(func.func(torch-match-quantized-custom-ops),"
    "torchdynamo-export-to-torch-backend-pipeline{ extra-library=})",
    "builtin.module(torch-backend-to-stablehlo-backend-pipeline{allow-non-finites=true})",
)
_SIMPLIFY = "builtin.module(func.func(stablehlo-aggressive-simplification))"
_CLEAN = "builtin.module(func.func(stablehlo-aggressive-simplification),canonicalize,cse,symbol-dce,strip-debuginfo)"


def lower(graph: CanonicalGraph) -> LoweredModule:
    """StableHLO text for ``graph``, with ``tf.aliasing_output`` on the inputs that are written in place.

    The same graph gives the same bytes in every process, under every hash seed and in every folder.
    Raises :class:`UnsupportedOpError`, naming the operator and its shapes, for what can't be lowered.
    """
    # Dynamo compiles while its own fake mode is active.
    with _disable_current_modes():
        checks.refuse_unsupported(graph.graph_module)
        prepared = passes.prepare(graph.graph_module)
        import_forms.replace_forms(prepared)
        numbers = literals.hide_literals(prepared)
        try:
            module = _to_stablehlo(prepared)
        except _failures() as error:
            raise UnsupportedOpError(_explain(prepared, error)) from error
    literals.restore_literals(module, numbers)
    _run(module, _SIMPLIFY)
    rewrites.rewrite(module)
    _run(module, _CLEAN)
    dispatches.split_wide(module)
    copy_insertion.insert_copies(module, graph.abi.aliases)
    text = module.operation.get_asm(enable_debug_info=False)
    return LoweredModule("stablehlo", text.encode(), graph.abi)


def _to_stablehlo(graph: Graph) -> Any:
    from torch_mlir import ir
    from torch_mlir.dialects import torch as torch_dialect
    from torch_mlir.extras.fx_importer import FxImporter

    _spare_lookups()
    context = ir.Context()
    torch_dialect.register_dialect(context)
    importer = FxImporter(context=context)
    importer.import_stateless_graph(graph, func_name="main")
    for pipeline in _PIPELINES:
        _run(importer.module, pipeline)
    return importer.module


def _spare_lookups() -> None:
    """Give StableHLO an empty Python module: else the bindings search for one each time they meet an operation."""
    name = "torch_mlir.dialects.stablehlo"
    if name not in sys.modules and importlib.util.find_spec(name) is None:
        sys.modules[name] = types.ModuleType(name)


def _run(module: Any, pipeline: str) -> None:
    from torch_mlir.passmanager import PassManager

    with module.context:
        PassManager.parse(pipeline).run(module.operation)


def _failures() -> tuple[type[Exception], ...]:
    """What torch-mlir raises for a graph that it can't lower."""
    from torch_mlir import ir

    return (ir.MLIRError, AssertionError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)


def _explain(graph: Graph, error: Exception) -> str:
    """Names the first operator that can't be lowered by itself: torch-mlir may name a constant that was left over."""
    tried = set()
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and (call := passes.describe(node)) not in tried:
            tried.add(call)
            try:
                _to_stablehlo(_alone(node))
            except _failures():
                return f"{call} has no lowering to StableHLO"
    return f"the graph can't be lowered to StableHLO: {next(iter(str(error).splitlines()), type(error).__name__)}"


def _alone(node: Node) -> Graph:
    assert isinstance(node.target, OpOverload)
    graph = Graph(owning_module=node.graph.owning_module)
    inputs = {argument: graph.placeholder(argument.name) for argument in node.all_input_nodes}
    for argument, copy in inputs.items():
        copy.meta["val"] = argument.meta["val"]
    result = graph.call_function(node.target, *map_arg((node.args, node.kwargs), inputs.__getitem__))
    values = result.meta["val"] = node.meta["val"]
    if isinstance(values, torch.Tensor):
        graph.output((result,))
    else:
        items = [graph.call_function(operator.getitem, (result, index)) for index in range(len(values))]
        for item, value in zip(items, values, strict=True):
            item.meta["val"] = value
        graph.output(tuple(items))
    return graph
