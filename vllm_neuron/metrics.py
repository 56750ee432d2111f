"""Prometheus metrics of the engine process, on vLLM's ``/metrics``.

The engine runs in a process of its own, so its values travel through ``PROMETHEUS_MULTIPROC_DIR``, which
:func:`share` sets before that process starts.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Mapping
from typing import Any

_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
_shared: tempfile.TemporaryDirectory[str] | None = None


def share() -> None:
    """Make this process and its children share their metrics. To be called before prometheus_client is imported."""
    global _shared
    if not os.environ.get(_DIRECTORY):
        _shared = tempfile.TemporaryDirectory(prefix="vllm-neuron-metrics-")
        os.environ[_DIRECTORY] = _shared.name


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
