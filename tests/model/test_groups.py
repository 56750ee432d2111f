"""The process groups of a worker: how long a rank waits for one that does not come."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ALONE = """
import sys
from types import SimpleNamespace
from vllm_neuron.model.groups import init_groups
parallel = SimpleNamespace(world_size=2, distributed_timeout_seconds=None)
try:
    init_groups(SimpleNamespace(parallel_config=parallel), 0, f"file://{sys.argv[1]}", 0)
except RuntimeError as error:
    print("GAVE UP", error)
"""


@pytest.mark.parametrize("seconds", ["0.5", "2"])
def test_a_rank_gives_up_when_another_does_not_come(tmp_path: Path, seconds: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path / "group")], text=True, capture_output=True, timeout=120,
        env={**os.environ, "VLLM_NEURON_BARRIER_TIMEOUT": seconds},
    )  # fmt: skip
    assert "GAVE UP" in done.stdout and "imeout" in done.stdout, done.stdout + done.stderr[-3000:]
