"""Capture of every bucket of a vLLM model, from its shapes alone.

The model is built from vLLM's own classes over fake tensors: real names, shapes, dtypes and tying, and no values. So a
graph, and its key, is the same on a machine that has the weights and on one that has not. Buckets are captured in
forked workers, each with a fake model of its own; the process that forks them stays free to load the real weights.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import logging
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from vllm import ir
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.utils import get_model_architecture

from vllm_neuron import envs
from vllm_neuron.abi import TensorSpec
from vllm_neuron.compile.capture import capture
from vllm_neuron.errors import CaptureError, NeuronError
from vllm_neuron.graphs.trace_cache import TracedGraph
from vllm_neuron.host.cpu import usable_cores
from vllm_neuron.model.buckets import Bucket
from vllm_neuron.model.groups import init_groups
from vllm_neuron.model.kv import planned_blocks
from vllm_neuron.model.late_weights import create_late_weights
from vllm_neuron.model.patches import without_accelerator
from vllm_neuron.model.step import STEP_INPUTS, StepModel, step_inputs
from vllm_neuron.routes import Route, current_route, lower

logger = logging.getLogger("vllm.neuron.tracing")

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def trace(
    vllm_config: Any, buckets: Sequence[Bucket], num_blocks: int | None = None, route: Route | None = None
) -> Iterator[TracedGraph]:
    """Capture and lower ``buckets``, in parallel where variables and cores allow; gives them in order, as they come.

    ``num_blocks`` is the size of the KV cache in blocks; by default what the target and the configuration give.
    ``route`` lowers them; by default the one in force.
    Raises :class:`CaptureError` where vLLM does not build the model, and that or :class:`UnsupportedOpError` where a
    graph can't be captured.
    """
    workers = min(envs.TRACE_WORKERS.get(), usable_cores(), len(buckets))
    if envs.DISABLE_PARALLEL_TRACE.get() or multiprocessing.current_process().daemon:
        return _logged(trace_here(vllm_config, buckets, num_blocks, route))
    return _logged(_trace_in_workers(vllm_config, buckets, num_blocks, route, workers))


def _logged(graphs: Iterator[TracedGraph]) -> Iterator[TracedGraph]:
    """``graphs``; the log shows, to who asks for it, where an error comes from that is told in one line."""
    try:
        yield from graphs
    except CaptureError:
        logger.debug("Not captured", exc_info=True)
        raise


def trace_here(
    vllm_config: Any,
    buckets: Sequence[Bucket],
    num_blocks: int | None = None,
    route: Route | None = None,
    loaded: StepModel | None = None,
) -> Iterator[TracedGraph]:
    """As :func:`trace`, in this process, one after the other; with ``loaded``, of that model, whose values stay out."""
    tracer = Tracer(vllm_config, num_blocks, route, loaded)
    for bucket in buckets:
        yield _told(tracer.trace(bucket))


def _told(graph: TracedGraph) -> TracedGraph:
    logger.info("Captured %s in %.1f s", graph.bucket.name, graph.seconds)
    return graph


class _CaptureProcess(ForkProcess):
    """A daemon: a process that ends while it captures, because its start failed, would else wait for it forever."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, daemon=True)


class _CaptureContext(ForkContext):
    Process = _CaptureProcess


def _trace_in_workers(
    vllm_config: Any, buckets: Sequence[Bucket], num_blocks: int | None, route: Route | None, workers: int
) -> Iterator[TracedGraph]:
    pool = ProcessPoolExecutor(
        workers,
        mp_context=_CaptureContext(),
        initializer=_start_worker,
        initargs=(vllm_config, num_blocks, route, os.getpid()),
    )
    # Submitting forks the workers, here and now: before the caller starts threads, gloo or IREE.
    futures = [pool.submit(_trace_in_worker, bucket) for bucket in buckets]
    return _results(pool, futures, buckets)


def _results(pool: ProcessPoolExecutor, futures: Sequence[Any], buckets: Sequence[Bucket]) -> Iterator[TracedGraph]:
    try:
        for future, bucket in zip(futures, buckets, strict=True):
            try:
                graph = future.result()
            except BrokenProcessPool:
                raise CaptureError(
                    f"a capture worker died while {bucket.name} was being captured; was it killed for memory? "
                    f"Set {envs.TRACE_WORKERS.name}=1, or {envs.DISABLE_PARALLEL_TRACE.name}=1, and try again"
                ) from None
            yield _told(graph)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


_worker_tracer: Callable[[], Tracer] | None = None


def _start_worker(vllm_config: Any, num_blocks: int | None, route: Route | None, parent: int) -> None:
    global _worker_tracer
    # The engine's handlers, which are inherited, do no more than note that it is to end.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _die_with(parent)
    torch.set_num_threads(1)
    # What vLLM says of building a model says little of one without values, and once for every worker.
    logging.getLogger("vllm").setLevel(logging.WARNING)
    # Built with the first graph, because an error in here would only be known as a worker's death.
    _worker_tracer = functools.cache(lambda: Tracer(vllm_config, num_blocks, route))


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` dies, which no end of a pipe would tell it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It died before the call.
        os._exit(1)


def _trace_in_worker(bucket: Bucket) -> TracedGraph:
    assert _worker_tracer is not None
    return _worker_tracer().trace(bucket)


class Tracer:
    """A model without values, and the captures of its buckets.

    With ``loaded``, a model that has been loaded takes its place: only the shapes of its weights are used.
    """

    def __init__(
        self,
        vllm_config: Any,
        num_blocks: int | None = None,
        route: Route | None = None,
        loaded: StepModel | None = None,
    ) -> None:
        self._config = _private_copy(vllm_config)
        self._route = route or current_route()
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.step_model = loaded or self._without_values()
        self._weights = dict(self.step_model.named_weights())
        if num_blocks is None:
            num_blocks = planned_blocks(self.step_model, self._config)
        self.num_blocks = num_blocks
        self._kv = kv_inputs(self.step_model, num_blocks)

    def _without_values(self) -> StepModel:
        without_accelerator()
        set_ir_defaults(self._config)
        with _model_parallel_state(self._config), _configured(self._config):
            with _refusals_in_one_line(self._config.model_config.model):
                model = _build(self._config, self._mode)
            return StepModel(model, self._config)

    def trace(self, bucket: Bucket) -> TracedGraph:
        """Capture and lower one bucket."""
        start = time.monotonic()
        step = {f"inputs.{name}": spec for name, spec in step_inputs(bucket, self.step_model.block_size).items()}
        specs = step | self._kv
        specs |= {f"weights.{name}": _spec(tensor) for name, tensor in self._weights.items()}
        with _configured(self._config), self.step_model.context():
            graph = capture(self._forward, specs, self._kv, self._mode)
        module = lower(graph, self._route)
        seconds = time.monotonic() - start
        unread = {name: spec for name, spec in specs.items() if name not in graph.input_names and name not in step}
        return TracedGraph(bucket, module, graph.input_names, seconds, unread)

    def _forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        weights = {f"model.{name}": inputs[f"weights.{name}"] for name in self._weights}
        caches = [[inputs[name] for name in self._kv if name.endswith(side)] for side in (".k", ".v")]
        step = [inputs[f"inputs.{name}"] for name in STEP_INPUTS]
        logits: torch.Tensor = torch.func.functional_call(self.step_model, weights, (*step, *caches))
        return logits


def set_ir_defaults(vllm_config: Any) -> None:
    """What the constructor of vLLM's worker sets: a job has no worker."""
    vllm_config.kernel_config.ir_op_priority.set_default()
    ir.set_default_torch_wrap(vllm_config.compilation_config.ir_enable_torch_wrap)


def kv_inputs(step: StepModel, num_blocks: int) -> dict[str, TensorSpec]:
    """The KV caches of every attention layer by the names that they have as inputs of a graph, in layer order."""
    return {
        f"kv.{layer}.{side}": spec
        for layer, pair in enumerate(step.kv_specs(num_blocks))
        for side, spec in zip("kv", pair, strict=True)
    }


def _spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _private_copy(vllm_config: Any) -> Any:
    """A configuration whose model can be built beside the caller's: layers register themselves in it, by name."""
    private = copy.copy(vllm_config)
    private.compilation_config = copy.copy(vllm_config.compilation_config)
    private.compilation_config.static_forward_context = {}
    return private


class ShapesLoader(BaseModelLoader):
    """Builds a model and leaves its parameters without values."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config.load_config)
        self._config = vllm_config

    def download_model(self, model_config: Any) -> None:
        """There is nothing to download."""

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """There is nothing to load; but what loading would create is created."""
        create_late_weights(model, self._config)


def _build(vllm_config: Any, mode: FakeTensorMode) -> nn.Module:
    # Imported first, so that tensors that its module keeps are real in the whole process.
    get_model_architecture(vllm_config.model_config)
    # vLLM shares rotary modules of equal arguments in the whole process: a fake one must not reach a real model, nor
    # a real one a fake model.
    shared = rotary_embedding._ROPE_DICT
    kept = dict(shared)
    shared.clear()
    try:
        with mode, warnings.catch_warnings():
            # vLLM looks at the addresses of weights, which fake ones have none of; it only compares them.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            loader = ShapesLoader(vllm_config)
            model: nn.Module = loader.load_model(vllm_config=vllm_config, model_config=vllm_config.model_config)
        return model
    finally:
        shared.clear()
        shared.update(kept)


@contextlib.contextmanager
def _refusals_in_one_line(model: str) -> Iterator[None]:
    """What vLLM's classes raise while they are built, as a ``CaptureError``.

    They raise anything for a configuration that they do not take, and not all of it can be sent by a worker.
    """
    try:
        yield
    except NeuronError:
        raise
    except Exception as error:
        raise CaptureError(
            f"vLLM could not build the model {model} from its configuration: {_reason(error)}. "
            f"{envs.LOG_LEVEL.name}=DEBUG shows where"
        ) from error


def _reason(error: Exception) -> str:
    """One line; of an assertion that says nothing, its code."""
    text = str(error).rstrip(".")
    if not text:
        text = traceback.extract_tb(error.__traceback__)[-1].line or "no reason given"
    return f"{type(error).__name__}: {' '.join(text.split())}"


@contextlib.contextmanager
def _configured(vllm_config: Any) -> Iterator[None]:
    with set_current_vllm_config(vllm_config):
        yield


@contextlib.contextmanager
def _model_parallel_state(vllm_config: Any) -> Iterator[None]:
    """vLLM's process groups, which its layers ask for their rank: this process's own, or a group of one."""
    if parallel_state.model_parallel_is_initialized():  # type: ignore[no-untyped-call]
        yield
        return
    # Only the ranks meet there: whoever is killed later leaves nothing.
    with tempfile.TemporaryDirectory(prefix="vllm_neuron_") as folder, _configured(vllm_config):
        init_groups(vllm_config, 0, f"file://{Path(folder, 'group')}", 0)
    yield
