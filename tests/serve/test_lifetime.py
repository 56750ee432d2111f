"""A server and its engine end together, and when told to, whatever they are doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.engine import MODES

LIMIT = 300


class Start:
    """A server that starts; ``log`` is all that it has printed."""

    def __init__(self, model: Path, log: Path) -> None:
        self.log = log
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--port", "0"]
        options = ["--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "2"]
        with log.open("w") as stream:
            environment = {**os.environ, **MODES["eager"]}
            self.process = subprocess.Popen([*command, *options], env=environment, stdout=stream, stderr=stream)

    def wait_for(self, line: str) -> list[psutil.Process]:
        """Returns what the server has started by the time that it prints ``line``."""
        end = time.monotonic() + LIMIT
        while line not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < end
            time.sleep(0.02)
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def start(tiny: Callable[[str], Path], tmp_path: Path) -> Iterator[Start]:
    started = Start(tiny("llama"), tmp_path / "log")
    yield started
    started.process.kill()
    started.process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_ends_a_server_that_starts(start: Start, number: signal.Signals) -> None:
    children = start.wait_for("Initializing a V1 LLM engine")
    assert children
    start.process.send_signal(number)
    assert start.process.wait(LIMIT) == 128 + number
    assert psutil.wait_procs(children, LIMIT)[1] == []
    assert "Starting vLLM server" not in start.log.read_text()


def test_an_engine_ends_with_its_server(start: Start) -> None:
    children = start.wait_for("Application startup complete")
    start.process.kill()
    assert any("EngineCore" in child.name() or "python" in child.name() for child in children)
    assert psutil.wait_procs(children, LIMIT)[1] == []
