"""Processes that start cold at once on one cache, and the compilers that they start.

A program for it calls :func:`wait_for_the_others` when it has loaded what it needs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE

REPOSITORY = Path(__file__).resolve().parents[2]


def start_cold_together(module: str, count: int, folder: Path, *arguments: str) -> tuple[list[str], int]:
    """What each of ``count`` processes of ``module`` prints, and how many compilers they started between them.

    They share a cache in ``folder``, which is empty at first. ``arguments`` are the program's own, from the third on.
    """
    spawned, ready = folder / "spawned", [folder / f"ready{n}" for n in range(count)]
    environment = {**os.environ, "VLLM_CACHE_ROOT": str(folder / "root"), "OMP_NUM_THREADS": "1"}
    environment.pop("NEURON_LIBTORCH_REMOTE_CACHE", None)
    logs = [place.with_suffix(".log") for place in ready]
    processes = []
    try:
        for place, log in zip(ready, logs, strict=True):
            command = [sys.executable, "-m", module, str(spawned), str(place), *arguments]
            with log.open("w") as stream:
                process = subprocess.Popen(
                    command, cwd=REPOSITORY, env=environment, text=True, stdin=PIPE, stdout=PIPE, stderr=stream
                )
            processes.append(process)
        while not all(place.exists() for place in ready):
            assert all(process.poll() is None for process in processes)
            time.sleep(0.05)
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        printed = [process.communicate(timeout=500)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * count, logs[0].read_text()[-3000:]
    return printed, spawned.read_text().count("compiler")


def note_compilers(spawned: Path) -> None:
    """Write one line to ``spawned`` whenever this process starts a compiler, whether or not it succeeds."""

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "subprocess.Popen" and "supervisor.py" in str(arguments[1]):
            with spawned.open("a") as file:
                file.write("compiler\n")

    sys.addaudithook(hook)


def wait_for_the_others(ready: Path) -> None:
    """Say that this process could begin, and return when all can."""
    ready.touch()
    sys.stdin.readline()
