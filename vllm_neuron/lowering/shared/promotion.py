"""Type promotion made explicit: each elementwise operator gets tensors of the one dtype that torch computes it in.

torch-mlir follows other rules where a tensor without dimensions meets one of another dtype, and JAX its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from vllm_neuron.lowering.shared.half import HALF
from vllm_neuron.lowering.shared.indices import call

_aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default

# Of 16-bit floats, torch takes the second operand of these in 32 bits, as it is given, where it has no dimensions.
_FACTORS = frozenset({_aten.mul.Tensor, _aten.div.Tensor})


def promote(graph: Graph) -> None:
    """Convert the operands of every elementwise operator in ``graph`` to their common dtype, in place."""
    for node in list(graph.nodes):
        if isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags:
            _promote(graph, node)


def _promote(graph: Graph, node: Node) -> None:
    # The first argument of a choice is the condition, and that of a mask stays one.
    operands = [arg for arg in node.args[node.target is _aten.where.self :] if isinstance(arg, Node)]
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or len({operand.meta["val"].dtype for operand in operands}) < 2:
        return
    common = value.dtype if value.dtype != torch.bool else _compared_in(operands)
    wide = node.target in _FACTORS and common in HALF and not operands[1].meta["val"].dim()
    dtype = torch.float32 if wide else common
    with graph.inserting_before(node):
        converted = {one: _as(graph, one, dtype) for one in operands}
        arguments = [converted.get(arg, arg) if isinstance(arg, Node) else arg for arg in node.args]
        if wide:
            product = call(graph, node.target, *arguments)  # type: ignore[arg-type]
            node.replace_all_uses_with(call(graph, _CONVERT, product, common))
            graph.erase_node(node)
            return
    node.args = tuple(arguments)


def _compared_in(operands: list[Node]) -> torch.dtype:
    values: list[Any] = [operand.meta["val"] for operand in operands]
    return torch.result_type(values[0], values[1])


def _as(graph: Graph, operand: Node, dtype: torch.dtype) -> Node:
    return operand if operand.meta["val"].dtype == dtype else call(graph, _CONVERT, operand, dtype)
