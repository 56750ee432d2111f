"""``vllm-neuron cache``: look into the tiers, and check them."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from vllm_neuron import envs
from vllm_neuron.cache.differences import printable
from vllm_neuron.cache.disk.threads import in_threads
from vllm_neuron.cache.entry import EntryState, Examined, examine
from vllm_neuron.cache.metadata import Metadata
from vllm_neuron.cache.store import index
from vllm_neuron.cache.store.base import STREAMS
from vllm_neuron.cache.store.index import INDEX
from vllm_neuron.cache.tiers import TieredCache
from vllm_neuron.cli import cache_explain, cache_gc, cache_move
from vllm_neuron.cli.keys import Json, Keys, Remote, all_keys, full_keys, open_cache, set_variable
from vllm_neuron.errors import CacheError, ConfigError

_WIDEST = 1000

app = typer.Typer(help="Look after the compile cache.", no_args_is_help=True)


@app.command("list")
def list_entries(remote: Remote = None, as_json: Json = False) -> None:
    """List the entries of the local tier, and those that only a remote tier has."""
    set_variable(envs.REMOTE_CACHE, remote)
    cache = open_cache()
    entries = [entry for key in cache.local.keys() if (entry := cache.local.lookup(key)) is not None]
    rows = [_row(entry.key, cache.local.name, entry.metadata) for entry in entries]
    known = {row["key"] for row in rows}
    for tier in cache.remotes:
        rows += [_row(key, tier.name, found) for key, found in cache.metadata_of(tier).items() if key not in known]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    # Lines of their own length: what wraps can't be read, and what is cut can't be copied.
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("key", "tier", "graph", "model", "target", "level", "size"):
        table.add_column(column, no_wrap=True, justify="right" if column == "size" else "left")
    for row in rows:
        size = f"{row['bytes'] / 1024:.0f} KiB" if "bytes" in row else ""
        texts = (str(row.get(name, "")) for name in ("key", "tier", "graph", "model", "target", "level"))
        table.add_row(*map(printable, texts), size)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.width = max(console.width, console.measure(table, options=console.options.update(width=_WIDEST)).maximum)
    console.print(table)
    for line in cache.describe():
        console.print(line)


@app.command()
def show(key: Annotated[str, typer.Argument(help="A key, or the first digits of one.")], as_json: Json = True) -> None:
    """Print everything that an entry says about itself, as JSON."""
    cache = open_cache()
    (full,) = full_keys(cache, [key])
    found = cache.lookup(full)
    if found is None:
        raise CacheError(f"key {full} is in none of: {'; '.join(cache.describe())}")
    typer.echo(found.entry.metadata.to_json())


@app.command()
def verify(
    keys: Keys = None,
    remote: Annotated[
        str | None, typer.Option("--remote", help="Check this remote tier, a path or URL, and not the local one.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check every file of a tier's entries against its digest. Exits with 1 if one is not as it should be."""
    set_variable(envs.REMOTE_CACHE, remote)
    cache = open_cache()
    wanted = full_keys(cache, keys) if keys else None
    if remote is None:
        results = [_verified(key, functools.partial(_examine, cache)) for key in wanted or cache.local.keys()]
        places = [str(cache.local.root)]
    else:
        places, results = [tier.name for tier in cache.remotes], []
        for tier in cache.remotes:
            if not tier.exists():
                raise CacheError(f"the remote cache {tier.name} is not there: no such folder")
            check = functools.partial(_verified, verify=tier.verify)
            results += in_threads(check, wanted or all_keys(tier), STREAMS)
    if as_json:
        typer.echo(json.dumps(results, indent=2))
    else:
        for result in results:
            typer.echo(f"{result['key']}  {result['state']}{': ' if result['reason'] else ''}{result['reason']}")
        typer.echo(f"{len(results)} entries checked in {', '.join(places)}")
    sys.exit(any(result["state"] != EntryState.COMPLETE.value for result in results))


def _examine(cache: TieredCache, key: str) -> Examined:
    return examine(cache.local.root / key, key)


def _verified(key: str, verify: Callable[[str], Examined]) -> dict[str, str]:
    try:
        found = verify(key)
    except (OSError, CacheError) as error:
        return {"key": key, "state": "unknown", "reason": f"it can't be read: {error}"}
    return {"key": key, "state": found.state.value, "reason": found.reason}


def _row(key: str, tier: str, metadata: Metadata | None) -> dict[str, Any]:
    if metadata is None:
        return {"key": key, "tier": tier}
    return {
        "key": key,
        "tier": tier,
        "graph": metadata.provenance.get("graph", ""),
        "model": metadata.provenance.get("model", ""),
        "target": metadata.target,
        "level": f"O{metadata.level}",
        "compiler": f"{metadata.compiler} {metadata.compiler_version}",
        "bytes": metadata.size,
        "compile_seconds": round(metadata.compile_seconds, 3),
    }


@app.command("index")
def write_index(
    folder: Annotated[Path, typer.Argument(help="The folder of a remote tier that a web server shows.")],
    as_json: Json = False,
) -> None:
    """Write the list of keys that those who read FOLDER through a web server need to list it."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; name the folder of a remote tier")
    count = index.write(folder)
    typer.echo(json.dumps({"keys": count}) if as_json else f"{count} keys listed in {folder / INDEX}")


app.command()(cache_move.push)
app.command()(cache_move.pull)
app.command()(cache_move.pack)
app.command()(cache_move.unpack)
app.command("gc")(cache_gc.collect)
app.command()(cache_explain.explain)
