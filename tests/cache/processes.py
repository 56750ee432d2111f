"""Processes that a test starts, listens to, and sends signals to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ACTORS = Path(__file__).with_name("actors.py")


class Actor:
    """One program of ``actors.py`` in a process of its own."""

    def __init__(self, *arguments: object, **options: Any) -> None:
        command = [sys.executable, str(ACTORS), *map(str, arguments)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )
        self.pid: int = self.process.pid

    def hear(self) -> str:
        """The next word that it says; fails when it has ended instead."""
        line: str = self.process.stdout.readline()
        assert line, f"the process ended with {self.process.wait()}"
        return line.strip()

    def tell(self) -> None:
        """Let it go on."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)
