"""``vllm-neuron cache``: look into the tiers, check them, and promote entries."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vllm_neuron.cache.entry import Entry, EntryState, examine
from vllm_neuron.cache.key import is_key
from vllm_neuron.cache.tiers import TieredCache
from vllm_neuron.errors import CacheError, ConfigError

app = typer.Typer(help="Look after the compile cache.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Keys = Annotated[list[str] | None, typer.Argument(help="Keys, or the first digits of them. Default: all.")]


@app.command("list")
def list_entries(as_json: Json = False) -> None:
    """List the entries of the local tier, and the keys that only a remote tier has."""
    cache = TieredCache.from_environment()
    rows = [_row(entry) for key in cache.local.keys() if (entry := cache.local.lookup(key)) is not None]
    known = {row["key"] for row in rows}
    for remote in cache.remotes:
        rows += [{"key": key, "tier": remote.name} for key in remote.keys() if key not in known]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table()
    for column in ("key", "tier", "graph", "model", "target", "level", "size"):
        table.add_column(column, overflow="fold", no_wrap=column == "key")
    for row in rows:
        size = f"{row['bytes'] / 1024:.0f} KiB" if "bytes" in row else ""
        table.add_row(*(str(row.get(name, "")) for name in ("key", "tier", "graph", "model", "target", "level")), size)
    console = Console()
    console.print(table)
    for line in cache.describe():
        console.print(line, markup=False, highlight=False)


@app.command()
def show(key: Annotated[str, typer.Argument(help="A key, or the first digits of one.")]) -> None:
    """Print everything that an entry says about itself, as JSON."""
    cache = TieredCache.from_environment()
    (full,) = _keys(cache, [key])
    found = cache.lookup(full)
    if found is None:
        raise CacheError(f"key {full} is in none of: {'; '.join(cache.describe())}")
    typer.echo(found.entry.metadata.to_json())


@app.command()
def verify(keys: Keys = None, as_json: Json = False) -> None:
    """Check every file of the local tier's entries against its digest. Exits with 1 if one is not as it should be."""
    cache = TieredCache.from_environment()
    results = []
    for key in _keys(cache, keys) if keys else cache.local.keys():
        found = examine(cache.local.root / key, key)
        results.append({"key": key, "state": found.state.value, "reason": found.reason})
    if as_json:
        typer.echo(json.dumps(results, indent=2))
    else:
        for result in results:
            typer.echo(f"{result['key']}  {result['state']}{': ' if result['reason'] else ''}{result['reason']}")
        typer.echo(f"{len(results)} entries checked in {cache.local.root}")
    sys.exit(any(result["state"] != EntryState.COMPLETE.value for result in results))


@app.command()
def push(keys: Keys = None) -> None:
    """Publish entries of the local tier to the remote tier: those named, or all."""
    cache = TieredCache.from_environment()
    if not cache.remotes:
        raise ConfigError("there is no remote tier: set NEURON_LIBTORCH_REMOTE_CACHE to a folder that machines share")
    for key in _keys(cache, keys) if keys else cache.local.keys():
        entry = cache.local.lookup(key)
        if entry is None:
            raise CacheError(f"key {key} is not in the local tier {cache.local.root}")
        typer.echo(f"{key}  {'published' if cache.publish_remote(entry) else 'was there already'}")


def _row(entry: Entry) -> dict[str, Any]:
    metadata = entry.metadata
    return {
        "key": entry.key,
        "tier": "local",
        "graph": metadata.provenance.get("graph", ""),
        "model": metadata.provenance.get("model", ""),
        "target": metadata.target,
        "level": f"O{metadata.level}",
        "compiler": f"{metadata.compiler} {metadata.compiler_version}",
        "bytes": metadata.size,
        "compile_seconds": round(metadata.compile_seconds, 3),
    }


def _keys(cache: TieredCache, given: list[str]) -> list[str]:
    """Full keys for what was typed. Raises :class:`ConfigError` where the first digits fit no key, or several."""
    full = []
    for text in given:
        if is_key(text):
            full.append(text)
            continue
        known = {*cache.local.keys(), *(key for remote in cache.remotes for key in remote.keys())}
        matches = sorted(key for key in known if key.startswith(text)) if text else []
        if len(matches) != 1:
            raise ConfigError(f"{text!r} is not the beginning of exactly one key, but of {len(matches)}: {matches[:5]}")
        full += matches
    return full
