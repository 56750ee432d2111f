"""``vllm-neuron cache explain``: why a key is not there, and what would put it there."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from vllm_neuron.cache.key import is_key
from vllm_neuron.cache.local import miss_record
from vllm_neuron.cache.local.miss_record import RecordedMiss
from vllm_neuron.cache.tiers import TieredCache
from vllm_neuron.cli.keys import Json, open_cache
from vllm_neuron.errors import ConfigError


def explain(
    what: Annotated[str, typer.Argument(help="A key, the first digits of one, or a bucket such as decode_b4.")],
    as_json: Json = False,
) -> None:
    """Say where an entry is; or, for one that a strict start missed, what is nearest, what differs, and what to run."""
    cache = open_cache()
    recorded = list(miss_record.recorded(cache.local))
    miss = next((one for one in recorded if one.key.startswith(what) or one.provenance.get("graph") == what), None)
    key = miss.key if miss is not None else what if is_key(what) else None
    if key is None:
        found = _of_bucket(cache, what)
        if not found:
            raise ConfigError(
                f"{what!r} is neither a key nor a bucket that was missed here in strict mode or is in the local tier; "
                "`vllm-neuron plan` lists the keys of a model"
            )
        if len(found) > 1:
            raise ConfigError(
                f"{what!r} is true of {len(found)} entries of the local tier; name one by its key: "
                f"{', '.join(found)}. `vllm-neuron cache list` says what each is"
            )
        (key,) = found
    document = _explain(cache, key, miss)
    typer.echo(json.dumps(document, indent=2) if as_json else _text(document))


def _of_bucket(cache: TieredCache, bucket: str) -> list[str]:
    entries = [entry for key in cache.local.keys() if (entry := cache.local.lookup(key)) is not None]
    return [one.key for one in entries if bucket == one.metadata.provenance.get("graph") or one.key.startswith(bucket)]


def _explain(cache: TieredCache, key: str, miss: RecordedMiss | None) -> dict[str, Any]:
    tiers = cache.where(key)
    document: dict[str, Any] = {"key": key, "in": tiers, "searched": cache.describe()}
    if miss is not None:
        document["graph"] = miss.provenance.get("graph", "")
        document["command"] = miss.command
        if not tiers:
            near = cache.nearest(miss.parts, miss.provenance)
            document["nearest"] = [
                {"key": one.metadata.key, "tier": one.tier, "differences": list(one.differences)} for one in near
            ]
    return document


def _text(document: dict[str, Any]) -> str:
    name = f"{document['graph']}, key {document['key']}," if document.get("graph") else f"Key {document['key']}"
    if document["in"]:
        return f"{name} is in: {', '.join(document['in'])}."
    lines = [f"{name} is in none of: {'; '.join(document['searched'])}."]
    for one in document.get("nearest", []):
        lines += [f"Near: {one['key']} in {one['tier']}", *(f"  {difference}" for difference in one["differences"])]
    if document.get("command"):
        lines.append(f"To fill the cache, run: {document['command']}")
    elif "nearest" not in document:
        lines.append("Nothing more is known of it: no strict start of this machine has missed it.")
    return "\n".join(lines)
