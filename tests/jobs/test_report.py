"""The table that a compile job prints."""

from __future__ import annotations

import pytest

from vllm_neuron.jobs.report import GraphLine, JobReport


def test_what_no_other_machine_can_use_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    here = GraphLine("decode_b1", "cpu:x86-64-v3", "local", "0" * 32, shared=False)
    there = GraphLine("decode_b2", "cpu:x86-64-v3", "remote", "1" * 32, shared=True)
    report = JobReport("m", [here, there])
    report.print()
    printed = capsys.readouterr().out
    assert "local, in no remote tier" in printed
    assert printed.endswith("1 already in the local tier, 1 already in the remote tier; 1 in no remote tier.\n")
    assert (report.exit_code, JobReport("m", [there]).exit_code) == (1, 0)


def test_that_there_is_no_remote_tier_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    report = JobReport("m", [GraphLine("decode_b1", "cpu:x86-64-v3", "compiled", "0" * 32)])
    report.print()
    assert "No remote tier is set, with --remote or NEURON_LIBTORCH_REMOTE_CACHE" in capsys.readouterr().out
    assert report.exit_code == 0


def test_that_there_is_no_remote_tier_is_not_told_where_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    line = GraphLine("decode_b1", "cpu:x86-64-v3", "failed", "0" * 32, error="it can't be published to /remote")
    JobReport("m", [line], ["/local (local)", "/remote (remote)"]).print()
    assert "No remote tier is set" not in capsys.readouterr().out


def test_brackets_in_a_path_or_an_error_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    line = GraphLine("decode_b1", "cpu:x86-64-v3", "failed", "0" * 32, error="[/red] is no [bold]way[/]")
    JobReport("/models/[/bold]", [line]).print()
    printed = capsys.readouterr().out
    assert "Graphs of /models/[/bold]" in printed
    assert "decode_b1: [/red] is no [bold]way[/]" in printed
    assert "/models/[/bold]: 1 graphs in 0.0 s: 1 failed." in printed
