"""The one way from a configuration to its graphs: recalled or captured, looked up and, where allowed, compiled.

A server's start and a compile job differ in their policy alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm_neuron import envs
from vllm_neuron.cache.manifests.store import FoundManifest
from vllm_neuron.cache.tiers import TieredCache
from vllm_neuron.compile.pipeline import Pipeline, Publish, Resolution
from vllm_neuron.compile.pool import GraphOutcome, GraphRequest, resolve_all
from vllm_neuron.compilers.base import check_compiler
from vllm_neuron.errors import CacheError, CaptureError
from vllm_neuron.graphs.pins import Hold, Pins
from vllm_neuron.graphs.provenance import compile_command, provenance
from vllm_neuron.graphs.trace_cache import CapturedGraph, OpenedTraceCache, open_for_compiling, open_for_serving
from vllm_neuron.lowering import release
from vllm_neuron.lowering.module import ModuleIdentity
from vllm_neuron.model.buckets import Bucket, buckets_for, compiler_arguments
from vllm_neuron.routes import Route
from vllm_neuron.targets import Target, compile_target, lookup_targets

if TYPE_CHECKING:
    from vllm_neuron.model.step import StepModel

logger = logging.getLogger("vllm.neuron.graphs")


@dataclass(frozen=True)
class Policy:
    """What a preparation of graphs may do, and what it owes.

    strict: what is in no tier is an error; nothing is compiled or published. publish: what is owed to the remote tiers,
    of entries and of manifests. targets: what is looked up, best first. open_trace_cache: opens the Precompile Cache.
    route and level: None for the route in force and the configuration's optimization level.
    """

    strict: bool
    publish: Publish
    targets: tuple[Target, ...]
    hold: Hold
    open_trace_cache: Callable[[Any, TieredCache], OpenedTraceCache]
    route: Route | None = None
    level: int | None = None

    @classmethod
    def serving(cls) -> Policy:
        """A server's start: what it compiles it publishes if it can."""
        strict = envs.strict()
        publish = Publish.NONE if strict else Publish.BEST_EFFORT
        return cls(strict, publish, tuple(lookup_targets()), Hold.EVERYTHING, open_for_serving)

    @classmethod
    def compiling(cls) -> Policy:
        """A compile job, which owes everything to the remote tiers; a strict one only looks what is there."""
        strict = envs.strict()
        publish = Publish.NONE if strict else Publish.REQUIRED
        hold = Hold.NOTHING if strict else Hold.NOTED
        return cls(strict, publish, (compile_target(),), hold, open_for_compiling)

    @classmethod
    def comparing(cls, route: Route, level: int) -> Policy:
        """One of several routes side by side, every graph of which is captured."""
        opened = OpenedTraceCache(None, "the route is given")
        return replace(cls.serving(), open_trace_cache=lambda config, cache: opened, route=route, level=level)


@dataclass(frozen=True)
class Recalled:
    """A graph that need not be captured, and its entry where that has been looked up already."""

    found: FoundManifest
    resolution: Resolution | None = None


class Preparation:
    """The graphs of one configuration, each from its manifest or its capture to a finished entry.

    ``recalled``, ``captured`` and ``outcomes`` say by name of bucket how far they are. Raises :class:`ConfigError`
    where ``policy`` can't be kept to, as all remote tiers are read-only, and :class:`CompileError` where a compiler
    that it needs is missing; nothing has been captured then.
    """

    def __init__(self, vllm_config: Any, policy: Policy) -> None:
        self._config = vllm_config
        self._policy = policy
        self.pipeline = Pipeline(
            TieredCache.from_environment(),
            compile_target(),
            policy.targets,
            int(vllm_config.optimization_level) if policy.level is None else policy.level,
            strict=policy.strict,
            publish=policy.publish,
            compiler_args=compiler_arguments(vllm_config.additional_config),
        )
        if policy.publish is Publish.REQUIRED:
            self.pipeline.cache.check_publishable()
            check_compiler(self.pipeline.compile_for)
        self.pipeline.check_keys()
        self.buckets = {bucket.name: bucket for bucket in buckets_for(vllm_config)}
        self.recalled: dict[str, Recalled] = {}
        self.captured: dict[str, CapturedGraph] = {}
        self.outcomes: dict[str, GraphOutcome] = {}
        self.opened = OpenedTraceCache(None)
        self.pins = Pins(self.pipeline.cache.local, policy.hold)
        self._captures: Iterator[CapturedGraph] = iter(())

    def begin(self) -> None:
        """Recall what can be recalled, and start to capture the rest.

        Capture workers are forked here, and work until :meth:`run` has taken what they capture: before there are
        threads, gloo or IREE in this process.
        """
        self.opened = self._policy.open_trace_cache(self._config, self.pipeline.cache)
        self.recalled = self._recall()
        self._captures = self._capture([bucket for name, bucket in self.buckets.items() if name not in self.recalled])

    def run(self, on_outcome: Callable[[GraphOutcome], None] = lambda outcome: None) -> None:
        """Resolve every graph, and keep its manifest. ``on_outcome`` is called in this thread, as they finish.

        What the compiler or a tier refuses is in the outcome. Raises :class:`CaptureError` or
        :class:`UnsupportedOpError` where a graph can't be captured.
        """
        self._resolve(self._requests(), on_outcome)

    def capture_again(self, names: Sequence[str], loaded: StepModel) -> None:
        """Put graphs that are captured from a loaded model in the place of those that there are.

        In this process: it has threads by now, and can't fork.
        """
        for name in names:
            self.recalled.pop(name, None)
        captures = self._capture([self.buckets[name] for name in names], loaded)
        self._resolve(map(self._captured_request, captures), lambda outcome: None)

    def input_names(self, name: str) -> tuple[str, ...]:
        """What each input of a graph's artifact is, by position."""
        recalled = self.recalled.get(name)
        return self.captured[name].input_names if recalled is None else recalled.found.manifest.inputs

    def compile_command(self) -> str:
        """The command line of the compile job for this configuration."""
        return compile_command(self._config, self.pipeline.compile_for)

    def close(self) -> None:
        """The entries are not used any more."""
        self.pins.close()

    def _recall(self) -> dict[str, Recalled]:
        trace_cache, buckets = self.opened.cache, list(self.buckets.values())
        if trace_cache is None or not self.opened.recalls:
            return {}
        found = trace_cache.recall(buckets)
        usable = {name: recalled for name, each in found.items() if (recalled := self._usable(each)) is not None}
        kept = {name: found[name] for name in usable}
        logger.info("%s", trace_cache.report(buckets, kept, lost=found.keys() - usable.keys()))
        return usable

    def _usable(self, found: FoundManifest) -> Recalled | None:
        """None where there is nothing to use it for: what has to be compiled has to be captured, for the module."""
        module = found.manifest.module
        if self._policy.strict:
            return Recalled(found)  # What is in no tier is an error all the same: no capture would help.
        if self._policy.publish is not Publish.REQUIRED:
            return Recalled(found) if self.pipeline.has(module) else None
        # Not only told of by a tier, but fetched and verified: what is damaged there is to be made anew.
        self._pin(module)
        resolution = self.pipeline.lookup(module)
        return None if resolution is None else Recalled(found, resolution)

    def _capture(self, buckets: Sequence[Bucket], loaded: StepModel | None = None) -> Iterator[CapturedGraph]:
        if not buckets:
            return iter(())
        if not release.installed():
            raise CaptureError(
                f"{', '.join(bucket.name for bucket in buckets)} can't be captured, because {release.PACKAGE} is not "
                f"installed here, and there is no manifest to use instead "
                f"({self.opened.off_because or 'see the line about the Precompile Cache above'}). "
                f"Run the compile job for this configuration: {self.compile_command()}"
            )
        # A start that captures nothing does not wait for what captures.
        from vllm_neuron.graphs.capture_workers import capture_buckets, capture_here

        if loaded is not None:
            return capture_here(self._config, buckets, self._policy.route, loaded)
        return capture_buckets(self._config, buckets, self._policy.route)

    def _requests(self) -> Iterator[GraphRequest]:
        for name, recalled in self.recalled.items():
            yield self._request(name, recalled.found.manifest.module, recalled.resolution)
        yield from map(self._captured_request, self._captures)

    def _captured_request(self, graph: CapturedGraph) -> GraphRequest:
        self.captured[graph.bucket.name] = graph
        self._pin(graph.module)
        return self._request(graph.bucket.name, graph.module)

    def _request(self, name: str, module: ModuleIdentity, found: Resolution | None = None) -> GraphRequest:
        return GraphRequest(name, module, provenance(self._config, self.buckets[name]), found)

    def _pin(self, module: ModuleIdentity) -> None:
        self.pins.note(self.pipeline.key(module).digest)

    def _resolve(self, requests: Iterator[GraphRequest], on_outcome: Callable[[GraphOutcome], None]) -> None:
        def finished(outcome: GraphOutcome) -> None:
            outcome = self._keep_manifest(outcome)
            self.outcomes[outcome.request.name] = outcome
            on_outcome(outcome)

        resolve_all(self.pipeline, requests, finished)

    def _keep_manifest(self, outcome: GraphOutcome) -> GraphOutcome:
        """Publish it as its entry was, to the same tiers; ``outcome`` with the error where that was owed and failed."""
        trace_cache, name = self.opened.cache, outcome.request.name
        if trace_cache is None or outcome.resolution is None:
            return outcome
        recalled = self.recalled.get(name)
        manifest = trace_cache.keep(self.captured[name]) if recalled is None else recalled.found.manifest
        required = self._policy.publish is Publish.REQUIRED
        if required or (self._policy.publish is Publish.BEST_EFFORT and recalled is None):
            try:
                trace_cache.publish(manifest)
            except CacheError as error:
                if required:
                    return replace(outcome, error=error)
                logger.warning("%s", error)
        return outcome
