"""``as_strided`` in terms of values: StableHLO has no storage to look through."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from vllm_neuron.errors import UnsupportedOpError
from vllm_neuron.lowering.shared.indices import call

_aten = torch.ops.aten


def replace_strided(graph: Graph, node: Node) -> None:
    """Replace a call of ``as_strided`` or ``as_strided_scatter`` by slices, or by indices where it is no slice.

    AOTAutograd makes such calls for inputs that overlap. Raises :class:`UnsupportedOpError` if the tensor whose storage
    is looked through is not contiguous, or is written through a view.
    """
    arguments: list[Any] = list(node.args)
    scattered = node.target is _aten.as_strided_scatter.default
    source = arguments.pop(1) if scattered else None
    base, size, stride, *rest = arguments
    root = storage_root(base)
    offset = rest[0] if rest and rest[0] is not None else base.meta["val"].storage_offset()
    offset -= root.meta["val"].storage_offset()
    whole = base.meta["val"].is_contiguous() and base.meta["val"].numel() == root.meta["val"].numel()
    if not root.meta["val"].is_contiguous() or (scattered and not whole):
        raise UnsupportedOpError(f"{node.target} on a view that is not contiguous: use slices or indices instead")
    with graph.inserting_before(node):
        flat = call(graph, _aten.view.default, root, [-1])
        elements = _Elements(graph, flat, list(size), list(stride), offset)
        if source is None:
            result = elements.read()
        else:
            result = call(graph, _aten.view.default, elements.written(source), list(base.meta["val"].shape))
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def storage_root(node: Node) -> Node:
    """The tensor whose storage ``node`` is a view of, or the node itself."""
    while (viewed := _viewed(node)) is not None:
        node = viewed
    return node


def _viewed(node: Node) -> Node | None:
    """The tensor that ``node`` is a view of; None if it has storage of its own."""
    # An operator that gives several tensors is split into them afterwards: ``chunk``, ``unbind``.
    call: Any = node.args[0] if node.target is operator.getitem else node
    if not isinstance(call.target, OpOverload):
        return None
    returns = call.target._schema.returns
    # A list of tensors is one result, which speaks for all of them.
    index: Any = node.args[1] if call is not node and len(returns) > 1 else 0
    if not returns or returns[index].alias_info is None:
        return None
    return call.all_input_nodes[0]  # type: ignore[no-any-return]


class _Elements:
    """The elements of a flat tensor that a size, strides and an offset pick out."""

    def __init__(self, graph: Graph, flat: Node, size: list[int], stride: list[int], offset: int) -> None:
        self.graph, self.flat, self.size = graph, flat, size
        count = torch.Size(size).numel()
        self.range = (offset, offset + count)
        self.index: Node | None = None
        if count and not torch.empty_strided(size, stride, device="meta").is_contiguous():
            self.index = self._index(stride, offset)

    def _index(self, stride: list[int], offset: int) -> Node:
        mode = self.flat.meta["val"].fake_mode
        arange = _aten.arange.start_step
        index = call(
            self.graph, arange, offset, offset + 1, 1, mode=mode, dtype=torch.int64, device=torch.device("cpu")
        )
        for size, step in zip(self.size, stride, strict=True):
            steps = call(self.graph, arange, 0, size, 1, mode=mode, dtype=torch.int64, device=torch.device("cpu"))
            steps = call(self.graph, _aten.mul.Tensor, steps, step)
            index = call(self.graph, _aten.add.Tensor, call(self.graph, _aten.unsqueeze.default, index, -1), steps)
        return call(self.graph, _aten.view.default, index, [-1])

    def _range(self, start: int, end: int) -> Node:
        options = {"mode": self.flat.meta["val"].fake_mode, "dtype": torch.int64, "device": torch.device("cpu")}
        return call(self.graph, _aten.arange.start_step, start, end, 1, **options)

    def read(self) -> Node:
        if self.index is None:
            picked = call(self.graph, _aten.slice.Tensor, self.flat, 0, *self.range)
        else:
            picked = call(self.graph, _aten.index.Tensor, self.flat, [self.index])
        return call(self.graph, _aten.view.default, picked, self.size)

    def written(self, source: Node) -> Node:
        source = call(self.graph, _aten.reshape.default, source, [-1])
        if self.index is None:
            return call(self.graph, _aten.slice_scatter.default, self.flat, source, 0, *self.range)
        return call(self.graph, _aten.index_put.default, self.flat, [self.index], source)
