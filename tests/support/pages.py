"""Documentation pages as sessions: what their code blocks say is run, in order, in a folder with a model."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tools.server import Server, serving

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PORT = "localhost:8000"
# What sets up this very test run, and so has been run already.
DONE_BY_SETUP = ("make setup", "source .venv/bin/activate")
PROGRAMS = ("vllm-neuron", "vllm", "curl", "export")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, such as ``console``, and its text."""

    language: str
    text: str

    def commands(self) -> list[str]:
        """What follows the prompts of a console block, with continued lines joined."""
        joined = self.text.replace("\\\n", " ")
        return [line.removeprefix("$ ") for line in joined.splitlines() if line.startswith("$ ")]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [Block(match[1], match[2]) for match in _FENCE.finditer(page.read_text())]


def program(command: str) -> str:
    """The program that a command line runs, after what it sets for it."""
    return next(word for word in shlex.split(command) if "=" not in word)


def commands(page: Path) -> Iterator[str]:
    """Every command of a page that is not a part of set-up."""
    for block in blocks(page):
        if block.language == "console":
            yield from (command for command in block.commands() if command not in DONE_BY_SETUP)


class Session:
    """A shell of its own, in ``folder``: variables that are exported stay, and a server stays up until the next."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.environment = environment
        self._servers = ExitStack()
        self._server: Server | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self._servers.close()

    def run(self, block: Block) -> None:
        """Run a console or Python block. Raises ``AssertionError`` where a command fails."""
        if block.language == "python":
            self._check([sys.executable, "-c", block.text])
        elif block.language == "console":
            for command in block.commands():
                if command not in DONE_BY_SETUP:
                    self._command(command)

    def _command(self, command: str) -> None:
        words = shlex.split(command)
        if words[0] == "export":
            name, value = words[1].split("=", 1)
            self.environment[name] = value
        elif words[0] == "vllm":
            self._serve(words)
        elif words[0] == "curl":
            assert self._server is not None, f"no server is up for: {command}"
            address = self._server.url.removeprefix("http://")
            self._check(["bash", "-c", command.replace(_PORT, address).replace("curl ", "curl --fail -sS ", 1)])
        else:
            self._check(["bash", "-c", command])

    def _serve(self, words: list[str]) -> None:
        self._servers.close()
        executable = str(Path(sys.executable).with_name(words[0]))
        log = self.folder / "server.log"
        self._server = self._servers.enter_context(serving([executable, *words[1:]], self.environment, log))
        try:
            self._server.wait(" ".join(words), Console(stderr=True), limit_s=300)
        except Exception as error:
            raise AssertionError(f"{error}\n{log.read_text()[-3000:]}") from error

    def _check(self, command: list[str]) -> None:
        done = subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command} -> {done.returncode}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"


def clean_environment(cache: Path) -> dict[str, str]:
    """This run's environment with a cache of its own and with the commands of this virtual environment first."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "VLLM_CACHE_ROOT": str(cache)}
