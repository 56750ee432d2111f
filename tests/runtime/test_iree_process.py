"""What loading a module does to its process: worker threads, forks, and the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

Build = Callable[..., Path]

DOUBLE = """
func.func @main(%x: tensor<64xf32>) -> tensor<64xf32> {
  %0 = stablehlo.add %x, %x : tensor<64xf32>
  return %0 : tensor<64xf32>
}"""

PRELUDE = """
import os, sys, torch
from pathlib import Path
from vllm_neuron.abi import Abi, TensorSpec
from vllm_neuron.runtime.iree import IreeExecutable
spec = TensorSpec("float32", (64,))
load = lambda: IreeExecutable(Path(sys.argv[1]), Abi((spec,), (spec,)))
right = lambda executable: torch.equal(executable([torch.ones(64)])[0], torch.full((64,), 2.0))
"""


def python(code: str, artifact: Path, **environment: str) -> str:
    """The output of a process that runs the code; it must end by itself, and well."""
    command = [sys.executable, "-c", PRELUDE + code, str(artifact)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=120)
    finally:  # a child that hangs must not stay either
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, errors) == (0, "")
    return output


def test_forked_child_loads_for_itself_and_ends_by_itself(build: Build) -> None:
    code = """
inherited = load()
bound = inherited.bind([torch.ones(64)])
assert right(inherited)
for generation in range(2):
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        break
    for call in (bound, lambda: right(inherited)):
        try:
            call()
        except RuntimeError as error:
            print(error, flush=True)
    assert right(load())
    inherited = load()
    bound = inherited.bind([torch.ones(64)])
    assert torch.equal(bound()[0], torch.full((64,), 2.0))
"""
    lines = python(code, build(DOUBLE)).splitlines()
    assert lines[-2:] == ["0", "0"]
    assert len(lines) == 6
    assert all("was loaded before a fork" in line and "Load it again" in line for line in lines[:-2])


# A thread has the name of the one that made it until it runs, and names itself.
COUNT = """
import time
tasks = lambda: set(os.listdir("/proc/self/task"))
name = lambda task: Path(f"/proc/self/task/{task}/comm").read_text()
before = tasks()
assert right(load())
made = tasks() - before
while any(name(task) == name(os.getpid()) for task in made):
    time.sleep(0.01)
print(sum(name(task).startswith("iree-worker") for task in made))
"""


def test_one_worker_thread_per_usable_core(build: Build) -> None:
    artifact = build(DOUBLE)
    assert int(python("os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})" + COUNT, artifact)) == 1
    cores = len(os.sched_getaffinity(0))
    assert 1 <= int(python(COUNT, artifact)) <= cores


def test_topology_of_iree_own_variable_is_kept(build: Build) -> None:
    assert int(python(COUNT, build(DOUBLE), IREE_PY_RUNTIME_FLAGS="--task_topology_group_count=3")) == 3


def test_process_that_leaves_results_behind_ends_well(build: Build) -> None:
    assert python("executable = load(); kept = executable([torch.ones(64)]); print(kept[0][0])", build(DOUBLE))
