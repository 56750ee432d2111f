"""The server's own process on ``/metrics``, beside the metrics that processes share."""

from __future__ import annotations

import functools
from typing import Any

from prometheus_client import GCCollector, PlatformCollector, ProcessCollector
from vllm.entrypoints.serve.instrumentator import metrics


@functools.cache
def show_the_process() -> None:
    """Add ``process_*`` and ``python_*`` to what vLLM's server shows.

    vLLM 0.32 leaves them out where ``PROMETHEUS_MULTIPROC_DIR`` is set, as it always is here.
    """
    shared = metrics.get_prometheus_registry

    def get_prometheus_registry() -> Any:
        registry = shared()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)
        return registry

    setattr(metrics, "get_prometheus_registry", get_prometheus_registry)  # noqa: B010
