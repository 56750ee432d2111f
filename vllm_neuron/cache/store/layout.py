"""Where a store has what is no entry: manifests of captured graphs, one JSON file per trace key."""

from __future__ import annotations

from vllm_neuron.cache.key import checked_key, is_key

MANIFESTS = ".manifests"
"""The folder of the manifests. A dotted name, so that no listing of entries takes it for one."""

MAX_MANIFEST_BYTES = 4 << 20

_SUFFIX = ".json"


def manifest_name(key: str) -> str:
    """The file name of the manifest of a trace key. Raises ``CacheError`` where it is none."""
    return f"{checked_key(key)}{_SUFFIX}"


def manifest_path(key: str) -> str:
    """Where a store has the manifest of a trace key."""
    return f"{MANIFESTS}/{manifest_name(key)}"


def manifest_key(name: str) -> str | None:
    """The trace key whose manifest has this file name; None for another file."""
    key = name.removesuffix(_SUFFIX)
    return key if is_key(key) and name == manifest_name(key) else None
