"""Whole engines that start cold on one model, all at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cold_starts import start_cold_together
from tests.support.reference import greedy

PROMPT = [7, 300, 12, 45]
ENGINES = 8
GRAPHS = 3


@pytest.mark.slow
def test_engines_that_start_cold_at_once_compile_each_graph_once(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    model = tiny("llama")
    program, arguments = "tests.serve.starting_cold", (str(model), json.dumps(PROMPT))
    printed, compilers = start_cold_together(program, ENGINES, tmp_path, *arguments)
    assert compilers == GRAPHS
    tokens = [json.loads(text.split("TOKENS ")[1].splitlines()[0]) for text in printed]
    assert tokens == [greedy(model, PROMPT, 8)] * ENGINES
