"""Run as ``python looking_up.py ROOT [REMOTE]``: logs warnings, and prints what a lookup of KEY finds."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from entries import KEY

from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.cache.remote.urls import open_remotes
from vllm_neuron.cache.tiers import TieredCache

if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    found = TieredCache(LocalTier(Path(sys.argv[1])), open_remotes(",".join(sys.argv[2:]))).lookup(KEY)
    print("miss" if found is None else f"hit: {found.tier}")
