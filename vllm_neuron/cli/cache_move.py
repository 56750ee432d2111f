"""``vllm-neuron cache push|pull|pack|unpack``: entries from one place to another."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from vllm_neuron.cache import archive
from vllm_neuron.cache.entry import Entry
from vllm_neuron.cache.tiers import TieredCache
from vllm_neuron.cli.keys import Json, Keys, Plan, full_keys, plan_keys
from vllm_neuron.errors import CacheError, ConfigError

_FETCHES = 8


def push(keys: Keys = None, plan: Plan = None, as_json: Json = False) -> None:
    """Publish entries of the local tier to the remote tier: those named, those of a plan, or all."""
    cache = _with_remotes()
    done = []
    for entry in _entries(cache, keys, plan):
        landed = cache.publish_remote(entry)
        done.append({"key": entry.key, "published": landed, "bytes": entry.metadata.size})
        if not as_json:
            typer.echo(f"{entry.key}  {'published' if landed else 'was there already'}")
    if as_json:
        typer.echo(json.dumps({"entries": done, "tiers": _counters(cache)}, indent=2))


def pull(keys: Keys = None, plan: Plan = None, as_json: Json = False) -> None:
    """Fetch entries of the remote tier into the local one: those named, those of a plan, or all."""
    start = time.monotonic()
    columns = (TextColumn("Fetching"), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=as_json or not console.is_terminal) as bar:
        task = bar.add_task("fetch", total=None)
        cache = _with_remotes(lambda amount: bar.advance(task, amount))
        wanted = _named(cache, keys, plan)
        if wanted is None:
            wanted = sorted({key for remote in cache.remotes for key in remote.keys()})
        with ThreadPoolExecutor(_FETCHES) as pool:
            futures = {pool.submit(cache.lookup, key): key for key in wanted}
            found = {futures[future]: future.result() for future in as_completed(futures)}
    missing = sorted(key for key, hit in found.items() if hit is None)
    rows = [{"key": key, "tier": hit.source, "fetched": hit.tier == "remote", "bytes": hit.entry.metadata.size}
            for key, hit in sorted(found.items()) if hit is not None]  # fmt: skip
    if as_json:
        typer.echo(json.dumps({"entries": rows, "missing": missing, "tiers": _counters(cache)}, indent=2))
    else:
        for row in rows:
            typer.echo(f"{row['key']}  {'fetched from ' + str(row['tier']) if row['fetched'] else 'was there already'}")
        moved = sum(counters.bytes for counters in cache.counters.values())
        seconds = time.monotonic() - start
        typer.echo(f"{moved / 2**20:.1f} MiB fetched in {seconds:.1f} s ({moved / 2**20 / seconds:.0f} MiB/s)")
    if missing:
        raise CacheError(f"{len(missing)} keys can't be had from any tier: {', '.join(missing)}")


def pack(
    target: Annotated[Path, typer.Argument(help="The archive to write, such as cache.tar.")],
    keys: Keys = None,
    plan: Plan = None,
    as_json: Json = False,
) -> None:
    """Write entries to one archive: those named, those of a plan, or all of the local tier."""
    entries = _entries(TieredCache.from_environment(), keys, plan)
    size = archive.pack(entries, target)
    document = {"archive": str(target), "entries": [entry.key for entry in entries], "bytes": size}
    text = f"{len(entries)} entries, {size / 2**20:.1f} MiB, in {target}"
    typer.echo(json.dumps(document, indent=2) if as_json else text)


def unpack(
    source: Annotated[Path, typer.Argument(help="An archive that `pack` has written.")], as_json: Json = False
) -> None:
    """Store every entry of an archive in the local tier, each checked before it is visible."""
    cache = TieredCache.from_environment()
    done = archive.unpack(source, cache.local)
    if as_json:
        typer.echo(json.dumps([{"key": key, "new": new} for key, new in done.items()], indent=2))
        return
    for key, new in done.items():
        typer.echo(f"{key}  {'stored' if new else 'was there already'}")
    typer.echo(f"{len(done)} entries in {cache.local.root}")


def _with_remotes(on_bytes: Any = lambda amount: None) -> TieredCache:
    cache = TieredCache.from_environment(on_bytes)
    if not cache.remotes:
        raise ConfigError("there is no remote tier: set NEURON_LIBTORCH_REMOTE_CACHE to a folder that machines share")
    return cache


def _named(cache: TieredCache, keys: list[str] | None, plan: Path | None) -> list[str] | None:
    if keys and plan:
        raise ConfigError("keys and --plan exclude each other")
    return plan_keys(plan) if plan else full_keys(cache, keys) if keys else None


def _entries(cache: TieredCache, keys: list[str] | None, plan: Path | None) -> list[Entry]:
    wanted = _named(cache, keys, plan)
    found = []
    for key in cache.local.keys() if wanted is None else wanted:
        entry = cache.local.lookup(key)
        if entry is None and wanted is not None:
            raise CacheError(f"key {key} is not in the local tier {cache.local.root}")
        found += [entry] if entry is not None else []
    return found


def _counters(cache: TieredCache) -> dict[str, dict[str, float]]:
    return {name: counters.to_json() for name, counters in cache.counters.items()}
