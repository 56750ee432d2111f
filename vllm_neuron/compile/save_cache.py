"""Promote one finished entry of a local cache to a remote one."""

from __future__ import annotations

import os
from pathlib import Path

from vllm_neuron.cache.entry import read_entry
from vllm_neuron.cache.key import is_key
from vllm_neuron.cache.remote.urls import open_remote
from vllm_neuron.errors import CacheError, ConfigError


def save_cache(
    local_cache_dir: str | os.PathLike[str], remote_cache_dir: str | os.PathLike[str], hash_key: str
) -> bool:
    """Copy the entry ``hash_key`` from one cache to another. True: it was stored. False: a whole one was there.

    A remote entry that is unfinished or damaged is replaced. Raises ``CacheError`` (a ``RuntimeError``) where the
    local entry is missing, unfinished or damaged, or can't be stored; ``ConfigError`` where an argument is no good.
    """
    if not is_key(hash_key):
        raise ConfigError(f"hash_key {hash_key!r} is not a key; a key is 32 hexadecimal digits, in lower case")
    remote = open_remote(os.fspath(remote_cache_dir))
    try:
        return remote.publish(read_entry(Path(local_cache_dir) / hash_key, hash_key))
    except OSError as error:
        raise CacheError(f"entry {hash_key} can't be promoted to {remote.name}: {error}") from error
