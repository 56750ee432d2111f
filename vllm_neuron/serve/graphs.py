"""The graphs of one start: captured, looked up and, where that is allowed, compiled, while the weights are loading."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm_neuron import envs, metrics
from vllm_neuron.cache.entry import Entry
from vllm_neuron.cache.in_use import Claim
from vllm_neuron.compile.misses import Miss, miss_error
from vllm_neuron.compile.pipeline import Pipeline, Source
from vllm_neuron.compile.pool import GraphOutcome, GraphRequest, resolve_all
from vllm_neuron.errors import CacheMissError, NeuronError
from vllm_neuron.serve.buckets import Bucket, buckets_for
from vllm_neuron.serve.provenance import compile_command, provenance
from vllm_neuron.serve.tracing import TracedGraph, trace
from vllm_neuron.targets import better_target

logger = logging.getLogger("vllm.neuron.graphs")


@dataclass(frozen=True)
class CompiledGraph:
    """One bucket's finished entry. ``input_names`` says, by position, what each input of its artifact is."""

    bucket: Bucket
    entry: Entry
    input_names: tuple[str, ...]


class GraphSet:
    """Every bucket's graph, from capture to finished entry.

    Create it before threads, gloo or IREE exist in this process: capture workers are forked here. They, and the
    compilers, work in the background until :meth:`wait`.
    """

    def __init__(self, vllm_config: Any, num_blocks: int | None = None) -> None:
        self._config = vllm_config
        self._pipeline = Pipeline.from_environment(int(vllm_config.optimization_level))
        self._claim = Claim(self._pipeline.cache.local)
        self._buckets = buckets_for(vllm_config)
        self._traced: dict[str, TracedGraph] = {}
        self._outcomes: list[GraphOutcome] = []
        self._failure: BaseException | None = None
        self._start = time.monotonic()
        self._requests = self._request(trace(vllm_config, self._buckets, num_blocks))
        self._thread: threading.Thread | None = None
        if not envs.DISABLE_GRAPH_CAPTURE.get():
            self._thread = threading.Thread(target=self._resolve, name="neuron-graphs", daemon=True)
            self._thread.start()

    def wait(self) -> list[CompiledGraph]:
        """Every graph, ready to be loaded, in the order of the buckets.

        Raises :class:`CacheMissError` that names every miss in strict mode; else the first failure of capture or
        compilation.
        """
        if self._thread is None:
            self._resolve()
        else:
            self._thread.join()
        if self._failure is not None:
            raise self._failure
        self._raise_errors()
        self._report()
        graphs = [
            CompiledGraph(traced.bucket, outcome.resolution.entry, traced.input_names)
            for outcome in self._outcomes
            if outcome.resolution is not None
            for traced in [self._traced[outcome.request.name]]
        ]
        self._claim.settle(graph.entry.key for graph in graphs)
        return graphs

    def _resolve(self) -> None:
        try:
            self._outcomes = resolve_all(self._pipeline, self._requests)
        except BaseException as error:
            self._failure = error

    def _request(self, traced: Iterator[TracedGraph]) -> Iterator[GraphRequest]:
        for graph in traced:
            self._traced[graph.bucket.name] = graph
            yield GraphRequest(graph.bucket.name, graph.module, provenance(self._config, graph.bucket))

    def _raise_errors(self) -> None:
        errors = [outcome for outcome in self._outcomes if outcome.error is not None]
        misses = [outcome for outcome in errors if isinstance(outcome.error, CacheMissError)]
        for outcome in errors:
            if outcome not in misses and outcome.error is not None:
                raise outcome.error
        if misses:
            error = self._miss_error([outcome.request for outcome in misses])
            logger.error("%s", error)
            raise error

    def _miss_error(self, requests: list[GraphRequest]) -> NeuronError:
        misses = [Miss(request.name, self._pipeline.key(request.module), request.provenance) for request in requests]
        command = compile_command(self._config, self._pipeline.compile_for)
        return miss_error(self._pipeline.cache, self._config.model_config.model, misses, len(self._buckets), command)

    def _report(self) -> None:
        found = [(outcome.request.name, outcome.resolution) for outcome in self._outcomes if outcome.resolution]
        for name, resolution in found:
            compiled = resolution.source is Source.COMPILED
            metrics.set_compilation_time(name, resolution.entry.metadata.compile_seconds if compiled else 0.0)
        sources = Counter(resolution.source.value for _, resolution in found)
        logger.info(
            "Graphs ready: %d in %.1f s (%d from the local tier, %d from the remote tier, %d compiled)",
            len(self._outcomes),
            time.monotonic() - self._start,
            sources["local"],
            sources["remote"],
            sources["compiled"],
        )
        for target in {resolution.target.name: resolution.target for _, resolution in found}.values():
            if (better := better_target(target)) is not None:
                logger.info(
                    "The graphs are for %s, and this host has the features of %s: artifacts that are compiled with "
                    "--target %s may run faster here",
                    target.name,
                    better.name,
                    better.name,
                )
        cache = self._pipeline.cache
        for name, counters in cache.counters.items():
            logger.info("Cache tier %s: %s", cache.local.root if name == cache.local.name else name, counters)
            metrics.set_cache_tier(name, counters.to_json())
