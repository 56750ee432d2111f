"""Canonical graphs and their text: equal programs give equal bytes, and what is not functional is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from vllm_neuron.abi import TensorSpec
from vllm_neuron.errors import CaptureError, UnsupportedOpError
from vllm_neuron.lowering.canonical import CanonicalGraph, canonicalize
from vllm_neuron.lowering.decompositions.table import decomposition_table
from vllm_neuron.lowering.native.lower import lower

NAMES = ["kv.10", "kv.9", "unused", "weight"]


def step(cache10: Tensor, cache9: Tensor, unused: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Two caches with a write as capture leaves it, and one result."""
    new = torch.ops.aten.add.Tensor(cache10, weight)
    dead = torch.ops.aten.mul.Tensor(unused, weight)
    assert dead.shape == new.shape
    other = torch.ops.aten.mul.Tensor(cache9, torch.zeros_like(weight) + 2)
    torch.ops.aten.copy_.default(cache10, new)
    torch.ops.aten.copy_.default(cache9, other)
    return (torch.ops.aten.detach.default(new + other),)


def trace(function: Callable[..., Any], *arguments: Tensor) -> GraphModule:
    module: GraphModule = make_fx(function, decomposition_table=decomposition_table())(*arguments)
    return module


def reordered(order: Sequence[int], make: Callable[[], Tensor] = lambda: torch.ones(2, 3)) -> CanonicalGraph:
    """The same program captured with its placeholders in another order."""

    def function(*arguments: Tensor) -> tuple[Tensor, ...]:
        in_place = dict(zip(order, arguments, strict=True))
        return step(*(in_place[index] for index in range(4)))

    return canonicalize(trace(function, *(make() for _ in order)), [NAMES[index] for index in order])


def test_inputs_are_sorted_unused_ones_dropped_and_mutated_ones_returned_first() -> None:
    graph = reordered([0, 1, 2, 3])
    assert graph.input_names == ("kv.9", "kv.10", "weight")
    assert graph.input_positions == (1, 0, 3)
    assert graph.abi.aliases == (0, 1)
    assert graph.abi.inputs == (TensorSpec("float32", (2, 3)),) * 3
    assert graph.abi.outputs == (TensorSpec("float32", (2, 3)),) * 3
    arguments = [torch.full((2, 3), 5.0), torch.full((2, 3), 7.0), torch.ones(2, 3)]
    new9, new10, total = graph.graph_module(*arguments)
    assert (new9[0, 0], new10[0, 0], total[0, 0]) == (10.0, 8.0, 18.0)
    assert arguments[0][0, 0] == 5.0


@pytest.mark.parametrize("order", [[3, 2, 1, 0], [2, 0, 3, 1]])
def test_order_of_placeholders_does_not_matter(order: list[int]) -> None:
    graph, other = reordered([0, 1, 2, 3]), reordered(order)
    assert graph.graph_module.code == other.graph_module.code
    assert (graph.input_names, graph.abi) == (other.input_names, other.abi)
    assert lower(graph) == lower(other)
    assert [order[position] for position in other.input_positions] == list(graph.input_positions)


def test_real_fake_and_meta_inputs_give_equal_bytes() -> None:
    mode = FakeTensorMode()

    def fake() -> Tensor:
        with mode:
            return torch.empty(2, 3)

    makers = [lambda: torch.ones(2, 3), fake, lambda: torch.empty(2, 3, device="meta")]
    modules = {lower(reordered([0, 1, 2, 3], make)).data for make in makers}
    assert len(modules) == 1


PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
import hashlib, random
import test_canonical
order = [0, 1, 2, 3]
random.shuffle(order)
print(hashlib.sha256(test_canonical.lower(test_canonical.reordered(order)).data).hexdigest())
"""


def test_bytes_are_equal_over_processes_hash_seeds_and_folders(tmp_path: Path) -> None:
    digests = set()
    for seed in ("0", "1", "777"):
        folder = tmp_path / seed
        folder.mkdir()
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PROGRAM.format(folder=str(Path(__file__).parent))]
        result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
        digests.add(result.stdout)
    assert len(digests) == 1


def test_text_has_no_locations() -> None:
    text = lower(reordered([0, 1, 2, 3])).data.decode()
    assert "loc(" not in text
    assert str(Path(__file__).parent) not in text


def scaled(values: list[float]) -> CanonicalGraph:
    return canonicalize(trace(lambda x: (x * torch.tensor(values),), torch.ones(2)), ["x"])


def test_values_of_literals_are_part_of_the_graph() -> None:
    assert lower(scaled([1.0, 2.0])) == lower(scaled([1.0, 2.0]))
    assert lower(scaled([1.0, 2.0])) != lower(scaled([1.0, 3.0]))


class TestRefusals:
    def test_names_must_be_unique_and_complete(self) -> None:
        module = trace(lambda x, y: (x + y,), torch.ones(2), torch.ones(2))
        for names in (["x"], ["x", "x"]):
            with pytest.raises(CaptureError, match="2 placeholders"):
                canonicalize(module, names)

    def test_in_place_operators(self) -> None:
        with pytest.raises(CaptureError, match=r"aten\.add_"):
            canonicalize(trace(lambda x: (x + 1).add_(1), torch.ones(2)), ["x"])

    def test_parameters_that_would_be_baked_in(self) -> None:
        weight = torch.nn.Parameter(torch.ones(2))
        with pytest.raises(CaptureError, match="lift it to an input"):
            canonicalize(trace(lambda x: (x * weight,), torch.ones(2)), ["x"])

    def test_effects_without_a_result(self) -> None:
        with pytest.raises(UnsupportedOpError, match="_print"):
            canonicalize(trace(lambda x: (torch.ops.aten._print("text"), x + 1)[1:], torch.ones(2)), ["x"])

    def test_outputs_that_are_no_tensors(self) -> None:
        module = trace(lambda x: (x + 1,), torch.ones(2))
        module.graph.output_node().args = ((*module.graph.output_node().args[0], None),)
        with pytest.raises(CaptureError, match="None is not a tensor"):
            canonicalize(module, ["x"])

    def test_overwriting_with_another_shape(self) -> None:
        module = trace(lambda x, y: (x.copy_(y),), torch.ones(2, 2), torch.ones(2))
        with pytest.raises(CaptureError, match="another shape or dtype"):
            canonicalize(module, ["x", "y"])
