"""Keeps arithmetic on many tensors in pieces that IREE's runtime can call."""

from __future__ import annotations

from typing import Any

from vllm_neuron.lowering.stablehlo.builders import build
from vllm_neuron.lowering.stablehlo.rewrites import walk

# IREE 3.13 joins arithmetic into one function of as many buffers as there are inputs, and its runtime hands over no
# more than 32. Some are left for results, and for what else may be joined.
_MOST_INPUTS = 20
_ARITHMETIC = frozenset(
    f"stablehlo.{name}"
    for name in (
        "add", "and", "broadcast_in_dim", "clamp", "compare", "convert", "divide", "maximum", "minimum", "multiply",
        "negate", "or", "power", "remainder", "reshape", "select", "subtract", "transpose", "xor",
    )
)  # fmt: skip


def split_wide(module: Any) -> None:
    """Put a barrier where an expression of single-use values has come to read more tensors than a call may.

    Nothing else reads what is before the barrier, so it does not matter that IREE takes the value behind it for other
    memory.
    """
    from torch_mlir import ir

    with module.context, ir.Location.unknown():
        read: dict[Any, set[Any]] = {}
        for operation in walk(module):
            if operation.name in _ARITHMETIC and len(operation.results) == 1:
                read[operation.result] = _split(operation, read)


def _split(operation: Any, read: dict[Any, set[Any]]) -> set[Any]:
    """The tensors that are read to compute the operation's result, after a barrier where they were too many."""
    from torch_mlir import ir

    parts = [_read_for(operand, read) for operand in operation.operands]
    while len(set().union(*parts)) > _MOST_INPUTS:
        index = max(range(len(parts)), key=lambda i: len(parts[i]))
        if len(parts[index]) <= 1:
            break
        value = operation.operands[index]
        with ir.InsertionPoint(operation):
            operation.operands[index] = build("stablehlo.optimization_barrier", [value.type], [value]).result
        parts[index] = {operation.operands[index]}
    return set().union(*parts)


def _read_for(value: Any, read: dict[Any, set[Any]]) -> set[Any]:
    if getattr(value.owner, "name", "") == "stablehlo.constant":
        return set()
    joined = value in read and len(list(value.uses)) == 1
    return read[value] if joined else {value}
