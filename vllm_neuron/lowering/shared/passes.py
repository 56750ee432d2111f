"""Passes over a copy of the canonical graph, before torch-mlir sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from vllm_neuron.abi import TensorSpec
from vllm_neuron.errors import UnsupportedOpError
from vllm_neuron.lowering.shared.indices import call, guard_indices, writes_nothing
from vllm_neuron.lowering.shared.promotion import promote
from vllm_neuron.lowering.shared.strided import replace_strided

_aten = torch.ops.aten
_PRIMS_CONVERT = torch.ops.prims.convert_element_type.default


def prepare(gm: GraphModule) -> Graph:
    """A copy of ``gm``'s graph, ready for import: every index in range, and nothing that torch-mlir gets wrong.

    Its literals stay with ``gm``. Raises :class:`UnsupportedOpError` for random numbers, for functions that compilers
    have of 32-bit floats only, and for writes through a mask that have no static form.
    """
    graph = Graph(owning_module=gm)
    graph.output(graph.graph_copy(gm.graph, {}))
    promote(graph)
    for node in list(graph.nodes):
        if node.op == "call_function":
            _refuse_random(node)
            _refuse_double(node)
            if _is_empty(node):
                _replace_empty(graph, node)
            elif writes_nothing(node):
                _replace(graph, node, node.args[0])
            elif node.target in _REPLACEMENTS:
                _REPLACEMENTS[node.target](graph, node)
    guard_indices(graph)
    return graph


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


def _is_empty(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not value.numel()


def _replace_empty(graph: Graph, node: Node) -> None:
    """Nothing has to be computed for no elements, and torch-mlir lowers few operators for them."""
    value = node.meta["val"]
    options = {"mode": value.fake_mode, "dtype": value.dtype, "device": torch.device("cpu")}
    with graph.inserting_before(node):
        result = call(graph, _aten.full.default, list(value.shape), 0, **options)
    _replace(graph, node, result)


def _refuse_random(node: Node) -> None:
    if isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
        raise UnsupportedOpError(
            f"{describe(node)}: random numbers in a compiled graph would not follow torch's seed. Draw them outside "
            "and pass them in; for dropout, call model.eval()"
        )


def _refuse_double(node: Node) -> None:
    value = node.meta.get("val")
    if node.target in _NOT_IN_64_BITS and isinstance(value, torch.Tensor) and value.dtype == torch.float64:
        raise UnsupportedOpError(f"{describe(node)}: IREE has no such function of 64-bit floats. Use 32 bits")


def _replace(graph: Graph, old: Node, new: Any) -> None:
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
    _replace(graph, node, result)


def _replace_equality(graph: Graph, node: Node) -> None:
    """torch-mlir takes ``x == x`` for true, whether or not there is a NaN."""
    arguments: list[Any] = list(node.args)
    if arguments[0].meta["val"].dtype.is_floating_point:
        with graph.inserting_before(node):
            result = call(graph, _aten.logical_not.default, call(graph, _aten.ne.Tensor, *arguments))
        _replace(graph, node, result)


def _replace_sum_of_truths(graph: Graph, node: Node) -> None:
    """torch-mlir adds single bits, so that two truths make a falsehood."""
    if node.meta["val"].dtype == torch.bool:
        with graph.inserting_before(node):
            result = call(graph, _aten.logical_or.default, *node.args)
        _replace(graph, node, result)


def _replace_shift(graph: Graph, node: Node) -> None:
    """torch-mlir ends the process on a shift that broadcasts, and shifts bytes right as if they had a sign."""
    value, operands = node.meta["val"], [node.args[0], node.args[1]]
    unsigned = value.dtype == torch.uint8 and node.target is _aten.bitwise_right_shift.Tensor
    with graph.inserting_before(node):
        for index, operand in enumerate(operands):
            if isinstance(operand, Node) and operand.meta["val"].shape != value.shape:
                operands[index] = call(graph, _aten.expand.default, operand, list(value.shape))
        if unsigned:
            wide = [call(graph, _PRIMS_CONVERT, operand, torch.int32) for operand in operands]
            shifted = call(graph, _aten.bitwise_right_shift.Tensor, *wide)
            _replace(graph, node, call(graph, _PRIMS_CONVERT, shifted, torch.uint8))
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
        _replace(graph, node, base)


def _slicing(dim: Any = 0, start: Any = None, end: Any = None, step: Any = 1) -> tuple[Any, Any, Any, Any]:
    return dim, start, end, step


_NOT_IN_64_BITS = (
    _aten.sin.default, _aten.cos.default, _aten.tan.default, _aten.tanh.default, _aten.asin.default,
    _aten.acos.default, _aten.atan.default, _aten.atan2.default,
)  # fmt: skip

_REPLACEMENTS: dict[Any, Callable[[Graph, Node], None]] = {
    _aten.index_put.default: _replace_mask,
    _aten._unsafe_index_put.default: _replace_mask,
    _aten.as_strided.default: replace_strided,
    _aten.as_strided_scatter.default: replace_strided,
    _aten.slice_scatter.default: _close_slice,
    _aten.eq.Tensor: _replace_equality,
    _aten.add.Tensor: _replace_sum_of_truths,
    _aten.bitwise_left_shift.Tensor: _replace_shift,
    _aten.bitwise_right_shift.Tensor: _replace_shift,
}
