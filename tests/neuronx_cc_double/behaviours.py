"""What the double plays: one line of a script per compile, and the last line for every compile after that.

``NEURONX_CC_DOUBLE`` names the script. Beside it, in a folder of its name and ``.calls``, the double leaves a file per
compile, ``<number>.json``, with its arguments, its working directory and the process ids of itself and its children.

================== =======================================================================================
``works``          writes a NEFF
``slow SECONDS``   works, later
``hangs``          never ends, deaf to SIGTERM
``killed``         ends by SIGKILL, as when the kernel lacks memory
``memory``         ``[F137]``, exit 70
``aborts``         ``[F134]``, exit 70
``code CODE TEXT`` an error line with a code such as ``NCC_EOOM002``, exit 70
``internal``       ``[INTERNAL_ERROR] [NCC_INAS001]``, exit 70
``exits NUMBER``   exits with the number, and says nothing
``crashes``        a Python traceback, exit 1
``targets NAMES``  works, and knows only these targets, separated by commas
``truncates``      writes half a NEFF, exit 0
``no artifact``    exit 0
``floods``         writes 50 MB to its output before it fails, exit 70
================== =======================================================================================
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

VARIABLE = "NEURONX_CC_DOUBLE"


def next_behaviour(argv: Sequence[str]) -> tuple[str, Callable[[Sequence[int]], None]]:
    """This compile's line of the script, ``works`` without one, and what notes the process ids of its children."""
    script = Path(os.environ.get(VARIABLE) or os.devnull)
    lines = [line.strip() for line in script.read_text().splitlines() if line.strip()] or ["works"]
    if script == Path(os.devnull):
        return lines[0], lambda _: None
    call = {"argv": list(argv), "cwd": str(Path.cwd()), "pids": [os.getpid()]}
    file = _record(calls_folder(script), call)

    def note(children: Sequence[int]) -> None:
        file.write_text(json.dumps({**call, "pids": [os.getpid(), *children]}))

    return lines[min(int(file.stem), len(lines) - 1)], note


def calls_folder(script: Path) -> Path:
    """Where the compiles of a script leave their files."""
    return script.with_name(f"{script.name}.calls")


def _record(folder: Path, call: dict[str, object]) -> Path:
    folder.mkdir(exist_ok=True)
    number = 0
    while True:
        path = folder / f"{number}.json"
        try:
            with path.open("x") as file:
                json.dump(call, file)
            return path
        except FileExistsError:
            number += 1


def play(behaviour: str) -> None:
    """Do what goes wrong, or takes long; return where a NEFF is to be written all the same."""
    name, _, rest = behaviour.partition(" ")
    if name == "slow":
        time.sleep(float(rest))
    elif name == "hangs":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)
    elif name == "killed":
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    elif name == "memory":
        fail(
            "[F137] neuronx-cc was forcibly killed - This most commonly occurs due to insufficient system memory. "
            "Using a smaller data type, dimensions, batch size, or a larger instance type may help."
        )
    elif name == "aborts":
        fail("[F134] neuronx-cc terminated abnormally - Please open a support ticket")
    elif name == "code":
        code, _, text = rest.partition(" ")
        fail(f"2026-01-01T00:00:00Z ERROR 1 [Tensorizer]: [{code}] {text}")
    elif name == "internal":
        fail("[INTERNAL_ERROR] [NCC_INAS001] An Internal Compiler Error has occurred")
    elif name == "exits":
        end(int(rest))
    elif name == "crashes":
        raise RuntimeError("played by the test double")
    elif name == "no":
        end(0)
    elif name == "floods":
        for _ in range(500):
            print("x" * 99_999)
        fail("[INTERNAL_ERROR] [NCC_INAS001] after many words")
    elif name not in ("works", "targets", "truncates"):
        raise ValueError(f"no such behaviour: {behaviour}")


def fail(line: str) -> None:
    """End as the real one does when it can't compile."""
    print(line)
    print("neuronx-cc ended with an error; see the log")
    end(70)


def end(code: int) -> None:
    """End without a word to the children, as the real one does."""
    sys.stdout.flush()
    os._exit(code)
