"""``vllm-neuron targets``: what can be compiled for, and what of it runs here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from vllm_neuron.compilers.base import compiler_for
from vllm_neuron.errors import NeuronError
from vllm_neuron.targets import Target, compile_target, resolve_target, target_names


def show_targets(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """List the targets, their compilers, and whether each is usable here."""
    rows = [_row(name) for name in target_names()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table()
    for column in ("target", "stands for", "compiler", "memory", "compiles here", "runs here"):
        table.add_column(column, no_wrap=column == "target", overflow="fold")
    for row in rows:
        table.add_row(
            row["name"],
            row["canonical"] if row["canonical"] != row["name"] else "",
            row["compiler"],
            f"{row['memory_bytes'] / 2**30:.0f} GiB" if row["memory_bytes"] else "",
            row["compiles_here"],
            "yes" if row["runs_here"] else "no",
        )
    console = Console()
    console.print(table)
    console.print(f"Target in force: {compile_target().name}", highlight=False)


def _row(name: str) -> dict[str, Any]:
    target = resolve_target(name)
    return {
        "name": name,
        "canonical": target.name,
        "compiler": target.compiler,
        "memory_bytes": target.memory_bytes,
        "compiles_here": _compiles_here(target),
        "runs_here": target.runs_here,
    }


def _compiles_here(target: Target) -> str:
    """``yes`` and the compiler's version, or that the compiler is not installed."""
    compiler = compiler_for(target)
    try:
        compiler.command(Path("graph"), Path("artifact"), ())
        return f"yes ({compiler.name} {compiler.version()})"
    except NeuronError:
        return f"no: {compiler.name} is not installed"
