"""One of many processes that start cold at once: resolves the same modules, and prints where each came from."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.compile.modules import scale
from tests.support.cold_starts import note_compilers, wait_for_the_others
from vllm_neuron.compile.pipeline import Pipeline
from vllm_neuron.compile.pool import GraphRequest, resolve_all


def main() -> None:
    note_compilers(Path(sys.argv[1]))
    wait_for_the_others(Path(sys.argv[2]))
    requests = [GraphRequest(f"graph{n}", scale(n), {"graph": f"graph{n}"}) for n in range(1, 4)]
    outcomes = resolve_all(Pipeline.from_environment(), requests)
    print(json.dumps([outcome.resolution.source.value for outcome in outcomes if outcome.resolution]))


if __name__ == "__main__":
    main()
