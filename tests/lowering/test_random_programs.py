"""In-place execution is sound: random programs leave results and every input as eager PyTorch does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_programs import inputs, load, programs
from torch import Tensor

CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
QUIET = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=CHECKS, report_multiple_bugs=False
)


def run_all(sources: list[str], backend: str | None) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Results and, after the call, inputs of each program; all are one function when compiled by ``backend``."""
    functions = [load(source) for source in sources]
    given_inputs = [inputs() for _ in sources]

    def run(batch: list[list[Tensor]]) -> list[list[Tensor]]:
        return [function(*arguments) for function, arguments in zip(functions, batch, strict=True)]

    torch._dynamo.reset()
    with torch.no_grad():
        call = torch.compile(run, backend=backend, fullgraph=True, dynamic=False) if backend else run
        return call(given_inputs), given_inputs


def shared(tensors: list[Tensor]) -> set[tuple[int, int]]:
    """Pairs of tensors that live in one storage."""
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return {(i, j) for i, a in enumerate(storages) for j, b in enumerate(storages) if i < j and a == b}


def check(sources: list[str], backend: str = "neuron_native") -> None:
    actual_results, actual_inputs = run_all(sources, backend)
    expected_results, expected_inputs = run_all(sources, None)
    for index, source in enumerate(sources):
        actual = [*actual_inputs[index], *actual_results[index]]
        expected = [*expected_inputs[index], *expected_results[index]]
        for position, (mine, eager) in enumerate(zip(actual, expected, strict=True)):
            assert torch.equal(mine, eager), f"tensor {position} of\n{source}\n{mine}\nis in eager\n{eager}"
        assert shared(actual) <= shared(expected), f"storage is shared that eager keeps apart, by\n{source}"


@settings(QUIET, max_examples=2)
@given(st.lists(programs(), min_size=12, max_size=12))
def test_a_few_programs(sources: list[str]) -> None:
    check(sources)


@pytest.mark.slow
@settings(QUIET, max_examples=16)
@given(st.lists(programs(), min_size=24, max_size=24))
def test_hundreds_of_programs(sources: list[str]) -> None:
    check(sources)


@settings(QUIET, max_examples=1)
@given(st.lists(programs(), min_size=12, max_size=12))
def test_a_few_programs_by_the_xla_route(sources: list[str]) -> None:
    check(sources, "vllm_neuron")


@pytest.mark.slow
@settings(QUIET, max_examples=8)
@given(st.lists(programs(), min_size=24, max_size=24))
def test_hundreds_of_programs_by_the_xla_route(sources: list[str]) -> None:
    check(sources, "vllm_neuron")
