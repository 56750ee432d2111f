"""The graphs of one start: recalled or captured, looked up and, where allowed, compiled, while the weights load."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from vllm_neuron import envs, metrics
from vllm_neuron.abi import TensorSpec
from vllm_neuron.cache.entry import Entry
from vllm_neuron.cache.in_use import Claim
from vllm_neuron.compile.miss_error import Miss, miss_error
from vllm_neuron.compile.pipeline import Pipeline, Source
from vllm_neuron.compile.pool import GraphOutcome, GraphRequest, resolve_all
from vllm_neuron.errors import CacheError, CacheMissError, CaptureError, NeuronError
from vllm_neuron.graphs.loaded_model import LoadedModel, captured_model, difference
from vllm_neuron.graphs.provenance import compile_command, provenance
from vllm_neuron.graphs.trace_cache import TraceCache, TracedGraph, open_for_serving
from vllm_neuron.lowering import release
from vllm_neuron.model.buckets import Bucket, buckets_for, compiler_arguments
from vllm_neuron.routes import Route
from vllm_neuron.targets import better_target

if TYPE_CHECKING:
    from vllm_neuron.cache.manifests import FoundManifest

logger = logging.getLogger("vllm.neuron.graphs")


@dataclass(frozen=True)
class CompiledGraph:
    """One bucket's finished entry. ``input_names`` says, by position, what each input of its artifact is.

    ``fresh``: compiled in this start, and so never run before.
    """

    bucket: Bucket
    entry: Entry
    input_names: tuple[str, ...]
    fresh: bool


class GraphSet:
    """Every bucket's graph, from manifest or capture to finished entry.

    Create it before threads, gloo or IREE exist in this process: capture workers are forked here. They, and the
    compilers, work in the background until :meth:`wait`. ``route`` and ``level`` are by default the route in force and
    the configuration's optimization level; with a ``route``, every graph is captured.
    """

    def __init__(self, vllm_config: Any, route: Route | None = None, level: int | None = None) -> None:
        self._start = time.monotonic()
        self._config = vllm_config
        self._route = route
        level = int(vllm_config.optimization_level) if level is None else level
        self._pipeline = Pipeline.from_environment(level, compiler_arguments(vllm_config.additional_config))
        self._pipeline.check_keys()
        self._claim = Claim(self._pipeline.cache.local)
        self._buckets = {bucket.name: bucket for bucket in buckets_for(vllm_config)}
        opened = "the route is given" if route else open_for_serving(vllm_config, self._pipeline.cache)
        self._traces = opened if isinstance(opened, TraceCache) else None
        self._off_because = opened if isinstance(opened, str) else ""
        self._recalled = {} if self._traces is None else self._recall(self._traces)
        self._traced: dict[str, TracedGraph] = {}
        self._outcomes: dict[str, GraphOutcome] = {}
        self._failure: BaseException | None = None
        to_capture = [bucket for name, bucket in self._buckets.items() if name not in self._recalled]
        self._requests = chain(self._recalled_requests(), self._captured_requests(self._capture(to_capture)))
        self._thread: threading.Thread | None = None
        if not envs.DISABLE_GRAPH_CAPTURE.get():
            self._thread = threading.Thread(target=self._resolve_all, name="neuron-graphs", daemon=True)
            self._thread.start()

    def wait(self, loaded: LoadedModel | None = None) -> list[CompiledGraph]:
        """Every graph, ready to be loaded, in the order of the buckets.

        A graph whose manifest or capture does not fit the ``loaded`` model is captured again, from that; in strict
        mode, it raises :class:`CacheError`. Raises :class:`CacheMissError` that names every miss in strict mode; else
        the first failure of capture or compilation.
        """
        if self._thread is None:
            self._resolve_all()
        else:
            self._thread.join()
        if self._failure is not None:
            raise self._failure
        if loaded is not None:
            self._capture_misfits(loaded)
        self._raise_errors()
        self._report()
        graphs = [self._compiled(bucket) for bucket in self._buckets.values()]
        self._claim.settle(graph.entry.key for graph in graphs)
        return graphs

    def facts(self) -> dict[str, Any]:
        """For the start report: how many graphs came from where, and seconds of capture and of compilation."""
        resolutions = [outcome.resolution for outcome in self._outcomes.values() if outcome.resolution]
        compiled = [each for each in resolutions if each.source is Source.COMPILED]
        return {
            "target": self._pipeline.compile_for.name,
            "graphs": {source.value: sum(each.source is source for each in resolutions) for source in Source},
            "manifests": dict(Counter(found.tier for found in self._recalled.values())),
            "captured": len(self._traced),
            "capture_seconds": round(sum(traced.seconds for traced in self._traced.values()), 3),
            "lookup_seconds": round(sum(each.seconds for each in resolutions if each not in compiled), 3),
            "compile_seconds": round(sum(each.seconds for each in compiled), 3),
            "tiers": {name: counters.to_json() for name, counters in self._pipeline.cache.counters.items()},
        }

    def _recall(self, traces: TraceCache) -> dict[str, FoundManifest]:
        # In strict mode, what is in no tier is an error all the same: no capture would help.
        pipeline = self._pipeline
        return traces.usable(list(self._buckets.values()), lambda module: pipeline.strict or pipeline.has(module))

    def _capture(self, buckets: Sequence[Bucket], loaded: LoadedModel | None = None) -> Iterator[TracedGraph]:
        if not buckets:
            return iter(())
        if not release.installed():
            raise CaptureError(
                f"{', '.join(bucket.name for bucket in buckets)} can't be captured, because {release.PACKAGE} is not "
                f"installed here, and there is no manifest to use instead "
                f"({self._off_because or 'see the line about the Precompile Cache above'}). "
                f"Run the compile job for this configuration: {self._compile_command()}"
            )
        from vllm_neuron.graphs import model_capture

        if loaded is not None:
            return model_capture.trace_here(self._config, buckets, route=self._route, loaded=loaded.step_model)
        return model_capture.trace(self._config, buckets, route=self._route)

    def _recalled_requests(self) -> Iterator[GraphRequest]:
        for name, found in self._recalled.items():
            yield GraphRequest(name, found.manifest.module, provenance(self._config, self._buckets[name]))

    def _captured_requests(self, traced: Iterator[TracedGraph]) -> Iterator[GraphRequest]:
        for graph in traced:
            self._traced[graph.bucket.name] = graph
            yield GraphRequest(graph.bucket.name, graph.module, provenance(self._config, graph.bucket))

    def _resolve_all(self) -> None:
        try:
            self._resolve(self._requests)
        except BaseException as error:
            self._failure = error

    def _resolve(self, requests: Iterator[GraphRequest]) -> None:
        for outcome in resolve_all(self._pipeline, requests):
            self._outcomes[outcome.request.name] = outcome
            traced = self._traced.get(outcome.request.name)
            if self._traces is not None and traced is not None and outcome.resolution is not None:
                self._keep(self._traces, traced)

    def _keep(self, traces: TraceCache, traced: TracedGraph) -> None:
        manifest = traces.keep(traced)
        if not self._pipeline.strict:
            try:
                traces.publish(manifest)
            except CacheError as error:
                logger.warning("%s", error)

    def _capture_misfits(self, loaded: LoadedModel) -> None:
        reasons = {name: reason for name in self._outcomes if (reason := self._misfit(name, loaded.inputs))}
        if not reasons:
            return
        lines = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        if self._pipeline.strict:
            raise CacheError(self._strict_misfit(reasons, lines))
        logger.warning("Captured again, because they do not fit the loaded model: %s", lines)
        for name in reasons:
            self._recalled.pop(name, None)
        # In this process: it has threads by now, and must not fork.
        self._resolve(self._captured_requests(self._capture([self._buckets[name] for name in reasons], loaded)))

    def _strict_misfit(self, reasons: Mapping[str, str], lines: str) -> str:
        if self._recalled.keys() >= reasons.keys():
            return (
                f"Strict mode: {len(reasons)} manifests do not fit the loaded model. {lines}. To replace them, remove "
                f"{envs.get_neuron_precompile_cache_dir()} and run: "
                f"{envs.CACHING_PRECOMPILE.name}=0 {self._compile_command()}"
            )
        return (
            f"Strict mode: {len(reasons)} graphs do not fit the loaded model. {lines}. They were captured from what "
            "the configuration and the headers of safetensors files tell, and loading this checkpoint made another "
            f"model. Save it as safetensors, and run where it is: {self._compile_command()}"
        )

    def _misfit(self, name: str, model: Mapping[str, TensorSpec]) -> str | None:
        if name in self._traced:
            return difference(captured_model(self._traced[name]), "the captured model", model)
        assert self._traces is not None, "only a trace cache recalls"
        if not self._pipeline.strict and isinstance(self._outcomes[name].error, CacheMissError):
            return "its artifact is in no tier any more"
        return self._traces.misfit(self._recalled[name].manifest, self._buckets[name], model)

    def _compiled(self, bucket: Bucket) -> CompiledGraph:
        resolution = self._outcomes[bucket.name].resolution
        assert resolution is not None, "errors have been raised"
        found = self._recalled.get(bucket.name)
        names = found.manifest.inputs if found else self._traced[bucket.name].input_names
        return CompiledGraph(bucket, resolution.entry, names, resolution.source is Source.COMPILED)

    def _raise_errors(self) -> None:
        errors = [outcome for outcome in self._outcomes.values() if outcome.error is not None]
        misses = [outcome for outcome in errors if isinstance(outcome.error, CacheMissError)]
        for outcome in errors:
            if outcome not in misses and outcome.error is not None:
                raise outcome.error
        if misses:
            raise self._miss_error([outcome.request for outcome in misses])

    def _miss_error(self, requests: list[GraphRequest]) -> NeuronError:
        misses = [Miss(request.name, self._pipeline.key(request.module), request.provenance) for request in requests]
        model, graphs = self._config.model_config.model, len(self._buckets)
        return miss_error(self._pipeline.cache, model, misses, graphs, self._compile_command())

    def _compile_command(self) -> str:
        return compile_command(self._config, self._pipeline.compile_for)

    def _report(self) -> None:
        for name, outcome in self._outcomes.items():
            found = outcome.resolution
            metrics.set_compilation_time(name, found.seconds if found and found.source is Source.COMPILED else 0.0)
        facts = self.facts()
        logger.info(
            "Graphs ready: %d in %.1f s (%d from the local tier, %d from the remote tier, %d compiled)",
            len(self._outcomes),
            time.monotonic() - self._start,
            facts["graphs"]["local"],
            facts["graphs"]["remote"],
            facts["graphs"]["compiled"],
        )
        self._tell_of_better_target()
        if self._off_because and not self._route:
            logger.info(
                "The Precompile Cache is off: %s. Capturing %d graphs took %.1f s of computing time, at each start",
                self._off_because,
                facts["captured"],
                facts["capture_seconds"],
            )

    def _tell_of_better_target(self) -> None:
        resolutions = [outcome.resolution for outcome in self._outcomes.values() if outcome.resolution]
        for target in {resolution.target.name: resolution.target for resolution in resolutions}.values():
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
