"""The command: which operators by which routes, into a file that an interrupted sweep goes on with; a summary."""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tools.opinfo.check import BACKENDS, FAULTS, Kind, Outcome
from tools.opinfo.pool import Task, sweep
from tools.opinfo.samples import operators

RESULTS = Path(".cache") / "opinfo.jsonl"


def main() -> None:
    """Parse the command line and run."""
    typer.run(_main)


def _main(
    results: Annotated[
        Path, typer.Option(help="One line of JSON for each operator and route; what is in it is done.")
    ] = RESULTS,
    route: Annotated[list[str], typer.Option(help="native or xla; by default both.")] = list(BACKENDS),  # noqa: B006
    only: Annotated[str, typer.Option(help="Operators by name, with commas between; by default all.")] = "",
    samples: Annotated[int, typer.Option(help="Samples of each dtype of an operator.")] = 4,
    workers: Annotated[int, typer.Option(help="Processes at once.")] = 2,
    seconds: Annotated[float, typer.Option(help="Time limit of a process, which compiles one operator.")] = 240,
    retry: Annotated[bool, typer.Option(help="Try again the operators that have a fault in the results.")] = False,
    summary: Annotated[bool, typer.Option(help="Run nothing: print the summary of the results.")] = False,
) -> None:
    """Torch's own operator tests, forward only, in f32, bf16, f16, int64 and bool, compared with eager PyTorch."""
    results.parent.mkdir(parents=True, exist_ok=True)
    if not summary:
        names = only.split(",") if only else list(operators())
        if unknown := [name for name in names if name not in operators()]:
            raise typer.BadParameter(f"torch has no operator tests of {', '.join(unknown)}")
        done = {key for key, line in read(results).items() if not (retry and faults(line))}
        tasks = [Task(name, one, samples) for one in route for name in names if (name, one) not in done]
        run(tasks, results, workers, seconds)
    show(read(results))


def run(tasks: list[Task], results: Path, workers: int, seconds: float) -> None:
    """Sweep ``tasks`` in a cache of their own, and append a line to ``results`` as each ends."""
    warm_up()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="opinfo-", ignore_cleanup_errors=True) as cache:
        os.environ["VLLM_CACHE_ROOT"] = cache
        for number, (task, outcomes, spent) in enumerate(sweep(tasks, workers, seconds), 1):
            line = {"operator": task.operator, "route": task.route, "seconds": round(spent, 1), "outcomes": outcomes}
            with results.open("a") as file:
                file.write(json.dumps(line) + "\n")
            counts = Counter(kind for kind, _ in outcomes.values())
            told = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "no samples"
            elapsed = time.monotonic() - begin
            typer.echo(f"{number}/{len(tasks)} {elapsed:.0f} s  {task.operator} ({task.route}): {told}")


def warm_up() -> None:
    """Import what every process needs before they are forked. Nothing is run: threads and devices survive no fork."""
    warnings.simplefilter("ignore")
    import jax  # noqa: F401
    import torch_mlir.extras.fx_importer  # noqa: F401

    import vllm_neuron.compile.backends
    import vllm_neuron.lowering.xla.trace  # noqa: F401

    torch.compile(lambda x: x + 1, backend="aot_eager", fullgraph=True, dynamic=False)(torch.ones(2))


def read(results: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The latest line of each operator and route."""
    lines = results.read_text().splitlines() if results.exists() else []
    found = [json.loads(line) for line in lines]
    return {(line["operator"], line["route"]): line for line in found}


def faults(line: dict[str, Any]) -> dict[str, Outcome]:
    """Of one line of results, the cases that are neither equal nor refused as they should be."""
    return {name: Outcome(*outcome) for name, outcome in line["outcomes"].items() if outcome[0] in FAULTS}


def verdict(line: dict[str, Any]) -> Kind | None:
    """Of an operator the worst that became of a case; None where it has none."""
    kinds = {Kind(kind) for kind, _ in line["outcomes"].values()}
    return max(kinds, key=list(Kind).index, default=None)


def show(found: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Print every fault, then operators by verdict, and cases by what became of them, for each route."""
    for (operator, route), line in sorted(found.items()):
        for name, outcome in faults(line).items():
            first_line = next(iter(outcome.text.splitlines()), "")[:200]
            typer.echo(f"{route} {operator} {name}: {outcome.kind}: {first_line}")
    for route in BACKENDS:
        lines = [line for (_, of), line in found.items() if of == route]
        for what, counts in (
            ("operators", Counter(filter(None, map(verdict, lines)))),
            ("cases", Counter(Kind(kind) for line in lines for kind, _ in line["outcomes"].values())),
        ):
            told = ", ".join(f"{counts[kind]} {kind}" for kind in Kind if counts[kind])
            typer.echo(f"{route}, {counts.total()} {what}: {told}")
        typer.echo(f"{route}: {sum(line['seconds'] for line in lines):.0f} s of one core and its compilers")
