"""What the cache costs: a local hit, and a fetch from a remote folder next to ``cp`` of the same bytes.

Every round measures each once, one after the other, so that a busy machine slows them alike. A hit is measured in a
process that has verified the entry before, and as the first one of a process, where every digest is computed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vllm_neuron.abi import Abi, TensorSpec
from vllm_neuron.cache import digest, entry
from vllm_neuron.cache.folder_remote import FolderRemote
from vllm_neuron.cache.key import ArtifactKey, artifact_key
from vllm_neuron.cache.local import LocalTier
from vllm_neuron.cache.tiers import TieredCache
from vllm_neuron.lowering.module import LoweredModule

SIZES = (200 << 10, 4 << 20, 256 << 20)
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


def seconds(call: Callable[[], object]) -> float:
    """Wall-clock time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def first_hit(root: Path, key: str) -> float:
    """A process's first hit: nothing is known to be verified."""
    entry._verified.clear()
    entry._parsed.clear()
    tier = LocalTier(root)
    return seconds(lambda: tier.lookup(key))


def measure(scratch: Path, size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds by measure."""
    key = key_of(size).digest
    builder = LocalTier(scratch / "builder")
    built = builder.build(key, lambda folder: fill(folder, size))
    remote = FolderRemote(scratch / "remote")
    remote.publish(built)
    found: dict[str, list[float]] = {"first": [], "again": [], "digest": [], "fetch": [], "cp": []}
    for number in range(rounds):
        target = scratch / f"host{number}"
        found["first"].append(first_hit(builder.root, key))
        found["again"].append(seconds(lambda: builder.lookup(key)))
        with built.artifact_path.open("rb") as file:
            found["digest"].append(seconds(lambda file=file: digest.of_file(file.fileno())))  # type: ignore[misc]
        cache = TieredCache(LocalTier(target / "fetched"), [remote])
        found["fetch"].append(seconds(lambda cache=cache: cache.lookup(key)))  # type: ignore[misc]
        command = ["cp", "-r", str(remote.root / key), str(target / "copied")]
        found["cp"].append(seconds(lambda command=command: subprocess.run(command, check=True)))  # type: ignore[misc]
        shutil.rmtree(target)
    return found


def main() -> None:
    """Measure, print a table, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    table = Table(title=f"Medians of {arguments.rounds} rounds")
    for column in ("artifact", "first hit", "hit again", "digest alone", "fetch", "cp -r", "fetch / cp"):
        table.add_column(column, justify="right")
    results = {}
    for size in SIZES:
        with tempfile.TemporaryDirectory() as scratch:
            found = measure(Path(scratch), size, arguments.rounds)
        middle = {name: statistics.median(values) for name, values in found.items()}
        rate = statistics.median(cp / fetch for cp, fetch in zip(found["cp"], found["fetch"], strict=True))
        results[size] = {**middle, "fetch_rate_over_cp": rate}
        table.add_row(f"{size / 2**20:.1f} MiB", *(f"{middle[name] * 1e3:.2f} ms" for name in found), f"{rate:.0%}")
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
