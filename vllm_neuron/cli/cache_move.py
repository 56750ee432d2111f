"""``vllm-neuron cache push|pull|pack|unpack``: entries and their manifests, from one place to another."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from vllm_neuron import envs
from vllm_neuron.cache import archive
from vllm_neuron.cache.entry import Entry
from vllm_neuron.cache.manifests.store import ManifestStore
from vllm_neuron.cache.tiers import Found, TieredCache
from vllm_neuron.cli.keys import Json, Keys, Plan, Remote, all_keys, full_keys, open_cache, plan_keys, set_variable
from vllm_neuron.errors import CacheError, ConfigError

_FETCHES = 8


def push(keys: Keys = None, plan: Plan = None, remote: Remote = None, as_json: Json = False) -> None:
    """Publish entries of the local tier to the remote tier, with their manifests: those named, of a plan, or all."""
    set_variable(envs.REMOTE_CACHE, remote)
    cache = _with_remotes()
    entries, done = _entries(cache, keys, plan), []
    for entry in entries:
        landed = cache.publish_remote(entry)
        done.append({"key": entry.key, "published": landed, "bytes": entry.metadata.size})
        if not as_json:
            typer.echo(f"{entry.key}  {'published' if landed else 'was there already'}")
    store = _manifests(cache)
    manifests = {one.key: store.publish(one) for one in store.local_of(entry.metadata for entry in entries)}
    _print_problems(store)
    if as_json:
        rows = [{"key": key, "published": landed} for key, landed in manifests.items()]
        typer.echo(json.dumps({"entries": done, "manifests": rows, "tiers": _counters(cache)}, indent=2))
    else:
        typer.echo(f"{len(done)} entries and {len(manifests)} manifests are published")


def pull(keys: Keys = None, plan: Plan = None, remote: Remote = None, as_json: Json = False) -> None:
    """Fetch entries of the remote tier into the local one, with their manifests: those named, of a plan, or all."""
    set_variable(envs.REMOTE_CACHE, remote)
    columns = (TextColumn("Fetching"), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True, disable=as_json or not console.is_terminal)
    task = bar.add_task("fetch", total=None)
    cache = _with_remotes(lambda amount: bar.advance(task, amount))
    wanted = _named(cache, keys, plan)
    if wanted is None:
        wanted = sorted({key for remote in cache.remotes for key in all_keys(remote)})
        if not wanted:
            raise CacheError(f"there is nothing to fetch in {'; '.join(cache.describe()[1:])}")
    start = time.monotonic()
    with bar, ThreadPoolExecutor(_FETCHES) as pool:
        found = dict(zip(wanted, pool.map(cache.lookup, wanted), strict=True))
    hits = [hit for _, hit in sorted(found.items()) if hit is not None]
    for hit in hits:
        cache.local.check_kept(hit.entry)
    store = _manifests(cache)
    manifests, unlisted = _fetch_manifests(store, hits)
    missing = sorted(key for key, hit in found.items() if hit is None)
    rows = [{"key": hit.entry.key, "tier": hit.source, "fetched": hit.tier == "remote",
             "bytes": hit.entry.metadata.size} for hit in hits]  # fmt: skip
    if as_json:
        document = {"entries": rows, "missing": missing, "manifests": manifests, "tiers": _counters(cache)}
        typer.echo(json.dumps(document, indent=2))
    else:
        for row in rows:
            typer.echo(f"{row['key']}  {'fetched from ' + str(row['tier']) if row['fetched'] else 'was there already'}")
        moved = sum(counters.bytes for counters in cache.counters.values())
        seconds = time.monotonic() - start
        rate = f"{moved / 2**20:.1f} MiB fetched in {seconds:.1f} s ({moved / 2**20 / seconds:.0f} MiB/s)"
        typer.echo(f"{rate}, and {len(manifests)} manifests")
    _print_problems(store, *unlisted)
    if missing:
        raise CacheError(f"{len(missing)} keys can't be had from any tier: {', '.join(missing)}")


def pack(
    target: Annotated[Path, typer.Argument(help="The archive to write, such as cache.tar.")],
    keys: Keys = None,
    plan: Plan = None,
    as_json: Json = False,
) -> None:
    """Write entries and their manifests to one archive: those named, those of a plan, or all of the local tier."""
    cache = open_cache()
    entries, store = _entries(cache, keys, plan), _manifests(cache)
    if not entries:
        raise CacheError(f"there is nothing to pack: the local tier {cache.local.root} is empty")
    manifests = store.local_of(entry.metadata for entry in entries)
    _print_problems(store)
    size = archive.pack(entries, target, manifests)
    document = {"archive": str(target), "entries": [entry.key for entry in entries],
                "manifests": [manifest.key for manifest in manifests], "bytes": size}  # fmt: skip
    text = f"{len(entries)} entries and {len(manifests)} manifests, {size / 2**20:.1f} MiB, in {target}"
    typer.echo(json.dumps(document, indent=2) if as_json else text)


def unpack(
    source: Annotated[Path, typer.Argument(help="An archive that `pack` has written.")], as_json: Json = False
) -> None:
    """Store every entry and manifest of an archive on this machine, each checked before it is visible."""
    cache = open_cache()
    done = archive.unpack(source, cache.local, _manifests(cache))
    if as_json:
        kinds = {"entries": done.entries, "manifests": done.manifests}
        rows = {kind: [{"key": key, "new": new} for key, new in found.items()] for kind, found in kinds.items()}
        typer.echo(json.dumps(rows, indent=2))
        return
    for key, new in done.entries.items():
        typer.echo(f"{key}  {'stored' if new else 'was there already'}")
    typer.echo(f"{len(done.entries)} entries and {len(done.manifests)} manifests, in {cache.local.root.parent}")


def _manifests(cache: TieredCache) -> ManifestStore:
    return ManifestStore(Path(envs.get_neuron_precompile_cache_dir()), cache.remotes)


def _fetch_manifests(store: ManifestStore, hits: Sequence[Found]) -> tuple[list[str], list[str]]:
    """Keys of manifests that are new here, and why there may be more: what they spare is time, and not to be had."""
    try:
        return store.fetch_of(hit.entry.metadata for hit in hits), []
    except (OSError, CacheError) as error:
        return [], [f"manifests can't be fetched: {error}"]


def _print_problems(store: ManifestStore, *more: str) -> None:
    for problem in (*store.problems.values(), *more):
        typer.echo(f"warning: {problem}", err=True)


def _with_remotes(on_bytes: Any = lambda amount: None) -> TieredCache:
    cache = open_cache(on_bytes)
    if not cache.remotes:
        raise ConfigError(
            "there is no remote tier: set --remote or NEURON_LIBTORCH_REMOTE_CACHE to a folder that machines share"
        )
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
        if entry is None:
            typer.echo(f"warning: {key} is left out, because it is not whole: see `vllm-neuron cache verify`", err=True)
        else:
            found.append(entry)
    return found


def _counters(cache: TieredCache) -> dict[str, dict[str, float]]:
    return {name: counters.to_json() for name, counters in cache.counters.items()}
