"""Why a key was missed: the entries that come nearest, and in words what differs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vllm_neuron.cache.differences import differences, printable
from vllm_neuron.cache.metadata import Metadata

_COMPILERS = {"iree": "IREE"}
_DIGESTS = {"module": "the graph differs", "abi": "dtypes, shapes or order of inputs and outputs differ"}


@dataclass(frozen=True)
class Neighbour:
    """An entry near one that is missing, and the names of the tiers that have it.

    ``differences`` are phrases such as ``level: O1 there, O2 here``.
    """

    tier: str
    metadata: Metadata
    differences: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.metadata.key} in {self.tier}: {'; '.join(self.differences)}"


def nearest(
    parts: Mapping[str, str],
    provenance: Mapping[str, object],
    candidates: Iterable[tuple[str, Metadata]],
    limit: int = 3,
) -> list[Neighbour]:
    """Of ``candidates`` (tier and metadata), those that differ least from the missing key, best first.

    Its parts weigh more than its provenance: an entry of the same graph for another compiler comes before one of
    another graph of the same model. A prefill graph comes nearer to another one than a decode graph does.
    """
    # An entry that several tiers have is one neighbour; and one with these very parts is what could not be had.
    known: dict[str, tuple[Metadata, list[str]]] = {}
    for name, found in candidates:
        if dict(found.key_parts) != dict(parts):
            known.setdefault(found.key, (found, []))[1].append(name)
    ranked = []
    for metadata, tiers in known.values():
        in_key = key_differences(metadata.key_parts, parts)
        in_provenance = provenance_differences(metadata.provenance, provenance)
        unknown = len(provenance.keys() - metadata.provenance.keys())
        other_kind = _kind(metadata.provenance) != _kind(provenance)
        score = (len(in_key), other_kind, len(in_provenance) + unknown, metadata.key)
        ranked.append((score, Neighbour(", ".join(tiers), metadata, (*in_key, *in_provenance))))
    ranked.sort(key=lambda pair: pair[0])
    return [neighbour for _, neighbour in ranked[:limit]]


def key_differences(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """What differs between the parts of two keys, one phrase per part."""
    return [
        printable(_phrase(name, there.get(name), here.get(name), here))
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]


def provenance_differences(there: Mapping[str, object], here: Mapping[str, object]) -> list[str]:
    """What differs between two records of provenance, in the values that both have."""
    shared = sorted(there.keys() & here.keys())
    return [phrase for name in shared for phrase in differences(name, there[name], here[name])]


def _kind(provenance: Mapping[str, object]) -> str:
    """``prefill`` or ``decode``, from the name of the graph."""
    return str(provenance.get("graph")).partition("_")[0]


def _phrase(name: str, there: str | None, here: str | None, parts: Mapping[str, str]) -> str:
    if there is None or here is None:
        return f"{name}: {there or 'none'} there, {here or 'none'} here"
    if name in _DIGESTS:
        return f"{name}: {_DIGESTS[name]}"
    if name == "compiler_version":
        compiler = parts.get("compiler", "compiler")
        return f"{_COMPILERS.get(compiler, compiler)} {there} there, {here} here"
    if name == "flags":
        return _flags(json.loads(there), json.loads(here))
    return f"{name}: {there} there, {here} here"


def _flags(there: list[str], here: list[str]) -> str:
    only_there = [flag for flag in there if flag not in here]
    only_here = [flag for flag in here if flag not in there]
    if not only_there and not only_here:
        return f"flags: in another order or number, {' '.join(there)} there, {' '.join(here)} here"
    return f"flags: {' '.join(only_there) or 'nothing more'} there, {' '.join(only_here) or 'nothing more'} here"
