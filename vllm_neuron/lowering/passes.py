"""Passes over a copy of the canonical graph, before torch-mlir sees it."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from vllm_neuron.abi import TensorSpec
from vllm_neuron.errors import UnsupportedOpError
from vllm_neuron.lowering.indices import call, guard_indices
from vllm_neuron.lowering.strided import replace_strided

_aten = torch.ops.aten
_PRIMS_CONVERT = torch.ops.prims.convert_element_type.default


def prepare(gm: GraphModule) -> GraphModule:
    """A copy of ``gm``, ready for import: every index within its tensor, and nothing that torch-mlir gets wrong.

    Raises :class:`UnsupportedOpError` for random numbers and for writes through a mask that have no static form.
    """
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    copy = GraphModule(gm, graph)
    for node in list(graph.nodes):
        _refuse_random(node)
        if node.target in (_aten.index_put.default, _aten._unsafe_index_put.default):
            _replace_mask(graph, node)
        elif node.target in (_aten.as_strided.default, _aten.as_strided_scatter.default):
            replace_strided(graph, node)
        elif node.target is _aten.bitwise_right_shift.Tensor and node.meta["val"].dtype == torch.uint8:
            _widen(graph, node)
        elif node.target is _aten.add.Tensor and node.meta["val"].dtype == torch.bool:
            # torch-mlir adds single bits, so that two truths make a falsehood.
            node.target, node.args, node.kwargs = _aten.logical_or.default, node.args[:2], {}
    guard_indices(graph)
    return copy


def _widen(graph: Graph, node: Node) -> None:
    """torch-mlir's right shift repeats the highest bit, as if it were a sign."""
    with graph.inserting_before(node):
        wide = [call(graph, _PRIMS_CONVERT, argument, torch.int32) for argument in node.args]
        shifted = call(graph, _aten.bitwise_right_shift.Tensor, *wide)
        result = call(graph, _PRIMS_CONVERT, shifted, torch.uint8)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def describe(node: Node) -> str:
    """An operator call as a message shows it: ``aten.mm.default(float32[4,8], float32[8,2])``."""
    return f"{node.target}({', '.join(_describe_argument(arg) for arg in (*node.args, *node.kwargs.values()))})"


def _describe_argument(arg: Any) -> str:
    value = arg.meta.get("val") if isinstance(arg, Node) else None
    if isinstance(value, torch.Tensor):
        return str(TensorSpec(str(value.dtype).removeprefix("torch."), tuple(value.shape)))
    if isinstance(arg, list | tuple):
        return f"[{', '.join(map(_describe_argument, arg))}]"
    return str(arg)


def _refuse_random(node: Node) -> None:
    if isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
        raise UnsupportedOpError(
            f"{describe(node)}: random numbers in a compiled graph would not follow torch's seed. Draw them outside "
            "and pass them in; for dropout, call model.eval()"
        )


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
    node.replace_all_uses_with(result)
    graph.erase_node(node)
