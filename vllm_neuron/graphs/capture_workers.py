"""Capture of many buckets at once, in forked workers that each have a model without values of their own.

The process that forks them stays free to load the real weights.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any

import torch

from vllm_neuron import envs
from vllm_neuron.errors import CaptureError
from vllm_neuron.graphs.model_capture import ModelCapture
from vllm_neuron.graphs.trace_cache import CapturedGraph
from vllm_neuron.host.cpu import usable_cores
from vllm_neuron.model.buckets import Bucket
from vllm_neuron.model.step import StepModel
from vllm_neuron.routes import Route

logger = logging.getLogger("vllm.neuron.capture")

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SECONDS_OF_SILENCE = 10.0


def capture_buckets(vllm_config: Any, buckets: Sequence[Bucket], route: Route | None = None) -> Iterator[CapturedGraph]:
    """Capture and lower ``buckets``, in parallel where variables and cores allow; gives them in order, as they come.

    ``route`` lowers them; by default the one in force. Raises :class:`CaptureError` where vLLM does not build the
    model, and that or :class:`UnsupportedOpError` where a graph can't be captured.
    """
    workers = min(envs.TRACE_WORKERS.get(), usable_cores(), len(buckets))
    if envs.DISABLE_PARALLEL_TRACE.get() or multiprocessing.current_process().daemon:
        return _logged(capture_here(vllm_config, buckets, route))
    return _logged(_capture_in_workers(vllm_config, buckets, route, workers))


def _logged(graphs: Iterator[CapturedGraph]) -> Iterator[CapturedGraph]:
    """``graphs``; the log shows, to who asks for it, where an error comes from that is told in one line."""
    try:
        yield from graphs
    except CaptureError:
        logger.debug("Not captured", exc_info=True)
        raise


def capture_here(
    vllm_config: Any, buckets: Sequence[Bucket], route: Route | None = None, loaded: StepModel | None = None
) -> Iterator[CapturedGraph]:
    """As :func:`capture_buckets`, in this process, one after the other; of the ``loaded`` model, if there is one."""
    model = ModelCapture(vllm_config, route, loaded)
    for bucket in buckets:
        yield _log_captured(model.capture(bucket))


def _log_captured(graph: CapturedGraph) -> CapturedGraph:
    logger.info("Captured %s in %.1f s", graph.bucket.name, graph.seconds)
    return graph


class _CaptureProcess(ForkProcess):
    """A daemon: a process that ends while it captures, because its start failed, would else wait for it forever."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, daemon=True)


class _CaptureContext(ForkContext):
    """``started`` are the workers, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[_CaptureProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> _CaptureProcess:  # type: ignore[override]
        self.started.append(_CaptureProcess(*args, **kwargs))
        return self.started[-1]


def _capture_in_workers(
    vllm_config: Any, buckets: Sequence[Bucket], route: Route | None, workers: int
) -> Iterator[CapturedGraph]:
    context = _CaptureContext()
    pool = ProcessPoolExecutor(
        workers,
        mp_context=context,
        initializer=_start_worker,
        initargs=(vllm_config, route, os.getpid()),
    )
    # Submitting forks the workers, here and now: before the caller starts threads, gloo or IREE.
    futures = [pool.submit(_capture_in_worker, bucket) for bucket in buckets]
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    return _results(pool, context.started, list(zip(buckets, futures, strict=True)), layers)


def _results(
    pool: ProcessPoolExecutor,
    started: Sequence[ForkProcess],
    futures: Sequence[tuple[Bucket, Future[CapturedGraph]]],
    layers: int,
) -> Iterator[CapturedGraph]:
    try:
        for bucket, future in futures:
            try:
                _wait(future, f"{bucket.name}, of a model of {layers} layers")
                graph = future.result()
            except BrokenProcessPool:
                pool.shutdown()  # Ends and joins the other workers.
                raise _worker_died(bucket, started) from None
            yield _log_captured(graph)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _wait(future: Future[CapturedGraph], what: str) -> None:
    """Until ``future`` is done. The log shows that it takes its time."""
    started = time.monotonic()
    while not wait([future], _SECONDS_OF_SILENCE).done:
        logger.info("Still capturing %s: %.0f s so far", what, time.monotonic() - started)


def _worker_died(bucket: Bucket, started: Sequence[ForkProcess]) -> CaptureError:
    if any(worker.exitcode == -signal.SIGINT for worker in started):
        return CaptureError(f"the capture workers were interrupted while {bucket.name} was being captured: start again")
    return CaptureError(
        f"a capture worker died while {bucket.name} was being captured; was it killed for memory? "
        f"Set {envs.TRACE_WORKERS.name}=1, or {envs.DISABLE_PARALLEL_TRACE.name}=1, and try again"
    )


_model_capture: Callable[[], ModelCapture] | None = None


def _start_worker(vllm_config: Any, route: Route | None, parent: int) -> None:
    global _model_capture
    # The engine's handlers, which are inherited, do no more than note that it is to end.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _die_with(parent)
    torch.set_num_threads(1)
    # What vLLM says of building a model says little of one without values, and once for every worker.
    logging.getLogger("vllm").setLevel(logging.WARNING)
    # Built with the first graph, because an error in here would only be known as a worker's death.
    _model_capture = functools.cache(lambda: ModelCapture(vllm_config, route))


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` dies, which no end of a pipe would tell it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It died before the call.
        os._exit(1)


def _capture_in_worker(bucket: Bucket) -> CapturedGraph:
    assert _model_capture is not None
    return _model_capture().capture(bucket)
