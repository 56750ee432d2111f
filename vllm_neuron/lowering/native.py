"""From a canonical graph to StableHLO, by torch-mlir."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes

from vllm_neuron.errors import UnsupportedOpError
from vllm_neuron.lowering import passes, protection, stablehlo
from vllm_neuron.lowering.canonical import CanonicalGraph, tensor_spec
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
    # Dynamo compiles while its own fake mode is active.
    with _disable_current_modes():
        _refuse_complex(graph)
        module = _import(passes.prepare(graph.graph_module))
    for pipeline in (_TORCH_BACKEND, _STABLEHLO, _SIMPLIFY):
        _run(module, pipeline)
    stablehlo.rewrite(module)
    _run(module, _CLEAN)
    protection.protect(module, graph.abi.aliases)
    text = module.operation.get_asm(enable_debug_info=False)
    return LoweredModule("stablehlo", text.encode(), graph.abi)


def _refuse_complex(graph: CanonicalGraph) -> None:
    for node in graph.graph_module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype.is_complex:
            name = passes.describe(node) if node.op == "call_function" else "an input"
            raise UnsupportedOpError(
                f"{name} is {tensor_spec(node)}: complex numbers are not supported; compute with "
                "real and imaginary parts"
            )


def _import(gm: GraphModule) -> Any:
    from torch_mlir import ir
    from torch_mlir.dialects import torch as torch_dialect
    from torch_mlir.extras.fx_importer import FxImporter

    context = ir.Context()
    torch_dialect.register_dialect(context)
    importer = FxImporter(context=context)
    try:
        importer.import_stateless_graph(gm.graph, func_name="main")
    except (AssertionError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedOpError(f"the graph can't be lowered to StableHLO: {_first_line(error)}") from error
    return importer.module


def _run(module: Any, pipeline: str) -> None:
    from torch_mlir import ir
    from torch_mlir.passmanager import PassManager

    try:
        with module.context:
            PassManager.parse(pipeline).run(module.operation)
    except ir.MLIRError as error:
        # An argument that is left over is named instead of the operator that needs it.
        left = [str(op) for op in stablehlo.walk(module) if op.name.startswith(("torch.aten.", "torch.operator"))]
        messages = [*(diagnostic.message for diagnostic in error.error_diagnostics), *left]
        readable = [text for text in map(_readable, messages) if text and not text.startswith("torch.constant")]
        raise UnsupportedOpError(readable[0] if readable else _first_line(error)) from error


_OPERATION = re.compile(r"(?:\"torch\.operator\"|\"?(?P<op>torch\.\w+\.[\w.]+)\"?).*?:\s*(?P<types>\(.*)", re.DOTALL)
_OPERATOR_NAME = re.compile(r'name = "(?P<op>[^"]+)"')
_TENSOR = re.compile(r"!torch\.vtensor<\[(?P<shape>[\d,]*)\],(?P<element>[^>]+>?)>")


def _readable(message: str) -> str:
    """The operator and the types in one of torch-mlir's messages, in a line; empty if it names none."""
    operation = _OPERATION.search(message)
    name = _OPERATOR_NAME.search(message) or operation
    if operation is None or name is None or not name["op"]:
        return ""
    types = _TENSOR.sub(lambda tensor: f"{tensor['element']}[{tensor['shape']}]", operation["types"].splitlines()[0])
    return f"{name['op']}: no lowering to StableHLO for {types.replace('!torch.', '')}"


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
