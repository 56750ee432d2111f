"""Start an OpenAI-compatible server as a process, wait until it is ready, and end it with all that it started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from rich.console import Console

STOP_LIMIT_S = 30
QUIET_S = 15  # between lines that show progress where there is no terminal


class ServerError(Exception):
    """The server ended early, was not ready in time, or had to be killed."""


class Server:
    """A server process. ``url`` is where it listens once :meth:`wait` has returned."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.log = log

    def ready(self) -> bool:
        """True once the server answers its health check."""
        try:
            return httpx.get(f"{self.url}/health", timeout=2).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def wait(self, label: str, console: Console, limit_s: float = 600) -> None:
        """Show that time passes until the server is ready.

        Raises :class:`ServerError` when it ends, or at the limit.
        """
        start = last = time.monotonic()
        with console.status(label) as status:
            while not self.ready():
                elapsed = time.monotonic() - start
                if self.process.poll() is not None:
                    raise ServerError(f"{label}: the server ended with exit status {self.process.returncode}")
                if elapsed > limit_s:
                    raise ServerError(f"{label}: not ready after {limit_s:.0f} s")
                status.update(f"{label} ({elapsed:.0f} s)")
                if not console.is_terminal and time.monotonic() - last >= QUIET_S:
                    last = time.monotonic()
                    console.print(f"  {label}: {elapsed:.0f} s")
                time.sleep(0.2)

    def stop(self) -> None:
        """Ask the server to end, and kill what is left of its process group.

        Raises :class:`ServerError` if it did not end by itself, or not with exit status 0.
        """
        failure = ""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            if status := self.process.wait(STOP_LIMIT_S):
                failure = f"the server ended with exit status {status}"
        except subprocess.TimeoutExpired:
            failure = f"the server was still there {STOP_LIMIT_S} s after it was asked to end"
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if failure:
            raise ServerError(failure)


def end_servers_on_sigterm() -> None:
    """Have SIGTERM unwind this process as Ctrl-C does, so that no server is left. For the main program only."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def free_port() -> int:
    """A TCP port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def serving(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[Server]:
    """Run ``command`` with a host and a port added, in a session of its own, until the block ends."""
    port = free_port()
    address = ["--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *address],
            env=dict(environment),
            cwd=log.parent,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        yield server
    except BaseException:
        with suppress(ServerError):  # the first error is the one to tell
            server.stop()
        raise
    server.stop()
