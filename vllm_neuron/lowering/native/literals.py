"""Constants, kept out of torch-mlir's sight: what it computes from them at compile time is often wrong.

(Two is less than one there, and two plus minus three is 1.8e19.) Tensors of one repeated number go through it as
inputs, and become constants again in StableHLO.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from vllm_neuron.lowering.shared.indices import call
from vllm_neuron.lowering.stablehlo.builders import element_of, shape_of, splat

_aten = torch.ops.aten

# Operators that make a tensor of one number, and how to read the number off a call. What is empty may hold anything.
_NUMBERS: dict[Any, Callable[[Node], Any]] = {
    _aten.full.default: lambda node: node.args[1],
    _aten.full_like.default: lambda node: node.args[1],
    _aten.new_full.default: lambda node: node.args[2],
    _aten.scalar_tensor.default: lambda node: node.args[0],
    **dict.fromkeys((_aten.ones.default, _aten.ones_like.default, _aten.new_ones.default), lambda node: 1),
    **dict.fromkeys((_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default), lambda node: 0),
    **dict.fromkeys((_aten.empty.memory_format, _aten.empty_like.default, _aten.new_empty.default), lambda node: 0),
    **dict.fromkeys((_aten.empty_strided.default, _aten.empty_permuted.default), lambda node: 0),
}
# IREE 3.13 takes no constant of unsigned bytes, which truth values are to torch-mlir as well; of two constants of
# 16-bit floats in one graph it gives the second one the wrong type.
_WIDENED = {
    torch.bool: torch.int32,
    torch.uint8: torch.int32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}


def hide_literals(graph: Graph) -> list[float]:
    """Turn constants of one number into additional placeholders, at the end; the numbers, in their order.

    Other literals get one ``get_attr`` for each use, because torch-mlir's importer takes no second use.
    """
    numbers: list[float] = []
    hidden: dict[Any, Node] = {}
    body = next(node for node in graph.nodes if node.op != "placeholder")
    for node in list(graph.nodes):
        number = _number(node)
        if number is None:
            continue
        value = node.meta["val"]
        key = (repr(number), value.dtype, tuple(value.shape))
        if key not in hidden:
            with graph.inserting_before(body):
                hidden[key] = graph.placeholder(f"number{len(numbers)}")
            hidden[key].meta["val"] = value
            numbers.append(number)
        if node is body:
            body = node.next
        node.replace_all_uses_with(hidden[key])
        graph.erase_node(node)
    _repeat_literals(graph)
    return numbers


def _number(node: Node) -> float | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    # torch-mlir has no constant of unsigned bytes for no elements either.
    if node.target in _NUMBERS and (value.numel() or value.dtype == torch.uint8):
        return _of_dtype(_NUMBERS[node.target](node), value.dtype)
    if node.op == "get_attr" and value.numel():
        literal = getattr(node.graph.owning_module, str(node.target)).reshape(-1)
        first = literal[0]
        # The two zeros are equal, and not the same.
        same = literal == first
        if value.dtype.is_floating_point:
            same &= literal.signbit() == first.signbit()
        return _of_dtype(first, value.dtype) if same.all() else None
    return None


def _of_dtype(number: Any, dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return float(number)
    return int(bool(number)) if dtype == torch.bool else int(number)


def _repeat_literals(graph: Graph) -> None:
    literals = [node for node in graph.nodes if node.op == "get_attr"]

    def repeat(node: Node) -> Node:
        if node not in literals:
            return node
        copy = graph.get_attr(str(node.target))
        copy.meta = node.meta
        dtype = node.meta["val"].dtype
        return widened(copy, dtype) if dtype in _WIDENED else copy

    def widened(copy: Node, dtype: torch.dtype) -> Node:
        owner, narrow = graph.owning_module, str(copy.target)
        copy.target = f"{narrow}_wide"
        setattr(owner, copy.target, getattr(owner, narrow).to(_WIDENED[dtype]))
        copy.meta = {"val": copy.meta["val"].to(_WIDENED[dtype])}
        return call(graph, torch.ops.prims.convert_element_type.default, copy, dtype)

    for node in [user for literal in literals for user in literal.users]:
        with graph.inserting_before(node):
            node.args, node.kwargs = map_arg((node.args, node.kwargs), repeat)
    for literal in literals:
        graph.erase_node(literal)


def restore_literals(module: Any, numbers: Sequence[float]) -> None:
    """Make constants of the last ``len(numbers)`` arguments of ``main``, in a StableHLO module."""
    from torch_mlir import ir

    function = module.body.operations[0].operation
    block = function.regions[0].blocks[0]
    first = len(block.arguments) - len(numbers)
    with module.context, ir.Location.unknown():
        with ir.InsertionPoint.at_block_begin(block):
            for argument, number in zip(list(block.arguments)[first:], numbers, strict=True):
                constant = splat(shape_of(argument), element_of(argument), number)
                argument.replace_all_uses_with(constant)
        for index in reversed(range(first, first + len(numbers))):
            block.erase_argument(index)
        results = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value).results
        inputs = [argument.type for argument in block.arguments]
        function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(inputs, results))
