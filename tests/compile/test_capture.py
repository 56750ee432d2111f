"""Capture: sound graphs only, and the same bytes as Dynamo's route."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_neuron.abi import TensorSpec
from vllm_neuron.compile.capture import capture
from vllm_neuron.errors import CaptureError
from vllm_neuron.lowering.canonical import CanonicalGraph, canonicalize
from vllm_neuron.lowering.decompositions.table import decomposition_table
from vllm_neuron.lowering.native.lower import lower

SPECS = {
    "inputs.slots": TensorSpec("int64", (3,)),
    "inputs.x": TensorSpec("float32", (3, 8)),
    "kv.0": TensorSpec("float32", (16, 8)),
    "weights.10": TensorSpec("float32", (8, 8)),
    "weights.9": TensorSpec("float32", (8, 8)),
}

Inputs = dict[str, torch.Tensor]


def step(inputs: Inputs) -> torch.Tensor:
    """A cache write, a read of the whole cache, and two matrix products."""
    hidden = torch.nn.functional.silu(inputs["inputs.x"] @ inputs["weights.9"].t())
    inputs["kv.0"].index_put_((inputs["inputs.slots"],), hidden)
    scores = torch.softmax(hidden @ inputs["kv.0"].t(), -1)
    return (scores @ inputs["kv.0"]) @ inputs["weights.10"].t()


def captured(forward: Callable[[Inputs], torch.Tensor], mutated: tuple[str, ...] = ("kv.0",)) -> CanonicalGraph:
    return capture(forward, SPECS, mutated, FakeTensorMode(allow_non_fake_inputs=True))


def test_inputs_are_named_in_natural_order_and_the_cache_is_aliased() -> None:
    graph = captured(step)
    assert graph.input_names == ("inputs.slots", "inputs.x", "kv.0", "weights.9", "weights.10")
    assert graph.abi.aliases == (2,)
    assert [str(spec) for spec in graph.abi.outputs] == ["float32[16,8]", "float32[3,8]"]


def test_the_graph_computes_what_the_function_does() -> None:
    torch.manual_seed(0)
    graph = captured(step)
    values = {name: torch.randn(spec.shape) for name, spec in SPECS.items() if spec.dtype == "float32"}
    values["inputs.slots"] = torch.tensor([5, 0, 15])
    cache, logits = graph.graph_module(*(values[name].clone() for name in graph.input_names))
    expected = step(values)
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(cache, values["kv.0"])


def test_dynamo_and_capture_give_the_same_bytes() -> None:
    """The order in which Dynamo meets the inputs is another one; the canonical module is not."""
    modules = []

    def compiler(graph_module: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., object]:
        by_shape = {
            (8, 8): ["weights.9", "weights.10"],
            (3, 8): ["inputs.x"],
            (3,): ["inputs.slots"],
            (16, 8): ["kv.0"],
        }
        names = [by_shape[tuple(tensor.shape)].pop(0) for tensor in example_inputs]
        modules.append(lower(canonicalize(graph_module, names)))
        return graph_module.forward

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=compiler, keep_inference_input_mutations=True, decompositions=decomposition_table()
    )
    with torch.no_grad():
        torch.compile(step, backend=backend, fullgraph=True)(
            {name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in SPECS.items()}
        )
    assert len(modules) == 1
    assert modules[0].data == lower(captured(step)).data


def branch_on_a_value(inputs: Inputs) -> torch.Tensor:
    inputs["kv.0"].mul_(2)
    return inputs["inputs.x"] * (2 if inputs["inputs.x"].sum() > 0 else 3)


def shape_of_a_value(inputs: Inputs) -> torch.Tensor:
    inputs["kv.0"].mul_(2)
    return inputs["inputs.x"][inputs["inputs.slots"] > 0]


def bake_a_tensor(inputs: Inputs) -> torch.Tensor:
    inputs["kv.0"].mul_(2)
    return inputs["inputs.x"] + CONSTANT


LEAST = torch.tensor(-0.25)


def with_a_literal(inputs: Inputs) -> torch.Tensor:
    return torch.maximum(step(inputs) * torch.tensor([2.0, 0.5] * 4) / torch.sqrt(torch.tensor(2.0)), LEAST)


def with_a_compiled_part(inputs: Inputs) -> torch.Tensor:
    return torch.compile(step, backend="eager")(inputs) * 2


@pytest.mark.parametrize("forward", [with_a_literal, with_a_compiled_part])
def test_literals_and_calls_of_torch_compile_are_part_of_the_graph(forward: Callable[[Inputs], torch.Tensor]) -> None:
    torch.manual_seed(0)
    graph = captured(forward)
    assert graph.input_names == captured(step).input_names
    values = {name: torch.randn(spec.shape) for name, spec in SPECS.items() if spec.dtype == "float32"}
    values["inputs.slots"] = torch.tensor([5, 0, 15])
    _, found = graph.graph_module(*(values[name].clone() for name in graph.input_names))
    torch.testing.assert_close(found, forward(values))


def write_an_input(inputs: Inputs) -> torch.Tensor:
    inputs["kv.0"].mul_(2)
    inputs["weights.9"].add_(1)
    return inputs["inputs.x"] * 2


def leave_the_cache_alone(inputs: Inputs) -> torch.Tensor:
    return inputs["inputs.x"] * 2


def call_another_library(inputs: Inputs) -> torch.Tensor:
    inputs["kv.0"].mul_(2)
    out: torch.Tensor = torch.ops.capture_test.twice(inputs["inputs.x"])
    return out


CONSTANT = torch.arange(8.0)


@pytest.fixture(scope="module", autouse=True)
def another_library() -> torch.library.Library:
    library = torch.library.Library("capture_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    torch.library.register_fake("capture_test::twice", torch.empty_like, lib=library)
    return library


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (branch_on_a_value, "depends on the value of a tensor"),
        (shape_of_a_value, "depends on the value of a tensor"),
        (bake_a_tensor, "would be baked into the graph"),
        (write_an_input, "writes to inputs other than its KV cache: weights.9"),
        (leave_the_cache_alone, "does not write to 1 of its KV caches, the first is kv.0"),
        (call_another_library, "capture_test.twice.default, which is not an ATen operator"),
    ],
)
def test_what_would_be_unsound_is_refused(forward: Callable[[Inputs], torch.Tensor], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        captured(forward)
