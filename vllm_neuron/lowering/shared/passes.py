"""Passes over a copy of the canonical graph, with which both routes start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from vllm_neuron.abi import TensorSpec
from vllm_neuron.errors import UnsupportedOpError
from vllm_neuron.lowering.shared.indices import bound_indices, call, writes_nothing
from vllm_neuron.lowering.shared.promotion import promote
from vllm_neuron.lowering.shared.strided import replace_strided

_aten = torch.ops.aten


def prepare(gm: GraphModule) -> Graph:
    """A copy of ``gm``'s graph, with explicit dtypes, without masks and strides, and with every index in range.

    Its literals stay with ``gm``. Raises :class:`UnsupportedOpError` for writes through a mask that have no static
    form, and for views that :func:`replace_strided` can't express.
    """
    graph = Graph(owning_module=gm)
    graph.output(graph.graph_copy(gm.graph, {}))
    promote(graph)
    for node in list(graph.nodes):
        if node.op == "call_function":
            if _is_empty(node):
                _replace_empty(graph, node)
            elif writes_nothing(node):
                replace(graph, node, node.args[0])
            elif node.target in _REPLACEMENTS:
                _REPLACEMENTS[node.target](graph, node)
    bound_indices(graph)
    return graph


def describe(node: Node) -> str:
    """An operator call as a message shows it: ``aten.mm.default(float32[4,8], float32[8,2])``."""
    return f"{node.target}({', '.join(_describe_argument(arg) for arg in (*node.args, *node.kwargs.values()))})"


def _describe_argument(arg: Any) -> str:
    value = arg.meta.get("val") if isinstance(arg, Node) else None
    if isinstance(value, torch.Tensor):
        return str(TensorSpec.of(value))
    if isinstance(arg, list | tuple):
        return f"[{', '.join(map(_describe_argument, arg))}]"
    return str(arg)


def _is_empty(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not value.numel()


def _replace_empty(graph: Graph, node: Node) -> None:
    """Nothing has to be computed for no elements, and compilers take few operators for them."""
    value = node.meta["val"]
    options = {"mode": value.fake_mode, "dtype": value.dtype, "device": torch.device("cpu")}
    with graph.inserting_before(node):
        result = call(graph, _aten.full.default, list(value.shape), 0, **options)
    replace(graph, node, result)


def replace(graph: Graph, old: Node, new: Any) -> None:
    """Let ``new`` stand wherever ``old`` is used, and remove that."""
    old.replace_all_uses_with(new)
    graph.erase_node(old)


def _replace_mask(graph: Graph, node: Node) -> None:
    """``x[mask] = value`` with one value for all selected elements is ``where(mask, value, x)``."""
    arguments: list[Any] = list(node.args)
    base, indices, value, *accumulate = arguments
    masks = [index for index in indices if index is not None and index.meta["val"].dtype == torch.bool]
    if not masks:
        return
    mask, trailing = masks[0], base.meta["val"].shape[masks[0].meta["val"].dim() :]
    # A value of more dimensions than the trailing ones has an element for each selected place.
    single = value.meta["val"].numel() == 1 or value.meta["val"].dim() <= len(trailing)
    if len(indices) > 1 or any(accumulate) or not single:
        raise UnsupportedOpError(
            f"{describe(node)}: a write through a mask needs one value for all selected elements; use torch.where"
        )
    with graph.inserting_before(node):
        wide = call(graph, _aten.view.default, mask, [*mask.meta["val"].shape, *[1] * len(trailing)])
        if value.meta["val"].dim() > len(trailing):
            value = call(graph, _aten.view.default, value, [])
        result = call(graph, _aten.where.self, wide, value, base)
    replace(graph, node, result)


_REPLACEMENTS: dict[Any, Callable[[Graph, Node], None]] = {
    _aten.index_put.default: _replace_mask,
    _aten._unsafe_index_put.default: _replace_mask,
    _aten.as_strided.default: replace_strided,
    _aten.as_strided_scatter.default: replace_strided,
}
