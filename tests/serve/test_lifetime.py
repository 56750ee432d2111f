"""A server and its engine end together, and when told to, whatever they are doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.engine import MODES
from tools.server import free_port

LIMIT = 300


class Start:
    """A server that starts; ``log`` is all that it has printed."""

    def __init__(self, model: Path, log: Path, *more: str) -> None:
        self.log, self.model, self.port = log, str(model), free_port()
        serve = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", self.model]
        command = [*serve, "--port", str(self.port), *more]
        options = ["--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "2"]
        with log.open("w") as stream:
            # Not in the test's own folder: the paths of sockets are short.
            self.temporary = tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True)
            environment = {**os.environ, **MODES["eager"], "TMPDIR": self.temporary.name}
            self.process = subprocess.Popen([*command, *options], env=environment, stdout=stream, stderr=stream)

    def wait_for(self, line: str, times: int = 1) -> list[psutil.Process]:
        """Returns what the server has started by the time that it prints ``line``, so many times."""
        end = time.monotonic() + LIMIT
        while self.log.read_text().count(line) < times:
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
    started.temporary.cleanup()


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
    # Nothing is left of the meeting place of the ranks, for all that nobody had the time to remove it.
    assert list(Path(start.temporary.name).glob("vllm_*")) == []


def test_a_server_fails_when_its_engine_is_killed(start: Start) -> None:
    children = start.wait_for("Application startup complete")
    (engine,) = [child for child in children if "EngineCore" in " ".join([child.name(), *child.cmdline()])]
    engine.kill()
    assert start.process.wait(LIMIT) == 1
    assert "vllm-neuron: error: the engine died" in start.log.read_text()


@pytest.mark.slow
def test_several_api_servers_finish_what_they_have_begun(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """As one does: what is being answered is answered, and all processes end by themselves."""
    started = Start(tiny("llama"), tmp_path / "log", "--api-server-count", "2", "--shutdown-timeout", "60")
    try:
        children = started.wait_for("Application startup complete", times=2)
        body = {"model": started.model, "prompt": [7, 300], "max_tokens": 120, "ignore_eos": True, "stream": True}
        url = f"http://127.0.0.1:{started.port}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=LIMIT) as stream:
            lines = stream.iter_lines()
            next(lines)
            started.process.terminate()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert started.process.wait(LIMIT) == 0
        assert psutil.wait_procs(children, LIMIT)[1] == []
        log = started.log.read_text()
        assert "leaked" not in log and "Traceback" not in log
    finally:
        started.process.kill()
        started.process.wait()
        started.temporary.cleanup()
