"""A captured graph with inputs, outputs and numbers that compilers take: carriers at its boundary, and real inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate, map_arg
from torch.utils._python_dispatch import _disable_current_modes

from vllm_neuron.errors import UnsupportedOpError
from vllm_neuron.lowering.decompositions.table import decomposition_table
from vllm_neuron.lowering.shared.carriers import carried, needs_carrier
from vllm_neuron.lowering.shared.complex import RULES, Complex
from vllm_neuron.lowering.shared.passes import describe


def with_carriers(gm: GraphModule) -> GraphModule:
    """``gm``, which is functional ATen, with carriers for its inputs and outputs, and without complex numbers.

    A graph that has no need of it is returned as it is. Raises :class:`UnsupportedOpError` for an operator that has no
    form in real numbers.
    """
    nodes = list(gm.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    ends = [*placeholders, *_outputs(gm)]
    if not (any(map(_is_complex, nodes)) or any(needs_carrier(_dtype(node)) for node in ends)):
        return gm
    values = [node.meta["val"] for node in placeholders]
    mode = next(value.fake_mode for node in nodes for value in _tensors(node) if hasattr(value, "fake_mode"))

    def run(*inputs: Any) -> list[Any]:
        return _run(gm, inputs)

    with _disable_current_modes(), torch.no_grad(), mode:
        inputs = [carried(value.contiguous()) if _is_carried(value) else value for value in values]
        return make_fx(run, tracing_mode="real", decomposition_table=decomposition_table())(*inputs)


def _outputs(gm: GraphModule) -> list[Node]:
    """The nodes among the outputs."""
    return [value for value in gm.graph.output_node().args[0] if isinstance(value, Node)]  # type: ignore[union-attr]


def _tensors(node: Node) -> list[Tensor]:
    found: list[Tensor] = []
    map_aggregate(node.meta.get("val"), lambda value: found.append(value) if isinstance(value, Tensor) else None)
    return found


def _dtype(node: Node) -> torch.dtype:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else torch.float32


def _is_complex(node: Node) -> bool:
    return any(value.is_complex() for value in _tensors(node))


def _is_carried(value: Any) -> bool:
    return isinstance(value, Tensor) and needs_carrier(value.dtype)


def _run(gm: GraphModule, inputs: Sequence[Any]) -> list[Any]:
    values: dict[Node, Any] = {}
    given: dict[Node, Any] = {}
    pending = iter(inputs)
    for node in gm.graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "placeholder":
            given[node] = next(pending)
            values[node] = _given(given[node], _dtype(node))
        elif node.op == "get_attr":
            literal = getattr(gm, str(node.target))
            values[node] = Complex(literal.real.clone(), literal.imag.clone()) if literal.is_complex() else literal
        elif node.op == "output":
            return [_taken(value) for value in args[0]]
        elif node.target is torch.ops.aten.copy_.default and needs_carrier(_dtype(node)):
            # To an input, since the graph is functional.
            given[node.args[0]].copy_(_taken(args[1]))
            values[node] = values[node.args[0]] = args[1]
        else:
            values[node] = _result(node, args, kwargs)
    raise AssertionError("a graph ends in its output")


def _given(value: Any, dtype: torch.dtype) -> Any:
    if dtype.is_complex:
        return Complex(value.select(-1, 0), value.select(-1, 1))
    return value.view(dtype) if needs_carrier(dtype) else value


def _taken(value: Any) -> Any:
    if isinstance(value, Complex):
        return torch.stack([value.real, value.imag], -1)
    return value.view(torch.uint8) if _is_carried(value) else value


def _result(node: Node, args: Any, kwargs: Any) -> Any:
    given: list[Any] = []
    map_aggregate((args, kwargs), given.append)
    if not (_is_complex(node) or any(isinstance(value, Complex) for value in given)):
        return node.target(*args, **kwargs)  # type: ignore[operator]
    rule = RULES.get(node.target)
    if rule is None:
        raise UnsupportedOpError(
            f"{describe(node)} has no form in real numbers here: use real and imaginary parts, torch.view_as_real"
        )
    return rule(*args, **kwargs)
