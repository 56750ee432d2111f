"""Work in forked processes, so that a crash or a hang costs one case and the sweep goes on."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from tools.opinfo.check import Kind, Outcome, check
from tools.opinfo.samples import cases

_fork = multiprocessing.get_context("fork")


@dataclass
class Task:
    """Cases of one operator by one route: those that are named, or all."""

    operator: str
    route: str
    limit: int
    names: list[str] | None = None


@dataclass
class _Running:
    task: Task
    process: Any
    pipe: Any
    deadline: float
    trying: list[str] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)


def sweep(tasks: Iterable[Task], workers: int, seconds: float) -> Iterator[tuple[Task, dict[str, Outcome], float]]:
    """The outcomes of each task's cases, by name, and its seconds, in the order in which tasks end.

    ``seconds`` is the limit of one process, after which what it was at is tried case by case, then given up.
    """
    waiting, running = deque(tasks), list[_Running]()
    found: dict[tuple[str, str], dict[str, Outcome]] = {}
    spent: dict[tuple[str, str], float] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            running.append(_start(waiting.popleft(), seconds))
        ended = _wait(running)
        for one in ended:
            running.remove(one)
            key = (one.task.operator, one.task.route)
            found.setdefault(key, {}).update(one.outcomes)
            spent[key] = spent.get(key, 0.0) + time.monotonic() - (one.deadline - seconds)
            waiting.extendleft(_left(one, found[key]))
            if not any((task.operator, task.route) == key for task in (*waiting, *(r.task for r in running))):
                yield one.task, found.pop(key), spent[key]


def _start(task: Task, seconds: float) -> _Running:
    ours, theirs = _fork.Pipe(duplex=False)
    process = _fork.Process(target=_work, args=(task, theirs))
    process.start()
    theirs.close()
    return _Running(task, process, ours, time.monotonic() + seconds)


def _work(task: Task, pipe: Any) -> None:
    os.setsid()
    for number in (0, 1, 2):
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
    batch = [case for case in cases(task.operator, task.limit) if task.names is None or case.name in task.names]
    pipe.send(("cases", [case.name for case in batch], []))
    if batch:
        check(task.operator, batch, task.route, lambda names, outcomes: pipe.send(("trying", names, outcomes)))
    pipe.send(("end", [], []))


def _wait(running: Sequence[_Running]) -> list[_Running]:
    """Those that have ended, well or not, once there are some."""
    while True:
        pipes: dict[Any, _Running] = {one.pipe: one for one in running}
        ended = []
        for pipe in wait(list(pipes), timeout=1.0):
            one = pipes[pipe]
            try:
                _note(one, *one.pipe.recv())
            except EOFError:
                ended.append(one)
        late = [one for one in running if one not in ended and time.monotonic() > one.deadline]
        for one in (*late, *ended):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.process.pid, signal.SIGKILL) if one in late else None
            one.process.join()
            one.pipe.close()
        if late or ended:
            return [*late, *ended]


def _note(one: _Running, event: str, names: list[str], outcomes: list[Outcome]) -> None:
    if event == "cases":
        one.pending = list(names)
    elif event == "end":
        one.trying = []
    elif outcomes:
        one.outcomes.update(zip(names, outcomes, strict=True))
        one.pending = [name for name in one.pending if name not in one.outcomes]
        one.trying = []
    else:
        one.trying = list(names)


def _left(one: _Running, found: dict[str, Outcome]) -> list[Task]:
    """What an ended process leaves to do: each case of the graph that it died of by itself, and the rest together."""
    task, code = one.task, one.process.exitcode
    if not one.pending and not one.trying:
        if code and not found:
            found["samples"] = Outcome(Kind.ERROR, f"the samples can't be made: exit code {code}")
        return []
    if len(one.trying) == 1:
        late = time.monotonic() > one.deadline
        ending = Outcome(Kind.TIMEOUT) if late else Outcome(Kind.CRASH, f"exit code {code}")
        found[one.trying[0]] = ending
    singles = one.trying if len(one.trying) > 1 else []
    rest = [name for name in one.pending if name not in one.trying]
    return [
        *(Task(task.operator, task.route, task.limit, [name]) for name in singles),
        *([Task(task.operator, task.route, task.limit, rest)] if rest else []),
    ]
