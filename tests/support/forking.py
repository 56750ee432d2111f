"""Runs commands and functions as forks of one process that has imported vLLM, which takes most of a small case's time.

Each has a process, an environment, a working folder and streams of its own, and ends as the interpreter would end it.
What a fork can't show is started for real by the tests that are about it: what is imported, hash seeds, signals to a
whole start.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL_INFOS = REPOSITORY / ".cache" / "modelinfos"
PROGRAMS = {"vllm-neuron": ("vllm_neuron.cli.main", "main"), "vllm": ("vllm.entrypoints.cli.main", "main")}
_POLL_SECONDS = 0.02

_server: _Server | None = None


def run(command: list[str], *, timeout: float = 300, **variables: object) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run`` does a command, with this process's environment and ``variables``; forked where it can be.

    Raises ``subprocess.TimeoutExpired``, and has killed the command and what it started then.
    """
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    program = Path(command[0]).name
    if program not in PROGRAMS or "PYTHONHASHSEED" in variables:
        return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=timeout)
    module, function = PROGRAMS[program]
    with tempfile.TemporaryDirectory(prefix="forked-") as folder:
        code = call(module, function, [], environment, Path(folder), timeout, command)
        out, err = (Path(folder, name).read_text(errors="replace") for name in ("stdout", "stderr"))
    if code is None:
        raise subprocess.TimeoutExpired(command, timeout, out, err)
    return subprocess.CompletedProcess(command, code, out, err)


def call(
    module: str,
    function: str,
    arguments: list[Any],
    environment: dict[str, str],
    folder: Path,
    timeout: float,
    command: list[str] | None = None,
) -> int | None:
    """Call a function of plain arguments in a fork; the exit code, as ``subprocess`` counts it, None: it took longer.

    ``environment`` is all that it has, ``folder`` gets its ``stdout`` and ``stderr``, ``command`` is its command line.
    """
    global _server
    if _server is None:
        _server = _Server()
    request = {"module": module, "function": function, "arguments": arguments, "env": environment,
               "cwd": str(Path.cwd()), "argv": command or [function], "folder": str(folder)}  # fmt: skip
    return _server.ask(request, timeout)


class _Server:
    """The process that forks. It ends with this one."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="forking-")
        self._address = str(Path(self._folder, "socket"))
        log = Path(self._folder, "log")
        with log.open("w") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forking", self._address],
                cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=stream, stderr=stream,
            )  # fmt: skip
        atexit.register(self.close)
        while not Path(self._address).exists():
            assert self._process.poll() is None, log.read_text()[-3000:]
            time.sleep(_POLL_SECONDS)

    def ask(self, request: dict[str, Any], timeout: float) -> int | None:
        """The exit code, as ``subprocess`` counts it; None where it took longer."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._address)
            connection.settimeout(timeout)
            connection.sendall(json.dumps(request).encode() + b"\n")
            try:
                answer = connection.recv(100)
            except TimeoutError:
                return None
        assert answer, "the forked process's keeper died"
        return int(answer)

    def close(self) -> None:
        """End the process, and remove its files."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _serve(address: str) -> None:
    """Fork a keeper for each connection, until the process that wanted this is gone."""
    _import_everything()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listening = socket.socket(socket.AF_UNIX)
    aside = address + ".new"
    listening.bind(aside)
    listening.listen(64)
    Path(aside).rename(address)
    wanted = os.getppid()
    listening.settimeout(5)
    while os.getppid() == wanted:
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            continue
        if os.fork() == 0:
            listening.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _keep(connection)
        connection.close()


def _import_everything() -> None:
    import vllm.entrypoints.cli.main
    import vllm.entrypoints.llm
    import vllm.v1.engine.core  # noqa: F401
    from vllm.model_executor.models import registry

    import vllm_neuron.cli.main
    import vllm_neuron.graphs.capture_workers
    import vllm_neuron.jobs.compare_routes
    import vllm_neuron.serve.platform  # noqa: F401

    # vLLM looks at each architecture in a process of its own, once per cache folder, and tests have many.
    registry._LazyRegisteredModel._get_cache_dir = staticmethod(lambda: MODEL_INFOS)  # type: ignore[method-assign]


def _keep(connection: socket.socket) -> NoReturn:
    """Run the one function that ``connection`` asks for, and answer with its exit code; kill it where nobody waits."""
    with connection.makefile() as lines:
        request = json.loads(lines.readline())
    child = os.fork()
    if child == 0:
        connection.close()
        _become(request)
    connection.setblocking(False)
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            connection.setblocking(True)
            connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            os._exit(0)
        try:
            if not connection.recv(1):
                os.killpg(child, signal.SIGKILL)
        except BlockingIOError:
            pass
        time.sleep(_POLL_SECONDS)


def _become(request: dict[str, Any]) -> NoReturn:
    """Be what was asked for: its session, streams, folder, environment and command line; then its function."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(request["folder"], name), os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = list(request["argv"])
    # Else click takes the program to be ``python -m`` of this module.
    sys.modules["__main__"].__package__ = None
    _forget_the_parent()
    function = getattr(importlib.import_module(request["module"]), request["function"])
    sys.exit(function(*request["arguments"]))


def _forget_the_parent() -> None:
    """What importing did in the parent, done again: it looked at the environment, and has files that stay its own."""
    from vllm_neuron import logs, metrics
    from vllm_neuron.execute.start_report import note_process_start
    from vllm_neuron.model.patches import configuration

    if metrics._shared is not None:
        metrics._shared._finalizer.detach()  # type: ignore[attr-defined]
    configuration.set_vllm_variables()
    metrics.share()
    note_process_start()
    logs.set_level()


if __name__ == "__main__":
    _serve(sys.argv[1])
