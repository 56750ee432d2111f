"""A canonical graph, run by an interpreter whose values are JAX's, and the HLO module that JAX makes of the run."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core
import torch
from jax import lax
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from vllm_neuron.errors import UnsupportedOpError
from vllm_neuron.lowering.canonical import CanonicalGraph
from vllm_neuron.lowering.shared import passes
from vllm_neuron.lowering.xla import elementwise, indexing, products, reductions, shapes
from vllm_neuron.lowering.xla.call import Array, Call, Operator, jax_dtype, literal
from vllm_neuron.lowering.xla.proto import without_module_id

TABLE: dict[OpOverload, Operator] = {
    **elementwise.TABLE,
    **shapes.TABLE,
    **indexing.TABLE,
    **reductions.TABLE,
    **products.TABLE,
}


def lower_to_hlo(graph: CanonicalGraph) -> bytes:
    """A serialized ``HloModuleProto``. Leaves JAX's settings in the process as they are."""
    from jaxlib import _jax

    text = _stablehlo(graph)
    computation = _jax.mlir.mlir_module_to_xla_computation(text, use_tuple_args=False, return_tuple=True)
    return without_module_id(computation.as_serialized_hlo_module_proto())


def _stablehlo(graph: CanonicalGraph) -> str:
    shaped: Any = jax.ShapeDtypeStruct
    inputs = [shaped(spec.shape, jax_dtype(getattr(torch, spec.dtype))) for spec in graph.abi.inputs]

    with _disable_current_modes():
        prepared = passes.prepare(graph.graph_module)

    def main(*values: Array) -> tuple[Array, ...]:
        return _run(graph, prepared, values)

    # Without inner jits there is one function, in one piece.
    with _disable_current_modes(), jax.enable_x64(True):
        with jax.disable_jit():
            traced = jax.make_jaxpr(main)(*inputs)
        function = jax.extend.core.jaxpr_as_fun(traced)
        function.__name__ = "main"
        jitted = jax.jit(function, donate_argnums=graph.abi.aliases, keep_unused=True)
        text: str = jitted.trace(*inputs).lower(lowering_platforms=("cpu",)).as_text()
    return text


def _run(graph: CanonicalGraph, prepared: Graph, inputs: Sequence[Array]) -> tuple[Array, ...]:
    values: dict[Node, Any] = {}
    pending = iter(inputs)
    for node in prepared.nodes:
        if node.op == "placeholder":
            values[node] = next(pending)
        elif node.op == "get_attr":
            values[node] = literal(getattr(graph.graph_module, str(node.target)))
        elif node.op == "output":
            return tuple(values[result] for result in node.args[0])
        else:
            values[node] = _result(node, map_arg((node.args, node.kwargs), values.__getitem__))
    raise AssertionError("a graph ends in its output")


def _result(node: Node, arguments: tuple[Any, Any]) -> Any:
    args, kwargs = arguments
    if node.target is operator.getitem:
        return args[0][args[1]]
    call = Call(node)
    run = TABLE.get(node.target)  # type: ignore[call-overload]
    if run is None:
        raise call.unsupported()
    try:
        return _as_captured(node.meta["val"], run(call, *args, **_meaningful(kwargs)))
    except (ArithmeticError, AssertionError, LookupError, NotImplementedError, TypeError, ValueError) as error:
        if isinstance(error, UnsupportedOpError):
            raise
        # A form of the operator that its function, or JAX, does not take.
        raise call.unsupported(next(iter(str(error).splitlines()), type(error).__name__)) from error


def _meaningful(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments without those whose effect is in the captured result already."""
    return {name: value for name, value in kwargs.items() if name not in ("dtype", "device", "memory_format")}


def _as_captured(expected: Any, found: Any) -> Any:
    """The result in the dtype that torch gives it."""
    if isinstance(expected, torch.Tensor):
        assert found.shape == tuple(expected.shape), f"{found.shape} for {tuple(expected.shape)}"
        return lax.convert_element_type(found, jax_dtype(expected.dtype))
    return [_as_captured(value, result) for value, result in zip(expected, found, strict=False)]
