"""The test double of neuronx-cc as a program."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.neuronx_cc_double import arguments, behaviours, modules, neff

_CHILDREN = 2


def main(argv: Sequence[str], version: str) -> None:
    """Run with the words after the program's name. Always exits."""
    if argv[:1] == ["--version"]:
        print(f"NeuronX Compiler version {version}\n\nPython version {sys.version.split()[0]}\n\nTest double")
        sys.exit(0)
    if argv[:1] != ["compile"]:
        print("usage: neuronx-cc compile MODULE ...\nneuronx-cc: error: the command is compile", file=sys.stderr)
        sys.exit(2)
    if "--help" in argv or "-h" in argv:
        raise AttributeError("'NoneType' object has no attribute 'help'")  # as at least one release does
    _compile(argv[1:], version)


def _compile(argv: Sequence[str], version: str) -> None:
    behaviour, note = behaviours.next_behaviour(argv)
    known = behaviour.removeprefix("targets ").split(",") if behaviour.startswith("targets ") else arguments.TARGETS
    given = arguments.parse(argv, known)
    _leave_scratch(given.logfile, behaviour)
    if arguments.bad_logical_cores(given):
        behaviours.fail(f"ERROR: [NCC_EARG001] {given.target} does not support a logical core of {given.lnc} cores")
    try:
        modules.check(given.module)
    except modules.MalformedModuleError as error:
        behaviours.fail(f"ERROR: {given.module.name} can't be parsed: {error}")
    children = [_child() for _ in range(_CHILDREN)]
    note(children)
    behaviours.play(behaviour)
    files = {
        "TEST_DOUBLE": b"Made by a test double of neuronx-cc: it runs nowhere.\n",
        "arguments": repr(argv).encode(),
    }
    made = neff.make(given.output.stem, files, version, int(given.lnc or 1))
    given.output.write_bytes(made[: len(made) // 2] if behaviour == "truncates" else made)
    for child in children:
        os.kill(child, signal.SIGKILL)
    print("Compiler status PASS")


def _child() -> int:
    """A worker in a session of its own: left behind unless this process ends it."""
    child = os.fork()
    if not child:
        os.setsid()
        time.sleep(3600)
        os._exit(0)
    return child


def _leave_scratch(log: Path, behaviour: str) -> None:
    log.write_text(f"2026-01-01T00:00:00Z INFO 1 [root]: test double, to play: {behaviour}\n")
    Path("sg00").mkdir(exist_ok=True)
    Path("sg00", "penguin.py").write_text("# scratch\n")
    Path("global_metric_store.json").write_text("{}\n")
