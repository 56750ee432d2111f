"""``vllm-neuron start-report``: where the time of the last start went."""

from __future__ import annotations

import json

import typer
from rich.console import Console
from rich.table import Table

from vllm_neuron.errors import NeuronError
from vllm_neuron.execute.start_report import last_start, report_path


def start_report(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """Show where the time of the last start that became ready went, and where its graphs came from."""
    facts = last_start()
    if facts is None:
        raise NeuronError(f"No start has been recorded in {report_path()}: it is written when a server becomes ready")
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    title = f"Last start that became ready: {facts.get('model')}, begun {facts.get('begun', 'at an unknown time')}"
    table = Table("phase", title=title, title_justify="left")
    table.add_column("seconds", justify="right")
    for name, seconds in facts.get("seconds", {}).items():
        table.add_row(name.replace("_", " "), f"{seconds:.1f}")
    for name in ("capture_seconds", "lookup_seconds", "compile_seconds"):
        if facts.get(name):
            row = (f"  in the background: {name.removesuffix('_seconds')}", f"{facts[name]:.1f}")
            table.add_row(*row, style="dim")
    table.add_section()
    table.add_row("until ready", f"{facts.get('total_seconds', 0.0):.1f}")
    console = Console(markup=False)  # A path may have brackets in it.
    console.print(table)
    sources = ", ".join(f"{count} {source}" for source, count in facts.get("graphs", {}).items())
    console.print(
        f"{len(facts.get('buckets', []))} graphs for {facts.get('target', 'no target')}, route {facts.get('route')}: "
        f"{sources or 'none compiled'}; {facts.get('captured', 0)} captured",
        highlight=False,
    )
