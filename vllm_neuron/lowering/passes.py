"""Passes over a copy of the canonical graph, before torch-mlir sees it."""

from __future__ import annotations

from torch.fx import Graph, GraphModule

from vllm_neuron.lowering.indices import guard_indices


def prepare(gm: GraphModule) -> GraphModule:
    """A copy of ``gm`` in which every index stays within its tensor, ready for import.

    Raises :class:`UnsupportedOpError` for random numbers.
    """
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    copy = GraphModule(gm, graph)
    guard_indices(copy.graph)
    return copy
