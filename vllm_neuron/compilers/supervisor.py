"""Runs one compiler, and lets nothing of it outlive its caller.

A standalone script of the standard library only, started as ``python -I -S supervisor.py JOB``, where JOB is a JSON
object: see :class:`Job`. Its standard input is a pipe that the caller holds open, so that the end of it means that
the caller is dead. Its standard output gets one JSON object: see :class:`Result`.

Whatever the compiler starts, in whatever session, becomes a child of this process when its own parent dies. So on the
caller's death, a time limit or a signal, all of it can be found and killed, and so it is after a normal end. Should
this process itself be killed, the kernel kills the compiler, and the caller looks for what is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, TypedDict

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 1.0
KILL_SECONDS = 30.0  # a process in an uninterruptible wait can't be killed; it is not waited for longer than this
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Job(TypedDict):
    """What to run. The compiler's working directory is ``scratch``, made here and removed here."""

    command: list[str]
    scratch: str
    module: str  # copied into the scratch folder first
    artifact: str  # where the scratch folder's file of that name is moved on success
    log: str  # gets the compiler's output
    extra_log: str  # a log that the compiler writes in its working directory, appended to the other; "" for none
    timeout: float | None  # seconds
    parent: int  # the caller's process id


class Result(TypedDict):
    """How it ended: ``exited``, ``timeout``, ``stopped`` (by a signal or the caller's end) or ``not-started``."""

    outcome: str
    returncode: int  # of the compiler; negative for a signal
    error: str
    seconds: float
    peak_memory_bytes: int


class Supervisor:
    """One run of one job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.scratch = Path(job["scratch"])
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.wake, wake_writer = os.pipe()
        os.set_blocking(wake_writer, False)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.peak = 0

    def run(self) -> Result:
        """Runs the job to its end. Nothing of the compiler is alive, and no scratch folder is there, on return."""
        begin = time.monotonic()
        outcome, returncode, error = "not-started", 0, ""
        try:
            self.scratch.mkdir()
            shutil.copyfile(self.job["module"], self.scratch / Path(self.job["module"]).name)
            Path(self.job["artifact"]).unlink(missing_ok=True)
            with Path(self.job["log"]).open("wb") as log:
                outcome, returncode = self._watch(self._start(log), begin)
                kill_descendants()
                self._append_extra_log(log)
            made = self.scratch / Path(self.job["artifact"]).name
            if outcome == "exited" and returncode == 0 and made.exists():
                made.replace(self.job["artifact"])
        except OSError as problem:
            error = str(problem)
        finally:
            kill_descendants()
            shutil.rmtree(self.scratch, ignore_errors=True)
        largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        return Result(
            outcome=outcome,
            returncode=returncode,
            error=error,
            seconds=time.monotonic() - begin,
            peak_memory_bytes=max(self.peak, largest),
        )

    def _start(self, log: IO[bytes]) -> int:
        def die_with_supervisor() -> None:
            self.libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != supervisor:
                os._exit(1)

        supervisor = os.getpid()
        # Temporary files belong to the scratch folder too; the caller also knows the compiler's processes by this.
        environment = {**os.environ, "TMPDIR": str(self.scratch)}
        process = subprocess.Popen(
            self.job["command"],
            cwd=self.scratch,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_supervisor,
        )
        process.returncode = 0  # reaped by _watch, with the rest of the family
        return process.pid

    def _watch(self, compiler: int, begin: float) -> tuple[str, int]:
        """Waits for the end of the compiler, of the caller, of the time, or for a signal: ``(outcome, returncode)``."""
        limit = self.job["timeout"]
        while True:
            if (status := reap(compiler)) is not None:
                return "exited", os.waitstatus_to_exitcode(status)
            left = POLL_SECONDS if limit is None else begin + limit - time.monotonic()
            if left <= 0:
                return "timeout", 0
            self.peak = max(self.peak, sum(descendants().values()))
            ready, _, _ = select.select([sys.stdin, self.wake], [], [], min(left, POLL_SECONDS))
            # A process that the caller has forked may hold the pipe open after its death: hence the second condition.
            if sys.stdin in ready or os.getppid() != self.job["parent"]:
                return "stopped", 0
            if self.wake in ready and any(number in STOP_SIGNALS for number in os.read(self.wake, 1024)):
                return "stopped", 0

    def _append_extra_log(self, log: IO[bytes]) -> None:
        if self.job["extra_log"]:
            with contextlib.suppress(FileNotFoundError), (self.scratch / self.job["extra_log"]).open("rb") as extra:
                log.seek(0, os.SEEK_END)
                shutil.copyfileobj(extra, log)


def reap(compiler: int) -> int | None:
    """Collects every child that has ended. The compiler's wait status if it is among them, else None."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == compiler:
                return ended[1]
    return None


def descendants() -> dict[int, int]:
    """The process ids of all descendants of this process, with the bytes of memory that each holds."""
    parents, memory = {}, {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            # The process may end at any moment. Its name, in parentheses, may hold anything.
            with contextlib.suppress(OSError):
                fields = Path(entry.path, "stat").read_text(errors="replace").rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
                memory[int(entry.name)] = int(fields[21]) * resource.getpagesize()
    found, front = {}, [os.getpid()]
    while front:
        front = [pid for pid, parent in parents.items() if parent in front]
        found.update({pid: memory[pid] for pid in front})
    return found


def kill_descendants() -> None:
    """Kills and collects until no child is left. Orphans among them become children of this process meanwhile."""
    deadline = time.monotonic() + KILL_SECONDS
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            for pid in descendants():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.005)


def main() -> None:
    """Runs the job of the command line and prints its result; a caller that is gone gets none."""
    result = Supervisor(json.loads(sys.argv[1])).run()
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps(result).encode())


if __name__ == "__main__":
    main()
