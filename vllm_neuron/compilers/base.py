"""What a device compiler is to the rest, and the one way to run one: in a subprocess, supervised, with its log kept."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from vllm_neuron import envs
from vllm_neuron.compilers import supervisor
from vllm_neuron.compilers.supervisor import Job, Result
from vllm_neuron.errors import CompileError, CompilerMemoryError

if TYPE_CHECKING:
    from vllm_neuron.lowering.module import ModuleIdentity
    from vllm_neuron.targets import Target

LOG_NAME = "compiler.log"
COMMAND_NAME = "command.txt"
_TAIL_LINES = 15
_LINE_LIMIT = 300
_SIGNALS = 32  # A shell that ran the compiler adds 128 to the number of the signal that ended it.
_REPORT = (
    "If it happens again, report it to the compiler's makers. What reproduces it is beside the log: the module, and "
    "the command line in command.txt"
)


class Compiler(Protocol):
    """A device compiler: how it is called, and how its artifacts and its failures are read."""

    name: str
    artifact_suffix: str
    formats: Sequence[str]  # of modules (``LoweredModule.format``) that it takes
    memory_bytes: int  # host memory to reserve for one compile
    error_pattern: re.Pattern[str]  # the first log line that it matches names the cause of a failure
    memory_pattern: re.Pattern[str]  # what its log says where this host's memory was too small
    log_file: str  # a log that the compiler writes into its working directory; "" for none

    def version(self) -> str:
        """The exact version, part of the key. Cheap."""

    def flags(self, target: Target, level: int, module: ModuleIdentity) -> tuple[str, ...]:
        """Everything that decides the artifact, but the module: canonical, without paths; part of the key."""

    def command(self, module_path: Path, artifact_path: Path, flags: Sequence[str]) -> list[str]:
        """The command line. Raises ``CompileError`` that says how to get the compiler where it is missing."""

    def verify(self, artifact: Path) -> None:
        """Raises ``CompileError`` unless the file has the structure of a whole artifact."""

    def required_features(self, target: Target) -> tuple[str, ...]:
        """Processor features, in LLVM's spelling, that a host needs to load an artifact for that target."""

    def advice(self, returncode: int, log: str) -> str:
        """What to do about a failure that is known from its exit code or the end of its log; else ''."""


@dataclass(frozen=True)
class CompileReport:
    """One compile that succeeded. ``peak_memory_bytes`` is of the compiler and all that it started."""

    artifact: Path
    seconds: float
    peak_memory_bytes: int
    command: list[str]
    log: Path


def _iree() -> Compiler:
    from vllm_neuron.compilers.iree import IreeCompiler

    return IreeCompiler()


def _neuronx_cc() -> Compiler:
    from vllm_neuron.compilers.neuronx_cc import NeuronxCompiler

    return NeuronxCompiler()


# By the name that a target gives. Each is imported when it is asked for: a start that only hits loads no compiler.
_COMPILERS: dict[str, Callable[[], Compiler]] = {"iree": _iree, "neuronx-cc": _neuronx_cc}


def compiler_for(target: Target) -> Compiler:
    """The compiler of the target. Raises ``CompileError`` where the target names none of those that there are."""
    make = _COMPILERS.get(target.compiler)
    if make is None:
        raise CompileError(
            f"the target {target.name} names the compiler {target.compiler!r}; the compilers are: "
            f"{', '.join(_COMPILERS)}. Add it to the table in compilers/base.py"
        )
    return make()


def check_compiler(target: Target) -> None:
    """Raises ``CompileError`` where the target's compiler is not here: how to get it, and what goes without it."""
    compiler_for(target).command(Path("module"), Path("artifact"), ())


def run_compiler(
    compiler: Compiler,
    folder: Path,
    module_file: str,
    flags: Sequence[str],
    artifact_file: str,
    timeout: float | None = None,
) -> CompileReport:
    """Compiles ``folder/module_file`` to ``folder/artifact_file``, and verifies it.

    Writes ``compiler.log`` and ``command.txt`` beside them. The compiler works in a scratch folder, under the files'
    bare names, so that no path gets into the artifact. Killing the caller at any moment leaves no process of the
    compiler. ``timeout`` is in seconds. Raises ``CompileError`` with a diagnosis, ``CompilerMemoryError`` where this
    host's memory was too small; then there is no artifact.
    """
    folder = folder.absolute()
    command = compiler.command(Path(module_file), Path(artifact_file), flags)
    (folder / COMMAND_NAME).write_text(shlex.join([Path(command[0]).name, *command[1:]]) + "\n")
    job = Job(
        command=command,
        scratch=str(folder / f".scratch-{uuid.uuid4().hex}"),
        module=str(folder / module_file),
        artifact=str(folder / artifact_file),
        log=str(folder / LOG_NAME),
        extra_log=compiler.log_file,
        timeout=timeout,
        parent=os.getpid(),
    )
    result = _supervise(job)
    if result is None or result["outcome"] != "exited" or result["returncode"]:
        raise _failure(compiler, job, result)
    artifact = folder / artifact_file
    if not artifact.exists():
        raise CompileError(
            f"{compiler.name} ended without an error and without an artifact. {_REPORT}. Log: {job['log']}"
        )
    try:
        compiler.verify(artifact)
    except CompileError as error:
        artifact.unlink()
        raise CompileError(
            f"{compiler.name} ended without an error, but {error}. {_REPORT}. Log: {job['log']}"
        ) from None
    return CompileReport(artifact, result["seconds"], result["peak_memory_bytes"], command, folder / LOG_NAME)


def _supervise(job: Job) -> Result | None:
    """The result of the job; None if the supervisor was killed, and then the compiler's processes are, too."""
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", supervisor.__file__, json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a terminal's interrupt goes to the caller, which ends the compile in good order
        )
    except OSError as error:
        raise CompileError(f"no process can be started to compile in: {error}") from error
    assert process.stdin is not None
    assert process.stdout is not None
    output = b""
    try:
        output = process.stdout.read()
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.wait()
        process.stdout.close()
        if not output:
            _kill_strays(job["scratch"])
            shutil.rmtree(job["scratch"], ignore_errors=True)
    return json.loads(output) if output else None


def _kill_strays(scratch: str) -> None:
    """Kills the processes of a compile whose supervisor is gone: their environment names its scratch folder."""
    mark = os.fsencode(f"TMPDIR={scratch}")
    deadline = time.monotonic() + supervisor.KILL_SECONDS
    while time.monotonic() < deadline:
        strays = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    strays.append(int(path.parent.name))
        if not strays:
            return
        for pid in strays:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _failure(compiler: Compiler, job: Job, result: Result | None) -> CompileError:
    """One line: how the compile ended, which operation of the module and which line of the log is the cause, advice."""
    log = Path(job["log"])
    first_error, tail = _read_log(log, compiler.error_pattern)
    text = f"{first_error}\n{tail}"
    returncode = result["returncode"] if result and result["outcome"] == "exited" else 0
    killed = returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    advice = compiler.advice(returncode, text) if returncode else ""
    if result and result["outcome"] == "timeout":
        advice = f"If it was making progress, raise {envs.COMPILER_TIMEOUT.name}"
    operation = _operation(first_error, log.parent)
    parts = [
        f"{compiler.name} {_ending(job, result)}",
        operation and f"At {operation}",
        first_error and f"First error: {first_error}",
        advice or (_memory_advice() if killed else _REPORT),
        f"Log: {log}",
    ]
    message = ". ".join(part.rstrip(".") for part in parts if part)
    lacked_memory = killed or (returncode and compiler.memory_pattern.search(text))
    return CompilerMemoryError(message) if lacked_memory else CompileError(message)


def _operation(error: str, folder: Path) -> str:
    """The operation that an error is about, and its result, where the error begins with a place in an MLIR file."""
    place = re.match(r"([\w.-]+\.mlir):(\d+):", error)
    if not place:
        return ""
    with contextlib.suppress(OSError), (folder / place[1]).open(errors="replace") as lines:
        for line in itertools.islice(lines, int(place[2]) - 1, int(place[2])):
            name = re.search(r"\b(?:stablehlo|chlo)\.\w+", line)
            return f"{name[0]} of {line[:_LINE_LIMIT].rstrip().rpartition(' ')[2]}" if name else ""
    return ""


def _ending(job: Job, result: Result | None) -> str:
    if result is None:
        return "was killed, together with the process that supervised it"
    if result["outcome"] == "not-started":
        return f"could not be started: {result['error']}"
    if result["outcome"] == "timeout":
        return f"was stopped after {job['timeout']:g} s, its time limit"
    if result["outcome"] == "stopped":
        return "was stopped by a signal to the process that supervised it"
    if result["returncode"] < 0:
        return f"was ended by signal {-result['returncode']} ({signal.strsignal(-result['returncode'])})"
    number = result["returncode"] - 128
    signalled = f", as after signal {number} ({signal.strsignal(number)})" if 0 < number < _SIGNALS else ""
    return f"failed with exit code {result['returncode']}{signalled}"


def _memory_advice() -> str:
    workers = envs.COMPILE_WORKERS
    return (
        f"Most likely the machine ran out of memory: lower {workers.name} (now {workers.get()}), or give it more memory"
    )


def _read_log(log: Path, pattern: re.Pattern[str]) -> tuple[str, str]:
    """The first line that matches, and the last lines. Logs may be large: lines are cut, and only few are kept."""
    first, tail = "", deque[str](maxlen=_TAIL_LINES)
    with contextlib.suppress(FileNotFoundError), log.open(errors="replace") as lines:
        while line := lines.readline(1 << 16):
            short = line.strip()[:_LINE_LIMIT]
            if short:
                tail.append(short)
            if not first and pattern.search(line):
                first = short
    return first, "\n".join(tail)
