"""Graphs of dynamic shape: one static graph for each shape that they are called with."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch


def is_dynamic(value: Any) -> bool:
    """Whether an example input stands for more than one shape or number."""
    if isinstance(value, torch.Tensor):
        return any(not isinstance(size, int) for size in (*value.shape, *value.stride(), value.storage_offset()))
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


class Specializer:
    """A callable that compiles for the inputs it is called with, once per combination of shapes, strides and numbers.

    ``compile_static`` makes the callable for concrete inputs. Dynamo's own guards decide what reaches this
    object, so the number of combinations is bounded only by the caller.
    """

    def __init__(self, compile_static: Callable[[Sequence[Any]], Callable[..., Any]]) -> None:
        self._compile_static = compile_static
        self._compiled: dict[Hashable, Callable[..., Any]] = {}

    def __call__(self, *inputs: Any) -> Any:
        signature = tuple(map(_signature, inputs))
        compiled = self._compiled.get(signature)
        if compiled is None:
            compiled = self._compiled[signature] = self._compile_static(inputs)
        return compiled(*inputs)


def _signature(value: Any) -> Hashable:
    """What a static graph depends on in an input."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.requires_grad
    return type(value), value
