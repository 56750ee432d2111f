"""Indices as torch means them: negative ones count from the end, and none leaves its tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_arg

_aten = torch.ops.aten

# Operators that take (tensor, dim, index, ...).
_ALONG_DIM = frozenset(
    {
        _aten.gather.default,
        _aten.index_select.default,
        _aten.index_add.default,
        _aten.index_copy.default,
        _aten.index_fill.int_Scalar,
        _aten.index_fill.int_Tensor,
        _aten.index_reduce.default,
        _aten.scatter.src,
        _aten.scatter.value,
        _aten.scatter.reduce,
        _aten.scatter.value_reduce,
        _aten.scatter_add.default,
        _aten.scatter_reduce.two,
    }
)
# Operators that take (tensor, index, ...): one index over the rows, or over all elements, or one per dimension.
_ROWS = frozenset({_aten.embedding.default})
_FLAT = frozenset({_aten.take.default, _aten.put.default})
_PER_DIM = frozenset(
    {_aten.index.Tensor, _aten._unsafe_index.Tensor, _aten.index_put.default, _aten._unsafe_index_put.default}
)


def writes_nothing(node: Node) -> bool:
    """Whether ``node`` writes to no place of its first argument: for such a scatter IREE's compiler divides by zero.

    Reads from no place have no elements.
    """
    indexed = node.target in _ALONG_DIM | _FLAT | _PER_DIM
    return indexed and not all(argument.meta["val"].numel() for argument in node.all_input_nodes[1:])


def bound_indices(graph: Graph) -> None:
    """Count negative indices from the end and clamp the rest, in place.

    StableHLO leaves both undefined, and on a CPU they read and write memory that belongs to others. Where torch
    would raise an error for an index out of range, the nearest element is used.
    """
    bounded: dict[tuple[Node, int], Node] = {}

    def bound(node: Node, index: Any, size: int) -> Any:
        if not isinstance(index, Node) or index.meta["val"].dtype == torch.bool or size == 0:
            return index
        if (index, size) not in bounded:
            with graph.inserting_before(node):
                bounded[index, size] = _in_range(graph, index, size)
        return bounded[index, size]

    for node in list(graph.nodes):
        args = list(node.args)
        if node.target in _PER_DIM:
            shape = args[0].meta["val"].shape
            args[1] = [bound(node, index, shape[dim]) for dim, index in enumerate(args[1])]
        elif node.target in _ROWS:
            args[1] = bound(node, args[1], args[0].meta["val"].shape[0])
        elif node.target in _FLAT:
            args[1] = bound(node, args[1], args[0].meta["val"].numel())
        elif node.target in _ALONG_DIM:
            shape = args[0].meta["val"].shape
            args[2] = bound(node, args[2], shape[args[1]] if shape else 1)
        node.args = tuple(args)


def _in_range(graph: Graph, index: Node, size: int) -> Node:
    negative = call(graph, _aten.lt.Scalar, index, 0)
    wrapped = call(graph, _aten.where.self, negative, call(graph, _aten.add.Tensor, index, size), index)
    return call(graph, _aten.clamp.default, wrapped, 0, size - 1)


def call(graph: Graph, target: OpOverload, *args: Any, mode: FakeTensorMode | None = None, **kwargs: Any) -> Node:
    """Add an operator call at the graph's insertion point, with the metadata that import needs.

    ``mode`` is needed where no argument is a tensor.
    """
    node = graph.call_function(target, args, kwargs)
    values = map_arg(args, lambda arg: arg.meta["val"])
    with mode or node.all_input_nodes[0].meta["val"].fake_mode:
        node.meta["val"] = target(*values, **kwargs)
    return node
