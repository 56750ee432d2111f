"""The lines about route and level in the log of real servers, which are stopped when the line is there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

STARTUP_SECONDS = 300
DEPRECATED = "The XLA route (VLLM_NEURON_BACKEND=vllm_neuron) is deprecated."
NOT_VALID = "VLLM_NEURON_BACKEND='vlm_neuron' is not a valid route. The native route runs now."
KEPT = "Explicit --optimization-level: keeping O"
NATIVE = "Using default optimization level O2 on the Neuron native route"
XLA = "Defaulting optimization level to O1 on the XLA route"


def log_until(line: str, model: Path, options: list[str], variables: dict[str, str], log: Path) -> str:
    """The log of a server until it has the line."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--dtype", "float32"]
    environment = {**os.environ, "VLLM_NEURON_CPU_MODE": "1", **variables}
    with log.open("w") as stream:
        server = subprocess.Popen(
            [*command, "--max-model-len", "128", "--port", "0", *options],
            env=environment, stdout=stream, stderr=stream, start_new_session=True,
        )  # fmt: skip
    try:
        end = time.monotonic() + STARTUP_SECONDS
        while line not in log.read_text():
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end
            time.sleep(0.2)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    return log.read_text()


@pytest.mark.parametrize(
    ("backend", "options", "lines"),
    [
        ("", [], [NATIVE]),
        ("neuron", ["-O1"], [f"{KEPT}1"]),
        ("vllm_neuron", [], [DEPRECATED, XLA]),
        ("vlm_neuron", ["--optimization-level", "3"], [NOT_VALID, f"{KEPT}3"]),
    ],
)
def test_the_lines_of_a_server(
    tiny_config: Path, tmp_path: Path, backend: str, options: list[str], lines: list[str]
) -> None:
    log = log_until(lines[-1], tiny_config, options, {"VLLM_NEURON_BACKEND": backend}, tmp_path / "log")
    for line in (DEPRECATED, NOT_VALID, NATIVE, XLA, f"{KEPT}1", f"{KEPT}3"):
        assert log.count(line) == (1 if line in lines else 0), log
