"""Lines of our loggers in a process that has not set up logging."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ADD_ONE = """
import torch
with torch.no_grad():
    torch.compile(lambda x: x + 1, backend="neuron_native")(torch.ones(3))
"""


@pytest.mark.parametrize(("level", "shown"), [("INFO", True), ("WARNING", False)])
def test_user_code_shows_what_the_variable_asks_for(level: str, shown: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ADD_ONE],
        env={**os.environ, "VLLM_NEURON_LOG_LEVEL": level},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert ("INFO" in done.stderr and "A graph of user code has key" in done.stderr) is shown
    assert done.stderr.count("A graph of user code has key") == int(shown)


def test_a_log_that_is_set_up_already_gets_no_second_line() -> None:
    program = "import logging; logging.basicConfig(level=logging.INFO, format='MINE %(message)s')\n" + ADD_ONE
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "VLLM_NEURON_LOG_LEVEL": "INFO"},
        text=True,
        capture_output=True,
    )
    assert done.stderr.count("A graph of user code has key") == 1
    assert "MINE A graph of user code has key" in done.stderr
