"""Prometheus metrics of the engine process, on vLLM's ``/metrics``.

The engine runs in a process of its own, so its values travel through ``PROMETHEUS_MULTIPROC_DIR``, which
:func:`share` sets before that process starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
_PREFIX = "vllm-neuron-metrics-"
_LOCKED = "locked"
_shared: tempfile.TemporaryDirectory[str] | None = None


def share() -> None:
    """Make this process and its children share their metrics. To be called before prometheus_client is imported.

    Removes the folders of processes that were killed. A folder is locked while its process or a fork of it is alive.
    """
    global _shared
    if os.environ.get(_DIRECTORY):
        return
    _remove_leftovers(Path(tempfile.gettempdir()))
    _shared = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
    fcntl.flock(os.open(_shared.name, os.O_RDONLY), fcntl.LOCK_SH)
    # Only from now on may others take a free lock for a sign that nobody needs the folder.
    Path(_shared.name, _LOCKED).touch()
    os.environ[_DIRECTORY] = _shared.name


def _remove_leftovers(place: Path) -> None:
    for folder in place.glob(f"{_PREFIX}*"):
        # It may be another user's, or be removed by another process at the same time.
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if (folder / _LOCKED).exists():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


@functools.cache
def _gauge(name: str, meaning: str, mode: str = "mostrecent", labels: tuple[str, ...] = ()) -> Any:
    import prometheus_client

    return prometheus_client.Gauge(f"vllm_neuron:{name}", meaning, labels, multiprocess_mode=mode)  # type: ignore[arg-type]


def set_startup_time(seconds: float) -> None:
    """From the start of the worker to the end of its warm-up."""
    _gauge("startup_time_seconds", "From the start of the worker to the end of its warm-up").set(seconds)


def set_model_load_time(seconds: float) -> None:
    """What loading the weights took."""
    _gauge("model_load_time_seconds", "Time to load the weights").set(seconds)


def set_compilation_time(bucket: str, seconds: float) -> None:
    """What the compiler took for a bucket; 0 for a cache hit."""
    gauge = _gauge("compilation_time_seconds", "Time to compile a bucket's graph", labels=("bucket_name",))
    gauge.labels(bucket).set(seconds)


def count_execution(bucket: str, runs: int = 1) -> None:
    """Runs of a bucket's graph. None makes the metric appear."""
    gauge = _gauge("neff_execution_count", "Runs of a bucket's graph so far", "sum", ("bucket_name",))
    gauge.labels(bucket).inc(runs)


def set_cache_tier(tier: str, counters: Mapping[str, float]) -> None:
    """What one tier of the compile cache did for this process: hits, misses, fetches, bytes, failures, seconds."""
    for name, value in counters.items():
        gauge = _gauge(f"cache_{name}", f"Compile cache, by tier: {name} so far", "sum", ("tier",))
        gauge.labels(tier).set(value)


def count_padding(seqs: int, tokens: int) -> None:
    """Rows of a decode bucket, and tokens of a prefill bucket, that held nothing."""
    _gauge("num_seqs_padding", "Padding sequences in decode buckets so far", "sum").inc(seqs)
    _gauge("num_batched_tokens_padding", "Padding tokens in prefill buckets so far", "sum").inc(tokens)
