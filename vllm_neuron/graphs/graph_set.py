"""The graphs of one start: prepared in the background while the weights load, and checked against what was loaded."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_neuron import envs, metrics
from vllm_neuron.abi import TensorSpec
from vllm_neuron.cache.entry import Entry
from vllm_neuron.cache.source import Source
from vllm_neuron.compile.miss_error import Miss, miss_error
from vllm_neuron.compile.pipeline import Resolution
from vllm_neuron.compile.pool import GraphOutcome, GraphRequest
from vllm_neuron.errors import CacheError, CacheMissError, NeuronError
from vllm_neuron.graphs.loaded_model import LoadedModel, difference
from vllm_neuron.graphs.prepare import Policy, Preparation
from vllm_neuron.model.buckets import Bucket
from vllm_neuron.targets import better_target

logger = logging.getLogger("vllm.neuron.graphs")


@dataclass(frozen=True)
class PreparedGraph:
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
    compilers, work in the background until :meth:`wait`.
    """

    def __init__(self, vllm_config: Any, policy: Policy) -> None:
        self._start = time.monotonic()
        self._model: str = vllm_config.model_config.model
        self._policy = policy
        self._prepared = Preparation(vllm_config, policy)
        self._pipeline = self._prepared.pipeline
        self._prepared.begin()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        if not envs.DISABLE_GRAPH_CAPTURE.get():
            self._thread = threading.Thread(target=self._run, name="neuron-graphs", daemon=True)
            self._thread.start()

    def wait(self, loaded: LoadedModel | None = None) -> list[PreparedGraph]:
        """Every graph, ready to be loaded, in the order of the buckets.

        A graph whose manifest or capture does not fit the ``loaded`` model is captured again, from that; in strict
        mode, it raises :class:`CacheError`. Raises :class:`CacheMissError` that names every miss in strict mode; else
        the first failure of capture or compilation.
        """
        if self._thread is None:
            self._run()
        else:
            self._thread.join()
        if self._failure is not None:
            raise self._failure
        if loaded is not None:
            self._capture_misfits(loaded)
        self._raise_errors()
        self._log_ready()
        graphs = [self._graph(bucket) for bucket in self._prepared.buckets.values()]
        self._prepared.pins.restrict(graph.entry.key for graph in graphs)
        return graphs

    def facts(self) -> dict[str, Any]:
        """For the start report: how many graphs came from where, and seconds of capture and of compilation."""
        resolutions, captured = self._resolutions(), self._prepared.captured
        compiled = [each for each in resolutions if each.source is Source.COMPILED]
        return {
            "target": self._pipeline.compile_for.name,
            "graphs": {source.value: sum(each.source is source for each in resolutions) for source in Source},
            "manifests": dict(Counter(recalled.found.tier for recalled in self._prepared.recalled.values())),
            "captured": len(captured),
            "capture_seconds": round(sum(graph.seconds for graph in captured.values()), 3),
            "lookup_seconds": round(sum(each.seconds for each in resolutions if each not in compiled), 3),
            "compile_seconds": round(sum(each.seconds for each in compiled), 3),
            "tiers": {name: counters.to_json() for name, counters in self._pipeline.cache.counters.items()},
        }

    def _run(self) -> None:
        try:
            self._prepared.run()
        except BaseException as error:
            self._failure = error

    def _capture_misfits(self, loaded: LoadedModel) -> None:
        reasons = {name: reason for name in self._prepared.outcomes if (reason := self._misfit(name, loaded.inputs))}
        if not reasons:
            return
        lines = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        if self._pipeline.strict:
            raise CacheError(self._strict_misfit(reasons, lines))
        logger.warning("Captured again, because they can't be used: %s", lines)
        self._prepared.capture_again(list(reasons), loaded.step_model)

    def _strict_misfit(self, reasons: Mapping[str, str], lines: str) -> str:
        command = self._prepared.compile_command()
        if self._prepared.recalled.keys() >= reasons.keys():
            return (
                f"Strict mode: {len(reasons)} manifests do not fit the loaded model. {lines}. To replace them, remove "
                f"{envs.get_neuron_precompile_cache_dir()} and run: {envs.CACHING_PRECOMPILE.name}=0 {command}"
            )
        return (
            f"Strict mode: {len(reasons)} graphs do not fit the loaded model. {lines}. They were captured from what "
            "the configuration and the headers of safetensors files tell, and loading this checkpoint made another "
            f"model. Save it as safetensors, and run where it is: {command}"
        )

    def _misfit(self, name: str, model: Mapping[str, TensorSpec]) -> str | None:
        if name not in self._prepared.recalled:
            return difference(self._prepared.captured[name].model_inputs(), "the captured model", model)
        trace_cache = self._prepared.opened.cache
        assert trace_cache is not None, "only a trace cache recalls"
        if not self._pipeline.strict and isinstance(self._prepared.outcomes[name].error, CacheMissError):
            return "its artifact is in no tier any more"
        return trace_cache.misfit(self._prepared.recalled[name].found.manifest, self._prepared.buckets[name], model)

    def _graph(self, bucket: Bucket) -> PreparedGraph:
        resolution = self._prepared.outcomes[bucket.name].resolution
        assert resolution is not None, "errors have been raised"
        names = self._prepared.input_names(bucket.name)
        return PreparedGraph(bucket, resolution.entry, names, resolution.source is Source.COMPILED)

    def _resolutions(self) -> list[Resolution]:
        return [outcome.resolution for outcome in self._outcomes() if outcome.resolution is not None]

    def _outcomes(self) -> list[GraphOutcome]:
        """Those that there are by now, in the order of the buckets."""
        outcomes = self._prepared.outcomes
        return [outcomes[name] for name in self._prepared.buckets if name in outcomes]

    def _raise_errors(self) -> None:
        errors = [outcome for outcome in self._outcomes() if outcome.error is not None]
        misses = [outcome for outcome in errors if isinstance(outcome.error, CacheMissError)]
        for outcome in errors:
            if outcome not in misses and outcome.error is not None:
                raise outcome.error
        if misses:
            raise self._miss_error([outcome.request for outcome in misses])

    def _miss_error(self, requests: list[GraphRequest]) -> NeuronError:
        misses = [Miss(request.name, self._pipeline.key(request.module), request.provenance) for request in requests]
        graphs, command = len(self._prepared.buckets), self._prepared.compile_command()
        return miss_error(self._pipeline.cache, self._model, misses, graphs, command)

    def _log_ready(self) -> None:
        outcomes, opened = self._prepared.outcomes, self._prepared.opened
        for name, outcome in outcomes.items():
            found = outcome.resolution
            metrics.set_compilation_time(name, found.seconds if found and found.source is Source.COMPILED else 0.0)
        facts = self.facts()
        logger.info(
            "Graphs ready: %d in %.1f s (%d from the local tier, %d from the remote tier, %d compiled)",
            len(outcomes),
            time.monotonic() - self._start,
            facts["graphs"]["local"],
            facts["graphs"]["remote"],
            facts["graphs"]["compiled"],
        )
        self._log_better_target()
        self._log_tiers()
        if opened.off_because and self._policy.route is None:
            logger.info(
                "The Precompile Cache is off: %s. Capturing %d graphs took %.1f s of computing time, at each start",
                opened.off_because,
                facts["captured"],
                facts["capture_seconds"],
            )

    def _log_better_target(self) -> None:
        targets = {resolution.target.name: resolution.target for resolution in self._resolutions()}
        for target in targets.values():
            if (better := better_target(target)) is not None:
                logger.info(
                    "The graphs are for %s, and this host has the features of %s: artifacts that are compiled with "
                    "--target %s may run faster here",
                    target.name,
                    better.name,
                    better.name,
                )

    def _log_tiers(self) -> None:
        cache = self._pipeline.cache
        for name, counters in cache.counters.items():
            logger.info("Cache tier %s: %s", cache.local.root if name == cache.local.name else name, counters)
            metrics.set_cache_tier(name, counters.to_json())
