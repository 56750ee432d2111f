"""The command that a miss offers is one that can work where the miss was."""

from __future__ import annotations

from pathlib import Path

from tests.support.engine import run_cases
from tests.support.models import make_tiny

REMOTE = "NEURON_LIBTORCH_REMOTE_CACHE"


def test_a_remote_that_takes_nothing_is_not_in_the_command(tmp_path: Path) -> None:
    args = {"model": str(make_tiny(tmp_path / "model", weights=False)), "max_model_len": 128}
    remotes = ["/mnt/cache", "http://mirror.example/cache", "ro+file:///a,https://b.example", "ro+file:///a,/mnt/cache"]
    cases = [{"do": "configure", "args": args, "env": {REMOTE: remote}} for remote in remotes]
    commands = [result["command"] for result in run_cases(cases)]
    assert [REMOTE in command.split() for command in commands] == [False, True, True, False]
    assert [f"-u {REMOTE} " in command for command in commands] == [False, True, True, False]
    assert [f"--remote {remote}" in command for remote, command in zip(remotes, commands, strict=True)] == [
        True,
        False,
        False,
        True,
    ]
