"""The compile-only job: every graph of a model captured, compiled and published, nothing executed, no weight read."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from vllm_neuron import envs
from vllm_neuron.cache.in_use import Claim
from vllm_neuron.cache.manifest import Manifest
from vllm_neuron.cache.manifests import FoundManifest
from vllm_neuron.cache.tiers import TieredCache
from vllm_neuron.compile.pipeline import Pipeline, Publish, Resolution, Source
from vllm_neuron.compile.pool import GraphOutcome, GraphRequest, resolve_all
from vllm_neuron.compilers.base import check_compiler
from vllm_neuron.errors import CacheError, CacheMissError
from vllm_neuron.graphs.capture_workers import trace
from vllm_neuron.graphs.provenance import provenance
from vllm_neuron.graphs.trace_cache import TraceCache, TracedGraph, open_for_compiling
from vllm_neuron.jobs.report import GraphLine, JobReport
from vllm_neuron.lowering.module import ModuleIdentity
from vllm_neuron.model.buckets import Bucket, buckets_for, compiler_arguments
from vllm_neuron.targets import Target, compile_target

logger = logging.getLogger("vllm.neuron.job")

OnLine = Callable[[GraphLine, int, int], None]


def compile_model(vllm_config: Any, on_line: OnLine | None = None) -> JobReport:
    """Compile every graph of one configuration for the target in force, and publish what the remote tier lacks.

    Their manifests are stored and published with them, so that neither production nor this job, when it is run again,
    need capture. In strict mode everything is captured, and nothing is compiled or published: the report says what is
    missing. ``on_line`` is called as graphs finish, with the line, how many are done and how many there are. Raises
    :class:`ConfigError` where all remote tiers are read-only and :class:`CompileError` where the compiler is missing,
    before anything is captured, and :class:`CaptureError` or :class:`UnsupportedOpError` where a graph can't be
    captured; what the compiler or a tier refuses is in the report.
    """
    start = time.monotonic()
    target = compile_target()
    buckets = buckets_for(vllm_config)
    pipeline = _pipeline(vllm_config, target)
    if not pipeline.strict:
        pipeline.cache.check_publishable()
        check_compiler(target)
    pipeline.check_keys()
    report = JobReport(vllm_config.model_config.model, tiers=pipeline.cache.describe())
    intent = "Looking up" if pipeline.strict else "Compiling"
    logger.info("%s %d graphs of %s for %s", intent, len(buckets), report.model, target.name)
    traces = None if pipeline.strict else open_for_compiling(vllm_config, pipeline.cache)
    graphs = _Graphs(vllm_config, buckets, traces)
    lines: dict[str, GraphLine] = {}

    def finished(outcome: GraphOutcome) -> None:
        found = outcome.resolution
        line = _line(pipeline, replace(outcome, resolution=graphs.told(found) if found else None), target)
        if traces is not None and line.ok:
            line = _with_manifest(line, traces, graphs.manifest(line.graph, traces))
        lines[line.graph] = line
        logger.info("%s: %s (%d of %d, %.1f s)", line.graph, line.source, len(lines), len(buckets), line.seconds)
        if on_line is not None:
            on_line(line, len(lines), len(buckets))

    with _claiming(pipeline) as note:
        resolve_all(pipeline, graphs.requests(pipeline, note), finished)
    report.graphs = [lines[bucket.name] for bucket in buckets]
    report.seconds = time.monotonic() - start
    return report


def _pipeline(vllm_config: Any, target: Target) -> Pipeline:
    strict = envs.strict()
    return Pipeline(
        TieredCache.from_environment(),
        target,
        [target],
        int(vllm_config.optimization_level),
        strict=strict,
        publish=Publish.NONE if strict else Publish.REQUIRED,
        compiler_args=compiler_arguments(vllm_config.additional_config),
    )


@contextlib.contextmanager
def _claiming(pipeline: Pipeline) -> Iterator[Callable[[ModuleIdentity], None]]:
    """Keeps the entries of modules that it was called with from being removed before they have been published.

    In strict mode nothing is published, and nothing is written for it.
    """
    if pipeline.strict:
        yield lambda module: None
        return
    keys: set[str] = set()
    claim = Claim(pipeline.cache.local)
    claim.settle(keys)

    def note(module: ModuleIdentity) -> None:
        keys.add(pipeline.key(module).digest)
        claim.settle(keys)

    try:
        yield note
    finally:
        claim.close()


class _Graphs:
    """The graphs of a job: those that were captured before and are in a tier, and captures of the others."""

    def __init__(self, vllm_config: Any, buckets: list[Bucket], traces: TraceCache | None) -> None:
        self._config = vllm_config
        self._buckets = {bucket.name: bucket for bucket in buckets}
        off = envs.CACHING_PRECOMPILE.is_set() and not envs.CACHING_PRECOMPILE.get()
        self._recall_from = None if off else traces
        self._recalled: dict[str, FoundManifest] = {}
        self._traced: dict[str, TracedGraph] = {}
        self._first: dict[str, Resolution] = {}

    def requests(self, pipeline: Pipeline, note: Callable[[ModuleIdentity], None]) -> Iterator[GraphRequest]:
        """What is to be resolved. ``note`` is called with each module before it is looked for."""

        def has(module: ModuleIdentity) -> bool:
            note(module)
            # Not only told of by a tier, but fetched and verified: what is damaged there is to be made anew.
            found = pipeline.lookup(module)
            if found is not None:
                self._first[found.key.digest] = found
            return found is not None

        if self._recall_from is not None:
            self._recalled = self._recall_from.usable(list(self._buckets.values()), has)
        others = [bucket for name, bucket in self._buckets.items() if name not in self._recalled]
        # Forks its workers now: before other threads have work.
        captured = trace(self._config, others) if others else iter(())
        for name, found in self._recalled.items():
            yield GraphRequest(name, found.manifest.module, provenance(self._config, self._buckets[name]))
        for graph in captured:
            self._traced[graph.bucket.name] = graph
            note(graph.module)
            yield GraphRequest(graph.bucket.name, graph.module, provenance(self._config, graph.bucket))

    def told(self, resolution: Resolution) -> Resolution:
        """``resolution`` with the tier that the graph was first found in, and all the time that it took."""
        first = self._first.get(resolution.key.digest)
        if first is None:
            return resolution
        return replace(resolution, source=first.source, seconds=first.seconds + resolution.seconds)

    def manifest(self, name: str, traces: TraceCache) -> Manifest:
        """The manifest of a graph whose request has been given."""
        return self._recalled[name].manifest if name in self._recalled else traces.keep(self._traced[name])


def _with_manifest(line: GraphLine, traces: TraceCache, manifest: Manifest) -> GraphLine:
    try:
        traces.publish(manifest)
    except CacheError as error:
        return replace(line, source="failed", error=str(error))
    return line


def _loss(cache: TieredCache, resolution: Resolution | None) -> CacheError | None:
    """Why an entry will be gone when this job ends, for all that the job has published."""
    if resolution is None or cache.remotes:
        return None
    try:
        cache.local.check_kept(resolution.entry)
    except CacheError as error:
        return error
    return None


def _line(pipeline: Pipeline, outcome: GraphOutcome, target: Target) -> GraphLine:
    request, resolution = outcome.request, outcome.resolution
    error = outcome.error or _loss(pipeline.cache, resolution)
    if resolution is None or error is not None:
        source = "missing" if isinstance(error, CacheMissError) else "failed"
        return GraphLine(request.name, target.name, source, pipeline.key(request.module).digest, error=str(error))
    compiled = resolution.source is Source.COMPILED
    return GraphLine(
        request.name,
        target.name,
        resolution.source.value,
        resolution.key.digest,
        resolution.seconds,
        resolution.entry.artifact_path.stat().st_size,
        resolution.entry.metadata.peak_memory_bytes if compiled else 0,
        resolution.published,
        _shared(pipeline, resolution),
    )


def _shared(pipeline: Pipeline, resolution: Resolution) -> bool | None:
    """Whether a remote tier has the entry; None where there is none. What had to be published is there."""
    if not pipeline.cache.remotes:
        return None
    if resolution.source is Source.REMOTE or pipeline.publish is Publish.REQUIRED:
        return True
    return pipeline.cache.where(resolution.key.digest) not in ([], [pipeline.cache.local.name])
