"""Forms of ATen operators that torch-mlir gets wrong, as equal ones that it gets right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from vllm_neuron.lowering.shared.indices import call
from vllm_neuron.lowering.shared.passes import replace

_aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default


def replace_forms(graph: Graph) -> None:
    """Replace them in ``graph``, in place."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _REPLACEMENTS:
            _REPLACEMENTS[node.target](graph, node)


def _replace_equality(graph: Graph, node: Node) -> None:
    """torch-mlir takes ``x == x`` for true, whether or not there is a NaN."""
    arguments: list[Any] = list(node.args)
    if arguments[0].meta["val"].dtype.is_floating_point:
        with graph.inserting_before(node):
            result = call(graph, _aten.logical_not.default, call(graph, _aten.ne.Tensor, *arguments))
        replace(graph, node, result)


def _replace_sum_of_truths(graph: Graph, node: Node) -> None:
    """torch-mlir adds single bits, so that two truths make a falsehood."""
    if node.meta["val"].dtype == torch.bool:
        with graph.inserting_before(node):
            result = call(graph, _aten.logical_or.default, *node.args)
        replace(graph, node, result)


def _replace_shift(graph: Graph, node: Node) -> None:
    """torch-mlir ends the process on a shift that broadcasts, and shifts bytes right as if they had a sign."""
    value, operands = node.meta["val"], [node.args[0], node.args[1]]
    unsigned = value.dtype == torch.uint8 and node.target is _aten.bitwise_right_shift.Tensor
    with graph.inserting_before(node):
        for index, operand in enumerate(operands):
            if isinstance(operand, Node) and operand.meta["val"].shape != value.shape:
                operands[index] = call(graph, _aten.expand.default, operand, list(value.shape))
        if unsigned:
            wide = [call(graph, _CONVERT, operand, torch.int32) for operand in operands]
            shifted = call(graph, _aten.bitwise_right_shift.Tensor, *wide)
            replace(graph, node, call(graph, _CONVERT, shifted, torch.uint8))
            return
    node.args = tuple(operands)


def _close_slice(graph: Graph, node: Node) -> None:
    """torch-mlir counts, in steps, as far as the end that it is given, which for ``x[::2]`` is the largest integer."""
    base, source, *slicing = node.args
    assert isinstance(base, Node)
    dim, start, end, step = _slicing(*slicing, **node.kwargs)
    start, end, step = slice(start, end, step).indices(base.meta["val"].shape[dim])
    if start < end:
        node.args, node.kwargs = (base, source, dim, start, end, step), {}
    else:
        replace(graph, node, base)


def _slicing(dim: Any = 0, start: Any = None, end: Any = None, step: Any = 1) -> tuple[Any, Any, Any, Any]:
    return dim, start, end, step


_REPLACEMENTS: dict[Any, Callable[[Graph, Node], None]] = {
    _aten.slice_scatter.default: _close_slice,
    _aten.eq.Tensor: _replace_equality,
    _aten.add.Tensor: _replace_sum_of_truths,
    _aten.bitwise_left_shift.Tensor: _replace_shift,
    _aten.bitwise_right_shift.Tensor: _replace_shift,
}
