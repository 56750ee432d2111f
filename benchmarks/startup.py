"""Measure start-up: from the start of the process to the first token over HTTP, ours and stock vLLM's, side by side.

Every variant is started in each round, one after the other, so that all see the same machine. What importing vLLM takes
is measured for both environments in the same rounds, to tell what a start adds to it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import httpx
from rich.table import Table

from benchmarks import report
from benchmarks.engines import ENGINES, OPTIONS, ROOT, Engine
from benchmarks.report import make_console
from tools import make_smollm2
from tools.server import Server, ServerError, serving

SCRATCH = ROOT / ".cache" / "startup"
MODEL = ROOT / ".cache" / "models" / "smollm2-135m-float32"
PROMPT = "The capital of France is"
LIMIT_S = 600
POLL_S = 0.05

console = make_console()


@dataclass(frozen=True)
class Variant:
    """One way to start. ``keeps``: the cache folder that it leaves for others; None for a new, empty one."""

    name: str
    engine: Engine
    keeps: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()


OURS, STOCK = ENGINES["ours"], ENGINES["stock"]
REMOTE = {"NEURON_LIBTORCH_REMOTE_CACHE": str(SCRATCH / "remote")}
VARIANTS = (
    Variant("ours cold", OURS),
    Variant("ours warm", OURS, "ours"),
    Variant("ours warm, captures", OURS, "ours", {"TORCH_CACHING_PRECOMPILE": "0"}),
    Variant("ours strict, from remote", OURS, None, REMOTE | {"VLLM_NEURON_DISABLE_WARMUP_COMPILE": "1"}),
    Variant("stock cold", STOCK),
    Variant("stock warm", STOCK, "stock"),
    Variant("stock enforce-eager", STOCK, "stock-eager", {}, ("--enforce-eager",)),
)


def environment(variant: Variant) -> dict[str, str]:
    """The variables of a start, with an emptied cache folder where the variant has none of its own."""
    folder = SCRATCH / (variant.keeps or "empty")
    if variant.keeps is None:
        shutil.rmtree(folder, ignore_errors=True)
    return variant.engine.environment(folder) | variant.variables


def first_token_seconds(variant: Variant) -> float:
    """Start, ask for one token as soon as the server answers, and end. Raises :class:`ServerError`."""
    command = [*variant.engine.command(MODEL, "float32"), *variant.options]
    log = SCRATCH / f"{variant.name.replace(' ', '-').replace(',', '')}.log"
    variables = environment(variant)
    begin = time.monotonic()
    with serving(command, variables, log) as server:
        _wait(server, begin)
        body = {"model": "bench", "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).raise_for_status()
        return time.monotonic() - begin


def _wait(server: Server, begin: float) -> None:
    while not server.ready():
        if server.process.poll() is not None:
            raise ServerError(f"the server ended with exit status {server.process.returncode}; see {server.log}")
        if time.monotonic() - begin > LIMIT_S:
            raise ServerError(f"not ready after {LIMIT_S} s; see {server.log}")
        time.sleep(POLL_S)


def import_seconds(engine: Engine) -> float:
    """What it takes to start Python and import vLLM's server."""
    command = [str(engine.vllm.with_name("python")), "-c", "import vllm.entrypoints.openai.api_server"]
    begin = time.monotonic()
    subprocess.run(command, env=engine.environment(SCRATCH / "imports"), check=True, capture_output=True)
    return time.monotonic() - begin


def prepare(variants: list[Variant]) -> None:
    """Fill what later starts are to find: the remote tier, and the caches that are kept."""
    shutil.rmtree(SCRATCH, ignore_errors=True)
    SCRATCH.mkdir(parents=True)
    make_smollm2.make(MODEL, "float32")
    if any(variant.variables.get("NEURON_LIBTORCH_REMOTE_CACHE") for variant in variants):
        command = [str(OURS.vllm.with_name("vllm-neuron")), "compile", str(MODEL), *OPTIONS, "--dtype", "float32"]
        command += ["--target", "cpu", "--remote", str(SCRATCH / "remote")]
        subprocess.run(command, env=OURS.environment(SCRATCH / "build"), check=True, capture_output=True)
    for keeps in sorted({variant.keeps for variant in variants if variant.keeps}):
        variant = next(variant for variant in variants if variant.keeps == keeps)
        seconds = first_token_seconds(variant)
        console.print(f"cache of {keeps} filled: {seconds:.1f} s")


def show(seconds: dict[str, list[float]], imports: dict[str, float]) -> list[dict[str, object]]:
    """Print medians and ratios; return them as plain values."""
    medians = {name: statistics.median(values) for name, values in seconds.items() if values}
    rows: list[dict[str, object]] = []
    table = Table("start", title="From process start to the first token over HTTP, seconds", title_justify="left")
    for column in ("median", "all", "after vLLM's imports", "to stock enforce-eager", "to stock warm, after imports"):
        table.add_column(column, justify="right")
    engine_of = {variant.name: variant.engine.name for variant in VARIANTS}
    after = {name: value - imports[engine_of[name]] for name, value in medians.items()}
    for name, value in medians.items():
        eager, warm = medians.get("stock enforce-eager"), after.get("stock warm")
        to_eager = f"{value / eager:.2f}" if eager else "-"
        to_warm = f"{after[name] / warm:.2f}" if warm else "-"
        runs = " ".join(f"{each:.1f}" for each in seconds[name])
        table.add_row(name, f"{value:.1f}", runs, f"{after[name]:.1f}", to_eager, to_warm)
        rows.append({"start": name, "median_s": value, "runs_s": seconds[name], "after_imports_s": after[name]})
    console.print(table)
    console.print("importing vLLM takes " + ", ".join(f"{name} {value:.1f} s" for name, value in imports.items()))
    return rows


def main() -> int:
    """Run the benchmark, print its table, and write the results. Returns 1 if a server failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variants", nargs="+", choices=[variant.name for variant in VARIANTS])
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args()
    variants = [variant for variant in VARIANTS if not given.variants or variant.name in given.variants]
    if not STOCK.vllm.exists():
        console.print("stock vLLM is not installed: its starts are left out. `make bench-setup` installs it.")
        variants = [variant for variant in variants if variant.engine is not STOCK]
    seconds: dict[str, list[float]] = {variant.name: [] for variant in variants}
    imports: dict[str, list[float]] = {variant.engine.name: [] for variant in variants}
    engines = {variant.engine.name: variant.engine for variant in variants}
    try:
        prepare(variants)
        for number in range(given.rounds):
            for name, engine in engines.items():
                imports[name].append(import_seconds(engine))
            for variant in variants:
                seconds[variant.name].append(first_token_seconds(variant))
                console.print(f"round {number}: {variant.name}: {seconds[variant.name][-1]:.1f} s")
    except (ServerError, subprocess.CalledProcessError, httpx.HTTPError) as error:
        console.print(f"[bold red]startup benchmark failed:[/] {error}")
        return 1
    medians = {name: statistics.median(values) for name, values in imports.items()}
    rows = show(seconds, medians)
    given.output.mkdir(parents=True, exist_ok=True)
    path = given.output / f"startup-{datetime.now(UTC).strftime('%Y-%m-%dT%H%MZ')}.json"
    about = report.machine() | {"options": " ".join(OPTIONS), "rounds": given.rounds}
    path.write_text(json.dumps({"about": about, "imports_s": medians, "starts": rows}, indent=2) + "\n")
    console.print(f"wrote {path}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
