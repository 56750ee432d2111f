"""``vllm-neuron cache gc``: make room."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from vllm_neuron import envs
from vllm_neuron.cache.local import gc
from vllm_neuron.cache.metadata import Metadata
from vllm_neuron.cache.remote.gc import collect_remote
from vllm_neuron.cache.remote.tier import RemoteTier
from vllm_neuron.cache.remote.urls import SEPARATOR, open_remote, without_secrets
from vllm_neuron.cache.retention import Policy
from vllm_neuron.cli.keys import Json, Plan, open_cache, plan_keys
from vllm_neuron.compilers.base import compiler_for
from vllm_neuron.errors import CacheError, ConfigError, NeuronError
from vllm_neuron.targets import resolve_target

# Not pydantic's ByteSize (2.14): it takes "20,5G" for 20 bytes, which would remove all, and G for 1000**3.
_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def collect(
    max_size: Annotated[
        str | None, typer.Option("--max-size", help="Keep the newest entries up to this, as 20G.")
    ] = None,
    max_age: Annotated[str | None, typer.Option("--max-age", help="Remove what was stored longer ago, as 30d.")] = None,
    other_versions: Annotated[
        bool, typer.Option("--other-versions", help="Remove what another release or compiler version made.")
    ] = False,
    plan: Plan = None,
    remote: Annotated[
        str | None, typer.Option("--remote", help="Remove from this remote tier, a path or URL, and not locally.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: Json = False,
) -> None:
    """Remove entries that a limit or a plan leaves out: of the local tier, but never what is in use; or of a remote."""
    if max_size is None and max_age is None and not other_versions and plan is None:
        raise ConfigError("say what may go: --max-size, --max-age, --other-versions or --plan")
    policy = Policy(
        max_bytes=None if max_size is None else int(_amount("--max-size", max_size, _SIZES)),
        max_age=None if max_age is None else _amount("--max-age", max_age, _AGES),
        keep=None if plan is None else frozenset(plan_keys(plan)),
        other_version=_is_other_version if other_versions else None,
    )
    if remote is None:
        cache = open_cache()
        place, done = str(cache.local.root), gc.collect(cache.local, policy, dry_run=dry_run)
        tiers = cache.remotes
    else:
        tiers = [_one_remote(remote)]
        place, done = tiers[0].name, collect_remote(tiers[0], policy, dry_run=dry_run)
    trimmed = 0 if dry_run else sum(_trim(tier) for tier in tiers if not tier.read_only)
    freed = sum(one.bytes for one in done if not one.kept)
    if as_json:
        rows = [asdict(one) for one in done]
        typer.echo(json.dumps({"dry_run": dry_run, "entries": rows, "bytes": freed, "trimmed": trimmed}, indent=2))
    else:
        for one in done:
            verb = f"kept, {one.kept}" if one.kept else "would go" if dry_run else "removed"
            typer.echo(f"{one.key}  {verb}: {one.reason} ({one.bytes / 1024:.0f} KiB)")
        typer.echo(f"{freed / 2**20:.1f} MiB {'would be freed' if dry_run else 'freed'} in {place}")
    sys.exit(any(one.failed for one in done))


def _trim(tier: RemoteTier) -> int:
    """How many things of dead publishers were removed. A tier that can't be asked now is trimmed the next time."""
    try:
        return tier.trim()
    except (OSError, CacheError) as error:
        typer.echo(f"warning: what dead publishers left in {tier.name} can't be removed: {error}", err=True)
        return 0


def _one_remote(text: str) -> RemoteTier:
    """The tier that was named. Raises :class:`ConfigError` for several, and for this machine's local one."""
    if SEPARATOR in text:
        raise ConfigError(f"--remote {without_secrets(text)}: name one remote tier")
    remote, local = open_remote(text), Path(envs.get_neuron_compile_cache_dir())
    if local.exists() and Path(remote.name).exists() and local.samefile(remote.name):
        raise ConfigError(f"--remote {text} is the local tier, where processes may use entries: leave out --remote")
    return remote


def _amount(option: str, text: str, units: dict[str, int]) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]?)", text.strip())
    unit = next((value for name, value in units.items() if match and name.lower() == match[2].lower()), None)
    if match is None or unit is None:
        raise ConfigError(
            f"{option} {text!r} is not valid; accepted: a number and one of {', '.join(filter(None, units))}"
        )
    return float(match[1]) * unit


def _is_other_version(metadata: Metadata) -> bool:
    """Whether the compiler of this machine is another version than the one that made an entry."""
    try:
        return compiler_for(resolve_target(metadata.target)).version() != metadata.compiler_version
    except NeuronError:
        return False  # A compiler that is not installed here says nothing about its versions.
