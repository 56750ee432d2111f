"""Measure ours, eager PyTorch and stock vLLM for CPUs side by side: rates of prefill and decode, and time to ready.

For each dtype every engine is started twice, with an empty cache and with the one that the first start left. Then all
engines stay up, idle, and each round measures one after the other.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from rich.table import Table

from benchmarks import load, report
from benchmarks.engines import ENGINES, OPTIONS, ROOT, Engine
from benchmarks.report import Series, make_console
from tools import make_smollm2
from tools.server import Server, ServerError, end_servers_on_sigterm, serving

SCRATCH = ROOT / ".cache" / "bench"

console = make_console()


@dataclass(frozen=True)
class Plan:
    """How much is measured. Lengths are in tokens."""

    rounds: int
    prompt_tokens: int
    output_tokens: int
    dtypes: list[str]
    engines: list[Engine]


def measures(plan: Plan) -> dict[str, Callable[[str, int], float]]:
    """By column, a function of a server's URL and a seed."""
    found: dict[str, Callable[[str, int], float]] = {}
    for streams in (1, 8):
        found[f"prefill_{streams}"] = partial(load.prefill_rate, streams=streams, length=plan.prompt_tokens)
        found[f"decode_{streams}"] = partial(load.decode_rate, streams=streams, length=plan.output_tokens)
    return found


def start(stack: ExitStack, engine: Engine, dtype: str, label: str) -> tuple[Server, float]:
    """Start a server that ends with ``stack``. Returns it, and the seconds until it was ready."""
    model = ROOT / ".cache" / "models" / f"smollm2-135m-{dtype}"
    log = SCRATCH / f"{engine.name}-{dtype}.log"
    begin = time.monotonic()
    server = stack.enter_context(serving(engine.command(model, dtype), engine.environment(log.with_suffix("")), log))
    try:
        server.wait(f"{engine.name}, {dtype}: {label} start", console)
    except ServerError:
        console.print(f"see {log}", markup=False)
        raise
    seconds = time.monotonic() - begin
    console.print(f"{engine.name}, {dtype}: ready after {seconds:.1f} s, {label}")
    return server, seconds


def measure(plan: Plan, dtype: str) -> list[Series]:
    """All series of one dtype, in the order of ``plan.engines``."""
    series = [Series(engine.name, dtype) for engine in plan.engines]
    for engine, one in zip(plan.engines, series, strict=True):
        with ExitStack() as stack:
            one.add("start_cold_s", start(stack, engine, dtype, "cold")[1])
    with ExitStack() as stack:
        servers = []
        for engine, one in zip(plan.engines, series, strict=True):
            server, seconds = start(stack, engine, dtype, "warm")
            one.add("start_warm_s", seconds)
            one.tokens = load.greedy_tokens(server.url, 32)
            servers.append(server)
        for number in range(-1, plan.rounds):
            for one, server in zip(series, servers, strict=True):
                run_round(plan, one, server, number)
    return series


def run_round(plan: Plan, one: Series, server: Server, number: int) -> None:
    """Measure every rate of one engine once. Round -1 is for warming up, and is not kept."""
    seed = 100 + number
    rates = {column: rate(server.url, seed) for column, rate in measures(plan).items()}
    shown = ", ".join(f"{column} {value:.0f}" for column, value in rates.items())
    console.print(f"{one.engine}, {one.dtype}, {f'round {number}' if number >= 0 else 'warm-up'}: {shown}")
    if number >= 0:
        for column, value in rates.items():
            one.add(column, value)


def show(series: list[Series]) -> None:
    """Print the table of results."""
    header, *body = report.rows(series)
    table = Table(*header, title="Side by side, in one run")
    for row in body:
        table.add_row(*row)
    console.print(table)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="float32 only, two short rounds")
    parser.add_argument("--rounds", type=int, help="rounds that are kept (default 5, or 2 with --quick)")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"])
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args()


def main() -> int:
    """Run the benchmark, print its table, and write the results. Returns 1 if a server failed."""
    given = arguments()
    end_servers_on_sigterm()
    plan = Plan(
        rounds=given.rounds or (2 if given.quick else 5),
        prompt_tokens=512,
        output_tokens=32 if given.quick else 128,
        dtypes=given.dtypes or (["float32"] if given.quick else ["float32", "bfloat16"]),
        engines=[ENGINES[name] for name in given.engines],
    )
    about = report.machine() | {
        "options": " ".join(OPTIONS),
        "prompt_tokens": plan.prompt_tokens,
        "output_tokens": plan.output_tokens,
        "rounds": plan.rounds,
    }
    series: list[Series] = []
    shutil.rmtree(SCRATCH, ignore_errors=True)
    SCRATCH.mkdir(parents=True)
    try:
        for dtype in plan.dtypes:
            make_smollm2.make(ROOT / ".cache" / "models" / f"smollm2-135m-{dtype}", dtype)
            series += measure(plan, dtype)
    except ServerError as error:
        console.print(f"[bold red]bench failed:[/] {error}")
        return 1
    show(series)
    name = datetime.now(UTC).strftime("%Y-%m-%dT%H%MZ")
    for path in report.write(given.output, name, series, about):
        console.print(f"wrote {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
