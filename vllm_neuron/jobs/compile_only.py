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
from vllm_neuron.cache.tiers import TieredCache
from vllm_neuron.compile.pipeline import Pipeline, Publish, Resolution
from vllm_neuron.compile.pool import GraphOutcome, GraphRequest, resolve_all
from vllm_neuron.compilers.base import check_compiler
from vllm_neuron.errors import CacheError, CacheMissError
from vllm_neuron.jobs.report import GraphLine, JobReport
from vllm_neuron.serve.buckets import Bucket, buckets_for, compiler_arguments
from vllm_neuron.serve.provenance import provenance
from vllm_neuron.serve.trace_cache import TraceCache, TracedGraph, open_for_compiling
from vllm_neuron.serve.tracing import trace
from vllm_neuron.targets import Target, compile_target

logger = logging.getLogger("vllm.neuron.job")

OnLine = Callable[[GraphLine, int, int], None]


def compile_model(vllm_config: Any, on_line: OnLine | None = None) -> JobReport:
    """Compile every graph of one configuration for the target in force, and publish what the remote tier lacks.

    Their manifests are stored and published with them, so that production need not capture. In strict mode nothing is
    compiled or published: the report says what is missing. ``on_line`` is called as graphs finish, with the line, how
    many are done and how many there are. Raises :class:`CompileError` where the compiler is missing, before anything
    is captured, and :class:`CaptureError` or :class:`UnsupportedOpError` where a graph
    can't be captured; what the compiler or a tier refuses is in the report.
    """
    start = time.monotonic()
    target = compile_target()
    buckets = buckets_for(vllm_config)
    pipeline = _pipeline(vllm_config, target)
    if not pipeline.strict:
        check_compiler(target)
    pipeline.check_keys()
    report = JobReport(vllm_config.model_config.model, tiers=pipeline.cache.describe())
    intent = "Looking up" if pipeline.strict else "Compiling"
    logger.info("%s %d graphs of %s for %s", intent, len(buckets), report.model, target.name)
    traces = None if pipeline.strict else open_for_compiling(vllm_config, pipeline.cache)
    traced: dict[str, TracedGraph] = {}
    lines: dict[str, GraphLine] = {}

    def finished(outcome: GraphOutcome) -> None:
        line = _line(pipeline, outcome, target)
        if traces is not None and line.ok:
            line = _with_manifest(line, traces, traced[line.graph])
        lines[line.graph] = line
        logger.info("%s: %s (%d of %d, %.1f s)", line.graph, line.source, len(lines), len(buckets), line.seconds)
        if on_line is not None:
            on_line(line, len(lines), len(buckets))

    with _claiming(pipeline) as note:
        resolve_all(pipeline, map(note, _requests(vllm_config, buckets, traced)), finished)
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
def _claiming(pipeline: Pipeline) -> Iterator[Callable[[GraphRequest], GraphRequest]]:
    """Keeps the entries of requests that were passed through from being removed before they have been published.

    In strict mode nothing is published, and nothing is written for it.
    """
    if pipeline.strict:
        yield lambda request: request
        return
    keys: set[str] = set()
    claim = Claim(pipeline.cache.local)
    claim.settle(keys)

    def note(request: GraphRequest) -> GraphRequest:
        keys.add(pipeline.key(request.module).digest)
        claim.settle(keys)
        return request

    try:
        yield note
    finally:
        claim.close()


def _requests(vllm_config: Any, buckets: list[Bucket], traced: dict[str, TracedGraph]) -> Iterator[GraphRequest]:
    for graph in trace(vllm_config, buckets):
        traced[graph.bucket.name] = graph
        yield GraphRequest(graph.bucket.name, graph.module, provenance(vllm_config, graph.bucket))


def _with_manifest(line: GraphLine, traces: TraceCache, traced: TracedGraph) -> GraphLine:
    try:
        traces.publish(traces.keep(traced))
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
    compiled = resolution.source.value == "compiled"
    return GraphLine(
        request.name,
        target.name,
        resolution.source.value,
        resolution.key.digest,
        resolution.seconds,
        resolution.entry.artifact_path.stat().st_size,
        resolution.entry.metadata.peak_memory_bytes if compiled else 0,
        resolution.published,
    )
