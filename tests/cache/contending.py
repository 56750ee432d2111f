"""Run as ``python contending.py lookup|publish ROOT REMOTE COUNT NUMBER``: one of many processes after the same keys.

``lookup`` gets every key from the cache, or makes it; ``publish`` makes every key here and publishes it. Waits for a
line, then prints a JSON object about each key.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from entries import ABI, FLAGS, MODULE

from vllm_neuron.cache.entry import write_entry
from vllm_neuron.cache.key import artifact_key
from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.cache.remote.urls import open_remote
from vllm_neuron.cache.tiers import TieredCache

KEYS = {
    key.digest: key for key in (artifact_key(MODULE, "iree", f"3.{n}.0", FLAGS, "cpu:x86-64-v3", 2) for n in range(8))
}
WORK_SECONDS = 0.3


def make(folder: Path, digest: str, maker: str) -> None:
    """Make the entry of a key; its artifact says who made it."""
    (folder / "graph.mlir").write_bytes(MODULE.data)
    (folder / "graph.vmfb").write_bytes(f"{digest} by {maker}".encode() * 1000)
    write_entry(folder, key=KEYS[digest], abi=ABI)


def get(cache: TieredCache, digest: str, count: Path, number: str) -> dict[str, Any]:
    """A key from the cache, or made here: by one process per host."""
    since = time.time()
    found, made = cache.lookup(digest), False
    if found is None:
        with cache.lock(digest):
            found = cache.lookup(digest)
            if found is None:
                with count.open("a") as file:
                    file.write(f"{digest} {number}\n")
                time.sleep(WORK_SECONDS)
                cache.local.build(digest, lambda folder: make(folder, digest, number))
                made = True
        found = found or cache.lookup(digest)
    assert found is not None
    at = time.time()
    content = hashlib.sha256(found.entry.artifact_path.read_bytes()).hexdigest()
    return {"content": content, "made": made, "fetched": found.tier == "remote", "since": since, "at": at}


def publish(cache: TieredCache, digest: str, number: str) -> dict[str, Any]:
    """Make a key here, and publish it."""
    entry = cache.local.build(digest, lambda folder: make(folder, digest, number))
    return {"landed": cache.publish_remote(entry)}


if __name__ == "__main__":
    what, root, remote, count, number = sys.argv[1:]
    cache = TieredCache(LocalTier(Path(root)), [open_remote(remote)])
    order = sorted(KEYS)
    random.Random(number).shuffle(order)
    print("ready", flush=True)
    sys.stdin.readline()
    work = (
        (lambda key: get(cache, key, Path(count), number))
        if what == "lookup"
        else (lambda key: publish(cache, key, number))
    )
    print(json.dumps({key: work(key) for key in order}), flush=True)
