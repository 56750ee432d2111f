"""The compile-only job: every graph of a model captured, compiled and published, nothing executed, no weight read."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from vllm_neuron.cache.source import Source
from vllm_neuron.compile.pipeline import Pipeline, Publish, Resolution
from vllm_neuron.compile.pool import GraphOutcome
from vllm_neuron.errors import CacheMissError
from vllm_neuron.graphs.prepare import Policy, Preparation
from vllm_neuron.jobs.report import GraphLine, JobReport

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
    preparation = Preparation(vllm_config, Policy.compiling())
    pipeline, graphs = preparation.pipeline, len(preparation.buckets)
    report = JobReport(vllm_config.model_config.model, tiers=pipeline.cache.describe())
    intent = "Looking up" if pipeline.strict else "Compiling"
    logger.info("%s %d graphs of %s for %s", intent, graphs, report.model, pipeline.compile_for.name)
    lines: dict[str, GraphLine] = {}

    def finished(outcome: GraphOutcome) -> None:
        line = lines[outcome.request.name] = _line(pipeline, outcome)
        logger.info("%s: %s (%d of %d, %.1f s)", line.graph, line.source, len(lines), graphs, line.seconds)
        if on_line is not None:
            on_line(line, len(lines), graphs)

    with contextlib.closing(preparation):
        preparation.begin()
        preparation.run(finished)
    report.graphs = [lines[name] for name in preparation.buckets]
    report.seconds = time.monotonic() - start
    return report


def _line(pipeline: Pipeline, outcome: GraphOutcome) -> GraphLine:
    name, target, resolution = outcome.request.name, pipeline.compile_for.name, outcome.resolution
    error = "" if outcome.error is None else str(outcome.error)
    if resolution is None:
        source = "missing" if isinstance(outcome.error, CacheMissError) else "failed"
        return GraphLine(name, target, source, pipeline.key(outcome.request.module).digest, error=error)
    compiled = resolution.source is Source.COMPILED
    return GraphLine(
        name,
        target,
        "failed" if error else resolution.source.value,
        resolution.key.digest,
        resolution.seconds,
        resolution.entry.artifact_path.stat().st_size,
        resolution.entry.metadata.peak_memory_bytes if compiled else 0,
        resolution.published,
        _shared(pipeline, resolution),
        error,
    )


def _shared(pipeline: Pipeline, resolution: Resolution) -> bool | None:
    """Whether a remote tier has the entry; None where there is none. What had to be published is there."""
    if not pipeline.cache.remotes:
        return None
    if resolution.source is Source.REMOTE or pipeline.publish is Publish.REQUIRED:
        return True
    return pipeline.cache.where(resolution.key.digest) not in ([], [pipeline.cache.local.name])
