"""Whole engines that start cold on one model, all at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.engine import REPOSITORY
from tests.support.reference import greedy

PROMPT = [7, 300, 12, 45]
ENGINES = 8
GRAPHS = 3


@pytest.mark.slow
def test_engines_that_start_cold_at_once_compile_each_graph_once(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    model, spawned = tiny("llama"), tmp_path / "spawned"
    environment = {**os.environ, "VLLM_CACHE_ROOT": str(tmp_path / "root"), "OMP_NUM_THREADS": "1"}
    environment.pop("NEURON_LIBTORCH_REMOTE_CACHE", None)
    ready = [tmp_path / f"ready{n}" for n in range(ENGINES)]
    command = [sys.executable, "-m", "tests.serve.starting_cold", str(spawned)]
    logs = [(tmp_path / f"log{n}").open("w+") for n in range(ENGINES)]
    engines = [
        subprocess.Popen(
            [*command, str(place), str(model), json.dumps(PROMPT)], cwd=REPOSITORY, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        )
        for place, log in zip(ready, logs, strict=True)
    ]  # fmt: skip
    try:
        while not all(place.exists() for place in ready):
            assert all(engine.poll() is None for engine in engines)
            time.sleep(0.1)
        for engine in engines:
            assert engine.stdin is not None
            engine.stdin.write("go\n")
            engine.stdin.flush()
        printed = [engine.communicate(timeout=500)[0] for engine in engines]
    finally:
        for engine in engines:
            engine.kill()
        for log in logs:
            log.close()
    assert [engine.returncode for engine in engines] == [0] * ENGINES, (tmp_path / "log0").read_text()[-3000:]
    assert spawned.read_text().count("compiler") == GRAPHS
    tokens = [json.loads(text.split("TOKENS ")[1].splitlines()[0]) for text in printed]
    assert tokens == [greedy(model, PROMPT, 8)] * ENGINES
