"""Kinds of input that compilers fail on, on both routes against eager PyTorch, and what is said where one fails."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from kind_cases import KINDS

from tests.support.closeness import assert_equal_to_eager
from vllm_neuron.abi import TensorSpec
from vllm_neuron.compilers.base import run_compiler
from vllm_neuron.compilers.iree import IreeCompiler
from vllm_neuron.errors import CompileError
from vllm_neuron.lowering.decompositions import sorting
from vllm_neuron.lowering.shared.carriers import carried, carried_spec

TOLERANCE = {
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
    torch.float64: 1e-12,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}
BACKENDS = ("neuron_native", "vllm_neuron")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_eager(kind: str, backend: str) -> None:
    cases = KINDS[kind]
    functions = [function for function, _ in cases.values()]

    def run(inputs: list[tuple[torch.Tensor, ...]]) -> list[object]:
        return [function(*arguments) for function, arguments in zip(functions, inputs, strict=True)]

    mine, eager = (copy.deepcopy([arguments for _, arguments in cases.values()]) for _ in range(2))
    torch._dynamo.reset()
    with torch.no_grad():
        actual = torch.compile(run, backend=backend, fullgraph=True, dynamic=False)(mine)
        expected = run(eager)
    for name, *pair in zip(cases, zip(actual, mine, strict=True), zip(expected, eager, strict=True), strict=True):
        assert_equal_to_eager(name, pair[0], pair[1], TOLERANCE)


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("descending", [False, True])
def test_the_network_orders_as_a_stable_sort_does(dtype: torch.dtype, descending: bool) -> None:
    torch.manual_seed(0)
    x = (torch.randn(3, 600) * 50).to(dtype)
    if dtype.is_floating_point:
        x[:, :6] = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0])
    values, places = sorting.sort(x, -1, descending)
    expected, order = torch.sort(x, stable=True, descending=descending)
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(places, order)
    assert torch.equal(sorting.topk(x, 5, -1, descending)[1], order[:, :5])


def test_a_failure_of_the_compiler_is_one_line_that_names_the_operation(tmp_path: Path) -> None:
    (tmp_path / "graph.mlir").write_text(
        "func.func @main(%arg0: tensor<4xui8>) -> tensor<4xui8> {\n"
        "  %0 = stablehlo.reverse %arg0, dims = [0] : tensor<4xui8>\n"
        "  return %0 : tensor<4xui8>\n}\n"
    )
    flags = ("--iree-input-type=stablehlo", "--iree-hal-target-device=local",
             "--iree-hal-local-target-device-backends=llvm-cpu")  # fmt: skip
    with pytest.raises(CompileError) as caught:
        run_compiler(IreeCompiler(), tmp_path, "graph.mlir", flags, "graph.vmfb")
    message = str(caught.value)
    assert "\n" not in message
    assert "At stablehlo.reverse of tensor<4xui8>. First error: graph.mlir:2:8: error: " in message
    assert message.endswith(f"Log: {tmp_path / 'compiler.log'}")
    assert len(message) < 1000


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_a_spec_is_carried_as_its_tensor_is(dtype: torch.dtype) -> None:
    """A loaded model's weights are compared, by spec, with what a graph takes."""
    tensor = torch.zeros(3, 4, dtype=dtype)
    assert carried_spec(TensorSpec.of(tensor)) == TensorSpec.of(carried(tensor))
