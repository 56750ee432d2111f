"""Graphs of dynamic shape: one static graph for each shape that they are called with."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node


def is_dynamic(value: Any) -> bool:
    """Whether an example input stands for more than one shape or number."""
    if isinstance(value, torch.Tensor):
        return any(not isinstance(size, int) for size in (*value.shape, *value.stride(), value.storage_offset()))
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


class Specializer:
    """A callable that compiles for the inputs it is called with, once per combination of shapes, strides and numbers.

    ``compile_static`` makes the callable for concrete inputs. Dynamo's own guards decide what reaches this
    object, so the number of combinations is bounded only by the caller. Threads may call it together. The inputs at
    the positions ``floats`` are tensors that stand for a Python number, and become one.
    """

    def __init__(
        self, compile_static: Callable[[Sequence[Any]], Callable[..., Any]], floats: Sequence[int] = ()
    ) -> None:
        self._compile_static = compile_static
        self._floats = floats
        self._compiled: dict[Hashable, Callable[..., Any]] = {}

    def __call__(self, *given: Any) -> Any:
        inputs = list(given)
        for position in self._floats:
            inputs[position] = inputs[position].item()
        signature = tuple(map(_signature, inputs))
        compiled = self._compiled.get(signature)
        if compiled is None:
            compiled = self._specialize(signature, inputs)
        return compiled(*inputs)

    def _specialize(self, signature: Hashable, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._dynamo.convert_frame import compile_lock

        # Tracing patches torch for the whole process, which compiles one graph at a time for that reason; and a thread
        # that calls a compiled function meanwhile takes the tracing for its own, unless torch is said to be compiling.
        with compile_lock, torch.compiler._compile_session_context():
            compiled = self._compiled.get(signature)
            if compiled is None:
                compiled = self._compiled[signature] = self._compile_static(inputs)
        return compiled


def _signature(value: Any) -> Hashable:
    """What a static graph depends on in an input."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.requires_grad
    if isinstance(value, float):
        return float, value.hex()  # Of which minus zero is another than zero.
    return type(value), value


def take_floats(gm: GraphModule) -> list[int]:
    """The positions of inputs that are Python floats to the user and tensors to Dynamo, after changing that.

    Dynamo reads their value with ``item``, which only its own tracing can follow. From here on ``gm`` takes the
    number itself.
    """
    positions = []
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        argument, reads = node.meta.get("grapharg"), list(node.users)
        stands_for_number = argument is not None and argument.pass_arg_as_tensor and not argument.is_tensor
        if stands_for_number and all(map(_is_read, reads)):
            positions.append(position)
            for read in reads:
                read.replace_all_uses_with(node)
                gm.graph.erase_node(read)
    gm.recompile()
    return positions


def _is_read(node: Node) -> bool:
    return node.op == "call_method" and node.target == "item"
