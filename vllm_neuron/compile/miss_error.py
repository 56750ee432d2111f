"""The error of a strict start: every miss at once, where it was looked for, what is near, and what fills it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_neuron.cache.key import ArtifactKey
from vllm_neuron.cache.local.miss_record import record
from vllm_neuron.cache.tiers import TieredCache
from vllm_neuron.errors import CacheMissError


@dataclass(frozen=True)
class Miss:
    """A graph that no tier has: its name (such as ``decode_b4``), its key, and what it was made from."""

    graph: str
    key: ArtifactKey
    provenance: Mapping[str, Any]


def miss_error(cache: TieredCache, model: str, misses: Sequence[Miss], graphs: int, command: str) -> CacheMissError:
    """One error for all ``misses`` among the ``graphs`` of ``model``; ``command`` fills them."""
    for miss in misses:
        record(cache.local, miss.key, miss.provenance, command)
    near = cache.nearest(misses[0].key.parts, misses[0].provenance, limit=1)
    failed = [miss.key.digest for miss in misses if miss.key.digest in cache.failures]
    lines = [
        f"Strict mode: {len(misses)} of {graphs} graphs of {model} are in no tier of the cache.",
        *(f"  {miss.graph}  key {miss.key.digest}" for miss in misses),
        *(f"A remote tier failed for {len(failed)} of them; {key} in {cache.failures[key]}" for key in failed[:1]),
        f"Searched: {'; '.join(cache.describe())}.",
        *(f"Nearest to {misses[0].graph}: {neighbour}." for neighbour in near),
        f"For more: vllm-neuron cache explain {misses[0].key.digest}",
        f"To fill the cache, run: {command}",
    ]
    return CacheMissError("\n".join(lines))
