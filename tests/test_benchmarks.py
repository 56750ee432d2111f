"""The arithmetic of the benchmark, and the server processes that it and the demo start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from benchmarks.load import Arrival, prompt, steady_rate
from benchmarks.report import COLUMNS, Series, markdown, ratio
from tools.server import ServerError, serving

ROOT = Path(__file__).resolve().parents[1]


def test_rate_is_taken_while_all_streams_run() -> None:
    early = [Arrival(0.0, 1), Arrival(1.0, 2), Arrival(2.0, 3), Arrival(3.0, 4)]
    late = [Arrival(1.0, 1), Arrival(2.0, 3), Arrival(3.0, 5), Arrival(4.0, 7)]
    # Both run from 1 s to 3 s: in it the first goes from 2 tokens to 4, the second from 1 to 5.
    assert steady_rate([early, late]) == pytest.approx((2 + 4) / 2)


def test_rate_of_streams_that_never_run_together_is_refused() -> None:
    with pytest.raises(ValueError, match="same time"):
        steady_rate([[Arrival(0.0, 1), Arrival(1.0, 2)], [Arrival(2.0, 1), Arrival(3.0, 2)]])


def test_prompts_differ_between_seeds_only() -> None:
    assert prompt(32, 1) == prompt(32, 1)
    assert prompt(32, 1) != prompt(32, 2)


def test_ratio_is_within_rounds() -> None:
    """A round in which the machine was slow for both does not move it."""
    assert ratio([10.0, 1.0, 10.0], [5.0, 0.5, 5.0]) == pytest.approx(2.0)


def test_table_has_medians_ratios_and_token_agreement() -> None:
    ours = Series("ours", "float32", {column: [4.0, 8.0, 6.0] for column in COLUMNS}, [1, 2])
    other = Series("stock", "float32", {column: [2.0, 4.0, 3.0] for column in COLUMNS}, [1, 3])
    table = markdown([ours, other], {"cpu": "one"})
    assert "| float32 | decode, 8 streams (tok/s) | 6.0 | 3.0 (2.00x) |" in table
    assert "| float32 | 32 greedy tokens | - | different |" in table
    assert "- cpu: one" in table


def test_a_server_that_ends_early_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    with (
        pytest.raises(ServerError, match="exit status 3"),
        serving(command, dict(os.environ), tmp_path / "log") as server,
    ):
        server.wait("starting", Console(stderr=True), limit_s=60)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_nothing_of_a_server_is_left(tmp_path: Path) -> None:
    """Its child ignores the signal that ends it, and is ended all the same."""
    child = (
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    parent = (
        "import signal, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(0))\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "child.wait()\n"
    )
    with serving([sys.executable, "-c", parent], dict(os.environ), tmp_path / "log") as server:
        while "up" not in server.log.read_text():
            assert server.process.poll() is None
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 60
    while lives(pid):
        assert time.monotonic() < deadline, "the child was not ended"
        time.sleep(0.05)


def test_nothing_is_left_when_the_program_itself_is_terminated(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, sys, time\n"
        "from tools.server import end_servers_on_sigterm, serving\n"
        "end_servers_on_sigterm()\n"
        "command = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        f"with serving(command, dict(os.environ), pathlib.Path({str(tmp_path / 'log')!r})) as server:\n"
        "    print(server.process.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        server = int(process.stdout.readline())
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert not lives(server)
