"""The folder through which processes share their metrics: whose it is, and what becomes of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys
from vllm_neuron import metrics
metrics.share()
print(os.environ["PROMETHEUS_MULTIPROC_DIR"], flush=True)
sys.stdin.read()
"""


class Sharing:
    """A process that shares its metrics until it is told to end."""

    def __init__(self, temporary: Path) -> None:
        environment = {**os.environ, "TMPDIR": str(temporary)}
        environment.pop("PROMETHEUS_MULTIPROC_DIR", None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        self.folder = Path(self.process.stdout.readline().strip())

    def end(self) -> None:
        self.process.communicate()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_what_a_killed_process_left_is_removed_by_the_next_and_what_is_in_use_stays(tmp_path: Path) -> None:
    killed, alive = Sharing(tmp_path), Sharing(tmp_path)
    killed.kill()
    assert killed.folder.is_dir()
    following = Sharing(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([alive.folder, following.folder])
    alive.end()
    following.end()
    assert not list(tmp_path.iterdir())
