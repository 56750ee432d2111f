"""Remote tiers that tests open without a URL."""

from __future__ import annotations

from pathlib import Path

from vllm_neuron.cache.remote.tier import RemoteTier
from vllm_neuron.cache.store.folder import FolderStore
from vllm_neuron.cache.store.read_only import ReadOnly


def folder_tier(root: Path, *, read_only: bool = False) -> RemoteTier:
    """A remote tier in a folder."""
    store = FolderStore(root)
    return RemoteTier(ReadOnly(store) if read_only else store)
