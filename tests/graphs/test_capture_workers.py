"""Capture workers are nobody's orphans, and a worker that dies is an error and not a hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.models import make_tiny

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, sys
from vllm.engine.arg_utils import EngineArgs
from vllm_neuron.model.buckets import buckets_for
from vllm_neuron.graphs.capture_workers import capture_buckets
config = EngineArgs(model=sys.argv[1], dtype="float32", max_model_len=128, max_num_seqs=4).create_engine_config()
graphs = capture_buckets(config, buckets_for(config) * 200)
print("FIRST", next(graphs).bucket.name, flush=True)
for graph in graphs:
    pass
"""

# As vLLM's engine is: a spawned process, whose handler of SIGTERM only takes note.
FAILING = """
import multiprocessing, os, signal, sys
from vllm.engine.arg_utils import EngineArgs
from vllm_neuron.model.buckets import buckets_for
from vllm_neuron.graphs.capture_workers import capture_buckets

def engine(model):
    signal.signal(signal.SIGTERM, lambda *_: None)
    config = EngineArgs(model=model, dtype="float32", max_model_len=128, max_num_seqs=4).create_engine_config()
    graphs = capture_buckets(config, buckets_for(config))
    raise RuntimeError("no weights")

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=engine, args=sys.argv[1:])
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


@pytest.fixture
def capturing(tmp_path: Path) -> subprocess.Popen[str]:
    """A process with capture workers that have minutes of work before them."""
    model = make_tiny(tmp_path / "model", weights=False)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(model)],
        cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith("FIRST"):
        assert line, process.stderr.read() if process.stderr else ""
    return process


def test_workers_die_with_a_process_that_is_killed(capturing: subprocess.Popen[str]) -> None:
    workers = psutil.Process(capturing.pid).children(recursive=True)
    assert workers
    capturing.kill()
    capturing.communicate()
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive


def test_a_worker_that_is_killed_is_an_error(capturing: subprocess.Popen[str]) -> None:
    for worker in psutil.Process(capturing.pid).children():
        os.kill(worker.pid, signal.SIGKILL)
        break
    _, errors = capturing.communicate(timeout=60)
    assert capturing.returncode == 1
    assert "CaptureError: a capture worker died while" in errors
    assert "VLLM_NEURON_PARALLEL_TRACE_WORKERS=1" in errors


def test_workers_that_are_interrupted_were_not_killed_for_memory(capturing: subprocess.Popen[str]) -> None:
    for worker in psutil.Process(capturing.pid).children():
        os.kill(worker.pid, signal.SIGINT)
    _, errors = capturing.communicate(timeout=60)
    assert capturing.returncode == 1
    assert "CaptureError: the capture workers were interrupted while" in errors
    assert "memory" not in errors.splitlines()[-1]


def test_a_start_that_fails_while_graphs_are_captured_ends(tmp_path: Path) -> None:
    program = tmp_path / "failing.py"
    program.write_text(FAILING)
    model = make_tiny(tmp_path / "model", weights=False)
    done = subprocess.run(
        [sys.executable, str(program), str(model)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "RuntimeError: no weights" in done.stderr


@pytest.mark.slow
def test_a_model_that_takes_its_time_is_not_captured_in_silence(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model", weights=False)
    command = [str(Path(sys.executable).with_name("vllm-neuron")), "plan", str(model), "--max-model-len", "128"]
    process = subprocess.Popen(
        [*command, "--hf-overrides", '{"num_hidden_layers": 1000000}'],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert any("Still capturing" in line and "of a model of 1000000 layers" in line for line in process.stdout)
    finally:
        process.kill()
        process.wait()
