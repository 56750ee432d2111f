"""Processes and mounts for the cache's tests, all gone when a test ends."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from processes import Actor


@pytest.fixture
def actor() -> Iterator[Callable[..., Actor]]:
    """Starts a program of ``actors.py``; whatever still runs at the end of the test is killed."""
    with ExitStack() as stack:

        def start(*arguments: object, **options: object) -> Actor:
            started = Actor(*arguments, **options)
            stack.callback(started.process.wait)
            stack.callback(started.process.kill)
            return started

        yield start


@pytest.fixture
def mount() -> Iterator[Callable[..., None]]:
    """Mounts something until the test ends; skips the test where this user may not."""
    mounted: list[Path] = []

    def run(*arguments: object) -> None:
        done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"this user may not mount here: {done.stderr.strip()}")
        if Path(str(arguments[-1])) not in mounted:
            mounted.append(Path(str(arguments[-1])))

    yield run
    for path in reversed(mounted):
        with suppress(subprocess.CalledProcessError):
            subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture
def other_user() -> int:
    """The id of a user who is not the one that runs the tests, and whom only root can act for."""
    if os.geteuid() != 0:
        pytest.skip("only root can act for another user")
    return 61234
