"""``vllm-neuron targets``: what can be compiled for, and what of it runs here."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from vllm_neuron.compilers.base import check_compiler, compiler_for
from vllm_neuron.errors import NeuronError
from vllm_neuron.targets import ALIASES, Target, compile_target, known_targets, resolve_target

_LEGEND = "Memory is that of a logical core, and cores are the physical ones in it."


def show_targets(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """List the targets, their compilers, and whether each is usable here."""
    aliases = _aliases()
    targets = known_targets()
    targets += [target for target in aliases.values() if target.name not in {known.name for known in targets}]
    if as_json:
        typer.echo(json.dumps([_row(target, aliases) for target in targets], indent=2))
        return
    console = Console(highlight=False)
    console.print(_table(targets, aliases))
    console.print(_LEGEND)
    for title, lines in (
        ("Other names", {alias: target.name.replace("+", " +") for alias, target in aliases.items()}),
        ("What a processor must have", _features(targets)),
        ("Compilers", {target.compiler: _version_or_reason(target) for target in targets}),
    ):
        console.print(f"\n{title}:")
        console.print(_list(lines))
    console.print(f"\nTarget in force: {compile_target().name}")


def _aliases() -> dict[str, Target]:
    """What each alias stands for; one that stands for nothing on this machine is left out."""
    found = {}
    for alias in ALIASES:
        try:
            found[alias] = resolve_target(alias)
        except NeuronError:
            continue
    return found


def _row(target: Target, aliases: dict[str, Target]) -> dict[str, Any]:
    compiler = compiler_for(target)
    version = _version(target)
    return {
        "name": target.name,
        "aliases": [alias for alias, meant in aliases.items() if meant.name == target.name],
        "compiler": compiler.name,
        "compiler_version": version,
        "compiles_here": version is not None,
        "runs_here": target.runs_here,
        "memory_bytes": target.memory_bytes,
        "logical_nc": target.logical_nc,
        "features": list(target.required_features),
    }


def _table(targets: list[Target], aliases: dict[str, Target]) -> Table:
    table = Table(box=box.SIMPLE)
    for column in ("target", "compiler", "memory", "cores", "compiles here", "runs here"):
        table.add_column(column, no_wrap=True, justify="right" if column in ("memory", "cores") else "left")
    for target in targets:
        # A name of this host's own is as long as its list of features.
        alias = next((alias for alias, meant in aliases.items() if meant == target and "+" in target.name), target.name)
        table.add_row(
            alias,
            target.compiler,
            f"{target.memory_bytes / 2**30:.0f} GiB" if target.memory_bytes else "",
            str(target.logical_nc or ""),
            "yes" if _version(target) else "no",
            "yes" if target.runs_here else "no",
        )
    return table


def _features(targets: list[Target]) -> dict[str, str]:
    """The processor features that each CPU target needs, as what it adds to an earlier one."""
    described: dict[str, set[str]] = {}
    lines = {}
    for target in (target for target in targets if target.kind == "cpu" and "+" not in target.name):
        needed = set(target.required_features)
        base = max(
            (name for name in described if described[name] <= needed),
            key=lambda name: len(described[name]),
            default=None,
        )
        added = ", ".join(sorted(needed - described[base] if base else needed))
        lines[target.name] = f"as {base}, and {added}" if base else added
        described[target.name] = needed
    return lines


def _list(lines: dict[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in lines.items():
        grid.add_row(f"  {name}", text)
    return grid


def _compiler(target: Target) -> str:
    """The version of the target's compiler. Raises ``NeuronError`` where it can't be used here."""
    check_compiler(target)
    return compiler_for(target).version()


def _version(target: Target) -> str | None:
    try:
        return _compiler(target)
    except NeuronError:
        return None


def _version_or_reason(target: Target) -> str:
    try:
        return _compiler(target)
    except NeuronError as error:
        return str(error)
