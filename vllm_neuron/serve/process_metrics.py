"""The server's own process on ``/metrics``, beside the metrics that processes share."""

from __future__ import annotations

import functools

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, multiprocess


@functools.cache
def show_the_process() -> None:
    """Add ``process_*`` and ``python_*`` to what this process shows where metrics are shared.

    vLLM 0.32, and prometheus-fastapi-instrumentator 8 that it uses, collect nothing but the shared ones where
    ``PROMETHEUS_MULTIPROC_DIR`` is set, as it always is here. Both name the collector by its module at each use.
    """
    setattr(multiprocess, "MultiProcessCollector", _WithTheProcess)  # noqa: B010


class _WithTheProcess(multiprocess.MultiProcessCollector):
    def __init__(self, registry: CollectorRegistry, path: str | None = None) -> None:
        super().__init__(registry, path)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)
