"""The table that a compile job prints."""

from __future__ import annotations

import pytest

from vllm_neuron.jobs.report import GraphLine, JobReport


def test_brackets_in_a_path_or_an_error_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    line = GraphLine("decode_b1", "cpu:x86-64-v3", "failed", "0" * 32, error="[/red] is no [bold]way[/]")
    JobReport("/models/[/bold]", [line]).print()
    printed = capsys.readouterr().out
    assert "Graphs of /models/[/bold]" in printed
    assert "decode_b1: [/red] is no [bold]way[/]" in printed
    assert "/models/[/bold]: 1 graphs in 0.0 s: 1 failed." in printed
