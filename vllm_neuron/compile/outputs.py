"""What a compiled graph returns, in the shape that PyTorch would have given it: strides, views, constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from vllm_neuron.lowering.shared.strided import storage_root


@dataclass(frozen=True)
class Layout:
    """The dtype, the strides, and the offset in its storage, that PyTorch would have given a result.

    What comes after may depend on them: where a result is a view of an input, AOTAutograd makes the view that it
    returns from what it reads off the result.
    """

    dtype: torch.dtype
    strides: tuple[int, ...]
    offset: int

    def apply(self, result: torch.Tensor) -> torch.Tensor:
        """The same values, laid out so."""
        if (result.stride(), result.storage_offset()) == (self.strides, self.offset) or not result.numel():
            return result
        single = result[tuple(slice(1) if stride == 0 else slice(None) for stride in self.strides)]
        steps = zip(single.shape, self.strides, strict=True)
        storage = result.new_empty(self.offset + 1 + sum((size - 1) * stride for size, stride in steps))
        return storage.as_strided(single.shape, self.strides, self.offset).copy_(single).expand(result.shape)


@dataclass(frozen=True)
class View:
    """An output that is result ``index``, or a view of it."""

    index: int
    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, results: list[torch.Tensor]) -> torch.Tensor:
        """The output, given the results in their layouts."""
        result = results[self.index]
        if (result.shape, result.stride(), 0) == (self.size, self.strides, self.offset) or not result.numel():
            return result
        return result.as_strided(self.size, self.strides, self.offset)


def take_outputs(gm: GraphModule) -> tuple[list[Any], list[Layout]]:
    """Change the graph's outputs to the tensors that have to be computed.

    Returns the outputs that it had, each a :class:`View` or a constant, and the layouts of the new ones. Outputs that
    are views of one tensor stay so: then that tensor is computed, and they are made from it.
    """
    output = gm.graph.output_node()
    outputs: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    nodes = [node for node in outputs if isinstance(node, Node)]
    roots = [storage_root(node) for node in nodes]
    computed: list[Node] = []
    views: dict[Node, View] = {}
    for node, root in zip(nodes, roots, strict=True):
        shared = roots.count(root) > 1 and root.op == "call_function"
        source = root if shared and root.meta["val"].dtype == node.meta["val"].dtype else node
        if source not in computed:
            computed.append(source)
        value = node.meta["val"]
        offset = value.storage_offset() if source is root else 0
        views[node] = View(computed.index(source), tuple(value.shape), tuple(value.stride()), offset)
    output.args = (tuple(computed),)
    values = [node.meta["val"] for node in computed]
    layouts = [Layout(value.dtype, tuple(value.stride()), value.storage_offset()) for value in values]
    return [views[node] if isinstance(node, Node) else node for node in outputs], layouts
