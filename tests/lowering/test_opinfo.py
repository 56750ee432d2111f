"""A fixed sample of ``make opinfo``: torch's own operator tests, each operator equal to eager or refused by name."""

from __future__ import annotations

import os

import pytest

from tools.opinfo.check import BACKENDS, FAULTS
from tools.opinfo.pool import Task, sweep
from tools.opinfo.sweep import warm_up

EQUAL = "addcdiv,bitwise_left_shift,clamp_max,masked_fill,nn.functional.gelu,nn.functional.softplus,take,where"
REFUSED = "linalg.svd,special.bessel_j0"


@pytest.mark.slow
@pytest.mark.parametrize("route", BACKENDS)
def test_a_sample_of_torchs_operator_tests(route: str) -> None:
    warm_up()
    tasks = [Task(name, route, limit=2) for name in f"{EQUAL},{REFUSED}".split(",")]
    found = {task.operator: outcomes for task, outcomes, _ in sweep(tasks, os.cpu_count() or 1, seconds=240)}
    for name in EQUAL.split(","):
        assert found[name]
        assert {kind for kind, _ in found[name].values()} == {"equal"}, found[name]
    for name in REFUSED.split(","):
        assert "refused" in {kind for kind, _ in found[name].values()}, found[name]
    assert not any(kind in FAULTS for outcomes in found.values() for kind, _ in outcomes.values())
