"""Every operator that models are made of, through the whole pipeline, against eager PyTorch."""

from __future__ import annotations

import pytest
import torch
from op_cases import GROUPS, NATIVE_ONLY, UNSUPPORTED, Case
from torch._dynamo.exc import BackendCompilerFailed

from tests.support.closeness import assert_equal_to_eager
from vllm_neuron.errors import UnsupportedOpError

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


BACKENDS = ("neuron_native", "vllm_neuron")


def compiled(cases: dict[str, Case], backend: str = "neuron_native") -> tuple[list[object], list[object]]:
    """Results of all cases from one compiled function, and from eager PyTorch."""
    functions = [function for function, _ in cases.values()]
    inputs = [arguments for _, arguments in cases.values()]

    def run(inputs: list[tuple[object, ...]]) -> list[object]:
        return [function(*arguments) for function, arguments in zip(functions, inputs, strict=True)]

    torch._dynamo.reset()
    with torch.no_grad():
        actual = torch.compile(run, backend=backend, fullgraph=True, dynamic=False)(inputs)
        return actual, run(inputs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("group", GROUPS)
def test_equals_eager(group: str, backend: str) -> None:
    check(GROUPS[group], backend)


def test_what_only_the_native_route_has_equals_eager() -> None:
    check(NATIVE_ONLY, "neuron_native")


def check(cases: dict[str, Case], backend: str) -> None:
    for name, actual, expected in zip(cases, *compiled(cases, backend), strict=True):
        assert_equal_to_eager(name, actual, expected, TOLERANCE)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("complex logarithm", "log.default(complex64[4,8]) has no form in real numbers here"),
        ("rand_like", "rand_like.default(float32[4,16]): random numbers"),
        ("sine in 64 bits", "sin.default(float64[4,16]): IREE has no such function of 64-bit floats"),
        ("dropout in training", "native_dropout.default(float32[4,16], 0.5, True): random numbers"),
        ("long fft", "a Fourier transform of 4096 elements: up to 2048 are supported"),
        ("svd", "_linalg_svd.default(float32[4,4])"),
        ("bessel", "special_bessel_j0.default(float32[4,16]) has no lowering"),
        ("mode", "mode.default(float32[4,16]) has no lowering"),
        ("median", "median.dim(float32[4,16], -1) has no lowering"),
        (
            "write through a mask, element by element",
            "index.Tensor: what it returns, or its shape, depends on the values",
        ),
    ],
)
def test_unsupported_is_named_in_one_line(name: str, named: str) -> None:
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled({name: UNSUPPORTED[name]})
    error = caught.value.inner_exception
    assert isinstance(error, UnsupportedOpError)
    assert named in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("rand_like", "aten.rand"),
        ("svd", "aten._linalg_svd.default(float32[4,4]"),
        ("bessel", "aten.special_bessel_j0.default(float32[4,16])"),
        ("mode", "aten.mode.default(float32[4,16])"),
        ("median", "aten.median.dim(float32[4,16], -1)"),
    ],
)
def test_what_the_xla_route_lacks_is_named_in_one_line(name: str, named: str) -> None:
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled({name: UNSUPPORTED[name]}, "vllm_neuron")
    error = caught.value.inner_exception
    assert isinstance(error, UnsupportedOpError)
    assert named in str(error)
    assert str(error).count("is not supported on the XLA route") == 1
    assert "\n" not in str(error)
