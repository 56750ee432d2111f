"""From a canonical graph to StableHLO, by torch-mlir."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

from vllm_neuron.errors import UnsupportedOpError
from vllm_neuron.lowering import passes, protection, stablehlo
from vllm_neuron.lowering.canonical import CanonicalGraph
from vllm_neuron.lowering.module import LoweredModule

_TORCH_BACKEND = (
    "builtin.module(func.func(torch-match-quantized-custom-ops),"
    "torchdynamo-export-to-torch-backend-pipeline{ extra-library=})"
)
_STABLEHLO = "builtin.module(torch-backend-to-stablehlo-backend-pipeline{allow-non-finites=true})"
_SIMPLIFY = "builtin.module(func.func(stablehlo-aggressive-simplification))"
_CLEAN = "builtin.module(func.func(stablehlo-aggressive-simplification),canonicalize,cse,symbol-dce,strip-debuginfo)"


def lower(graph: CanonicalGraph) -> LoweredModule:
    """StableHLO text for ``graph``, with ``tf.aliasing_output`` on the inputs that are written in place.

    The same graph gives the same bytes in every process, under every hash seed and in every folder.
    Raises :class:`UnsupportedOpError`, naming the operator and its shapes, for what can't be lowered.
    """
    _check_boundary(graph)
    module = _import(passes.prepare(graph.graph_module))
    for pipeline in (_TORCH_BACKEND, _STABLEHLO, _SIMPLIFY):
        _run(module, pipeline)
    stablehlo.rewrite(module)
    _run(module, _CLEAN)
    protection.protect(module, graph.abi.aliases)
    text = module.operation.get_asm(enable_debug_info=False)
    return LoweredModule("stablehlo", text.encode(), graph.abi)


def _check_boundary(graph: CanonicalGraph) -> None:
    for kind, specs in (("input", graph.abi.inputs), ("output", graph.abi.outputs)):
        for spec in specs:
            if spec.dtype.startswith("complex"):
                raise UnsupportedOpError(f"{kind} {spec}: complex numbers are not supported, use torch.view_as_real")


def _import(gm: GraphModule) -> Any:
    from torch_mlir import ir
    from torch_mlir.dialects import torch as torch_dialect
    from torch_mlir.extras.fx_importer import FxImporter

    context = ir.Context()
    torch_dialect.register_dialect(context)
    importer = FxImporter(context=context)
    importer.import_stateless_graph(gm.graph, func_name="main")
    return importer.module


def _run(module: Any, pipeline: str) -> None:
    from torch_mlir.passmanager import PassManager

    with module.context:
        PassManager.parse(pipeline).run(module.operation)
