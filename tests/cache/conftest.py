"""Processes and mounts for the cache's tests, all gone when a test ends."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from processes import Actor
from stores import s3_server


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


@pytest.fixture(scope="session")
def s3_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A server that speaks S3, one for the whole run, as the variables by which clients find it."""
    pytest.importorskip("s3fs")
    with s3_server(tmp_path_factory.mktemp("s3")) as environment:
        yield environment


@pytest.fixture
def s3(s3_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """This process finds the S3 server, and so do those that it starts. Its bucket is ``bucket``."""
    for name, value in s3_environment.items():
        monkeypatch.setenv(name, value)
    return s3_environment
