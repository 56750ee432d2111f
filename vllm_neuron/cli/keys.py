"""What the commands about the cache have in common: options, and keys from what was typed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_neuron import envs
from vllm_neuron.cache.key import is_key
from vllm_neuron.cache.remote.tier import RemoteTier
from vllm_neuron.cache.tiers import TieredCache
from vllm_neuron.errors import CacheError, ConfigError

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Keys = Annotated[list[str] | None, typer.Argument(help="Keys, or the first digits of them. Default: all.")]
Plan = Annotated[
    Path | None, typer.Option("--plan", help="Output of `vllm-neuron plan --json`, or a report of `compile --report`.")
]

Remote = Annotated[str | None, typer.Option("--remote", help="The remote tier, in the place of the variable's.")]

_SHOWN = 5


def set_variable(variable: envs.Variable[Any], value: object) -> None:
    """An option of the command line is its variable: what reads the variable needs to know nothing of the option."""
    if value is not None:
        os.environ[variable.name] = str(value)


def open_cache(on_bytes: Callable[[int], object] = lambda amount: None) -> TieredCache:
    """The cache that the variables describe. Raises :class:`ConfigError` where they turn it off."""
    if envs.DISABLE_COMPILE_CACHE.get():
        raise ConfigError(f"{envs.DISABLE_COMPILE_CACHE.name}=1 turns the cache off; unset it to look after the cache")
    return TieredCache.from_environment(on_bytes)


def full_keys(cache: TieredCache, given: list[str]) -> list[str]:
    """Full keys for what was typed. Raises :class:`ConfigError` where the first digits fit no key, or several."""
    full = []
    known: set[str] | None = None
    for text in given:
        if is_key(text):
            full.append(text)
            continue
        if known is None:
            known = {*cache.local.keys(), *(key for remote in cache.remotes for key in cache.keys_of(remote))}
        matches = sorted(key for key in known if key.startswith(text)) if text else []
        if not matches:
            raise ConfigError(f"{text!r} is not the beginning of any key; `vllm-neuron cache list` lists them")
        if len(matches) > 1:
            more = ", …" if len(matches) > _SHOWN else ""
            some = ", ".join(matches[:_SHOWN]) + more
            raise ConfigError(f"{text!r} is the beginning of {len(matches)} keys: {some}; give more digits")
        full += matches
    return full


def all_keys(remote: RemoteTier) -> list[str]:
    """The keys of a remote tier's entries. Raises :class:`CacheError` where it can't be listed."""
    try:
        return remote.keys()
    except OSError as error:
        raise CacheError(f"the entries of {remote.name} can't be listed: {error}") from error


def plan_keys(path: Path) -> list[str]:
    """The keys of a plan or report. Raises :class:`ConfigError` where the file holds none."""
    try:
        document: Any = json.loads(path.read_text())
        keys = [graph["key"] for graph in document["graphs"]]
        if not keys or not all(is_key(key) for key in keys):
            raise ValueError("it lists no keys, or something else in their place")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not a plan ({error}); accepted: the output of `vllm-neuron plan --json`, or a report"
        ) from error
    return keys
