"""A process that dies at a step: run as ``python crashing.py SCENARIO ROOT REMOTE [STEP OCCURRENCE]``.

Without a step it lives, and prints how long it worked beyond the compiler's own time, in seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
from entries import KEY, fill

from vllm_neuron.abi import Abi, TensorSpec
from vllm_neuron.cache import failpoint
from vllm_neuron.cache.failpoint import Failpoint
from vllm_neuron.cache.local import gc
from vllm_neuron.cache.local.pins import Pin
from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.cache.remote.gc import collect_remote
from vllm_neuron.cache.remote.urls import open_remote
from vllm_neuron.cache.retention import Policy
from vllm_neuron.cache.tiers import TieredCache
from vllm_neuron.compile.pipeline import Pipeline, Publish
from vllm_neuron.lowering.module import LoweredModule
from vllm_neuron.targets import resolve_target

TEXT = b"""module @graph {
  func.func public @main(%arg0: tensor<4xf32>) -> tensor<4xf32> {
    %0 = stablehlo.add %arg0, %arg0 : tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}
"""
SPEC = TensorSpec("float32", (4,))
GRAPH = LoweredModule("stablehlo", TEXT, Abi(inputs=(SPEC,), outputs=(SPEC,), aliases=()))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_while_a_child_runs() -> None:
    while not psutil.Process().children(recursive=True):
        time.sleep(0.001)
    die()


def die_at(name: str, occurrence: int) -> None:
    """Let this process be killed when it comes to a step for the given time; COMPILING: while the compiler runs."""
    seen = 0

    def observer(step: Failpoint) -> None:
        nonlocal seen
        if step.name != name.removesuffix("_RUNS"):
            return
        seen += 1
        if seen == occurrence:
            threading.Thread(target=die_while_a_child_runs).start() if name.endswith("_RUNS") else die()

    failpoint.observe(observer)


def compile_graph(cache: TieredCache) -> float:
    """Look a graph up, compile it if need be, and publish it. Returns the compiler's seconds."""
    target = resolve_target("cpu")
    resolution = Pipeline(cache, target, [target], publish=Publish.REQUIRED).resolve(GRAPH, {})
    return resolution.entry.metadata.compile_seconds if resolution.source.value == "compiled" else 0.0


def publish(cache: TieredCache) -> float:
    """Make an entry if need be, and publish it."""
    found = cache.local.lookup(KEY)
    cache.publish_remote(found or cache.local.build(KEY, fill))
    return 0.0


def fetch(cache: TieredCache) -> float:
    """Look an entry up that the remote tier has."""
    assert cache.lookup(KEY) is not None
    return 0.0


def collect(cache: TieredCache) -> float:
    """Remove every entry of the local tier."""
    gc.collect(cache.local, Policy(keep=()))
    return 0.0


def collect_from_remote(cache: TieredCache) -> float:
    """Remove every entry of the remote tier, and what the dead have left there."""
    collect_remote(cache.remotes[0], Policy(keep=()))
    cache.remotes[0].trim()
    return 0.0


SCENARIOS = {f.__name__: f for f in (compile_graph, publish, fetch, collect, collect_from_remote)}

if __name__ == "__main__":
    scenario, root, remote, *where = sys.argv[1:]
    if where:
        die_at(where[0], int(where[1]))
    cache = TieredCache(LocalTier(Path(root)), [open_remote(remote)])
    start = time.monotonic()
    if scenario != "collect":
        Pin(cache.local)
    compiling = SCENARIOS[scenario](cache)
    print(time.monotonic() - start - compiling)
