"""What the cache costs: a local hit, and a fetch from a remote folder next to ``cp`` of the same bytes.

Every round measures each once, one after the other, so that a busy machine slows them alike. A hit is measured in a
process that has verified the entry before, and as the first one of a process, where every digest is computed.

A fetch hashes what it copies, on as many threads as there are cores. So with one idle core it takes as long as a copy
and a digest one after the other; to come to the speed of ``cp``, which has one thread, it needs as many idle cores as
the last column says: work is processor time over that of ``cp``, which a busy machine leaves alone.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.table import Table

from benchmarks.report import make_console
from vllm_neuron.abi import Abi, TensorSpec
from vllm_neuron.cache import entry, metadata, verified
from vllm_neuron.cache.disk import file_digest
from vllm_neuron.cache.key import ArtifactKey, artifact_key
from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.cache.remote.urls import open_remote
from vllm_neuron.cache.tiers import TieredCache
from vllm_neuron.lowering.module import LoweredModule

SIZES = (200 << 10, 4 << 20, 256 << 20)
MEASURES = ("first", "again", "digest", "fetch", "cp")
SPEC = TensorSpec("float32", (4,))
MODULE = LoweredModule("stablehlo", b"module @graph {}\n" * 4000, Abi((SPEC,), (SPEC,), ()))


def key_of(size: int) -> ArtifactKey:
    """A key for each size."""
    return artifact_key(MODULE, "iree", "3.13.0", [f"--size={size}"], "cpu:x86-64-v3", 2)


def fill(folder: Path, size: int) -> None:
    """An entry with an artifact of ``size`` bytes that don't repeat within a page."""
    (folder / "graph.mlir").write_bytes(MODULE.data)
    block = bytes(range(256)) * 4096
    with (folder / "graph.vmfb").open("wb") as file:
        for start in range(0, size, len(block)):
            file.write(block[: size - start])
    entry.write_entry(folder, key=key_of(size), abi=MODULE.abi)


def cost(call: Callable[[], object]) -> tuple[float, float]:
    """Wall-clock time of one call, and its processor time, that of threads and child processes included."""
    start, before = time.perf_counter(), _processor()
    call()
    return time.perf_counter() - start, _processor() - before


def _processor() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def first_hit(root: Path, key: str) -> tuple[float, float]:
    """A process's first hit: nothing is known to be verified."""
    verified.forget()
    metadata.forget_parsed()
    tier = LocalTier(root)
    return cost(lambda: tier.lookup(key))


def measure(scratch: Path, size: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of wall-clock and processor time by measure, one pair for each round."""
    key = key_of(size).digest
    builder = LocalTier(scratch / "builder")
    built = builder.build(key, lambda folder: fill(folder, size))
    remote = open_remote(str(scratch / "remote"))
    remote.publish(built)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in MEASURES}
    for number in range(rounds):
        target = scratch / f"host{number}"
        target.mkdir()
        found["first"].append(first_hit(builder.root, key))
        found["again"].append(cost(lambda: builder.lookup(key)))
        with built.artifact_path.open("rb") as file:
            found["digest"].append(cost(lambda file=file: file_digest.of_file(file.fileno())))  # type: ignore[misc]
        cache = TieredCache(LocalTier(target / "fetched"), [remote])
        command = ["cp", "-r", str(Path(remote.name) / key), str(target / "copied")]
        copies: list[tuple[str, Callable[[], object]]] = [
            ("fetch", partial(cache.lookup, key)),
            ("cp", partial(subprocess.run, command, check=True)),
        ]
        # By turns, so that neither always meets the other's unwritten pages.
        for name, call in copies[:: 1 if number % 2 else -1]:
            found[name].append(cost(call))
        shutil.rmtree(target)
    return found


def within_rounds(found: dict[str, list[tuple[float, float]]], one: str, other: str, which: int) -> float:
    """The median of a ratio of two measures, taken in each round; ``which``: 0 for wall-clock time, 1 for processor."""
    pairs = zip(found[one], found[other], strict=True)
    return statistics.median(first[which] / second[which] for first, second in pairs)


def main() -> None:
    """Measure, print a table, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="measure on the file system of this folder")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    table = Table(title=f"Medians of {arguments.rounds} rounds; speed and work of a fetch are over those of cp")
    columns = ("artifact", "hit: first", "again", "digest", "fetch", "cp -r", "speed", "work")
    for column in columns:
        table.add_column(column, justify="right")
    results = {}
    for size in SIZES:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
            found = measure(Path(scratch), size, arguments.rounds)
        middle = {name: statistics.median(wall for wall, _ in found[name]) for name in MEASURES}
        rate, work = within_rounds(found, "cp", "fetch", 0), within_rounds(found, "fetch", "cp", 1)
        results[size] = {**middle, "fetch_rate_over_cp": rate, "fetch_processor_over_cp": work}
        times = (f"{middle[name] * 1e3:.2f} ms" for name in MEASURES)
        table.add_row(f"{size / 2**20:.1f} MiB", *times, f"{rate:.0%}", f"{work:.1f}x")
    make_console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
