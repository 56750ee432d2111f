"""One of many processes that start cold at once: resolves the same modules, and prints where each came from."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.compile.modules import scale
from vllm_neuron.compile.pipeline import Pipeline
from vllm_neuron.compile.pool import GraphRequest, resolve_all


def note_compilers(spawned: Path) -> None:
    """Write one line to ``spawned`` whenever this process starts a compiler, whether or not it succeeds."""

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "subprocess.Popen" and "supervisor.py" in str(arguments[1]):
            with spawned.open("a") as file:
                file.write("compiler\n")

    sys.addaudithook(hook)


def main() -> None:
    note_compilers(Path(sys.argv[1]))
    Path(sys.argv[2]).touch()
    sys.stdin.readline()
    requests = [GraphRequest(f"graph{n}", scale(n), {"graph": f"graph{n}"}) for n in range(1, 4)]
    outcomes = resolve_all(Pipeline.from_environment(), requests)
    print(json.dumps([outcome.resolution.source.value for outcome in outcomes if outcome.resolution]))


if __name__ == "__main__":
    main()
