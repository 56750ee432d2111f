"""The Precompile Cache: graphs that were captured before need not be captured again.

It holds manifests by trace key. A manifest is never taken on trust: its key says what it was captured from, and before
a graph is bound its inputs are compared with the model that has been loaded.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_neuron import envs
from vllm_neuron.abi import InputName, TensorSpec
from vllm_neuron.cache.manifests.manifest import Manifest, make_manifest
from vllm_neuron.cache.manifests.store import FoundManifest, ManifestStore
from vllm_neuron.cache.source import Source
from vllm_neuron.cache.source_trees import SourceDigests
from vllm_neuron.cache.tiers import TieredCache
from vllm_neuron.errors import CacheError, UnsupportedError
from vllm_neuron.graphs.loaded_model import difference, shown
from vllm_neuron.graphs.trace_key import TraceKeys
from vllm_neuron.lowering.module import LoweredModule
from vllm_neuron.model.buckets import Bucket
from vllm_neuron.model.step import step_inputs
from vllm_neuron.routes import Route, current_route

logger = logging.getLogger("vllm.neuron.precompile")

_SOURCES = "sources.json"


@dataclass(frozen=True)
class CapturedGraph:
    """One bucket, captured and lowered. ``input_names`` says, by position, what each input of the module is.

    ``unread`` are the weights and KV caches of the captured model that the graph does not read.
    """

    bucket: Bucket
    module: LoweredModule
    input_names: tuple[str, ...]
    seconds: float
    unread: dict[str, TensorSpec]

    def model_inputs(self) -> dict[str, TensorSpec]:
        """The weights and KV caches of the model that was captured, by name, read by the graph or not."""
        read = zip(self.input_names, self.module.abi.inputs, strict=True)
        return {name: spec for name, spec in read if not InputName(name).is_step} | self.unread


class TraceCache:
    """The manifests of one configuration's graphs. Raises ``UnsupportedError`` where its code can't be known."""

    def __init__(self, vllm_config: Any, cache: TieredCache) -> None:
        root = Path(envs.get_neuron_precompile_cache_dir())
        self._model: str = vllm_config.model_config.model
        self._block_size: int = vllm_config.cache_config.block_size
        self._store = ManifestStore(root, cache.remotes)
        self._keys = TraceKeys(vllm_config, SourceDigests(root / _SOURCES))

    def recall(self, buckets: Sequence[Bucket]) -> dict[str, FoundManifest]:
        """By name of bucket, the manifests that there are.

        One that can't be used counts as none, with a warning; in strict mode it raises :class:`CacheError`.
        """
        found: dict[str, FoundManifest] = {}
        for bucket in buckets:
            manifest = self._store.lookup(self._keys.key(bucket).digest)
            if manifest is not None:
                found[bucket.name] = manifest
        if self._store.problems:
            self._log_problems(list(self._store.problems.values()), lost=len(found) < len(buckets))
        return found

    def report(self, buckets: Sequence[Bucket], found: Mapping[str, FoundManifest], lost: Collection[str] = ()) -> str:
        """One line: how many graphs need no capture, and why others do. The artifacts of ``lost`` are in no tier."""
        tiers = Counter(manifest.tier for manifest in found.values())
        line = (
            f"Precompile Cache: {len(found)} of {len(buckets)} graphs need no capture "
            f"({tiers[Source.LOCAL]} from the local tier, {tiers[Source.REMOTE]} from the remote tier)"
        )
        reasons: dict[str, list[str]] = {}
        for bucket in buckets:
            if bucket.name not in found:
                reason = "its artifact is in no tier" if bucket.name in lost else self._reason(bucket)
                reasons.setdefault(reason, []).append(bucket.name)
        return "; ".join([line, *(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())])

    def keep(self, graph: CapturedGraph) -> Manifest:
        """Store the manifest of a captured graph on this machine, and return it."""
        bucket, key = graph.bucket, self._keys.key(graph.bucket)
        manifest = make_manifest(key, bucket.name, self._model, graph.module, graph.input_names, graph.unread)
        self._store.store(manifest)
        return manifest

    def publish(self, manifest: Manifest) -> None:
        """Store a manifest in the remote tiers. Raises :class:`CacheError` where that can't be done."""
        self._store.publish(manifest)

    def misfit(self, manifest: Manifest, bucket: Bucket, model: Mapping[str, TensorSpec]) -> str | None:
        """Why a manifest can't be used for ``bucket`` and a loaded model with the inputs ``model``; None if it can."""
        steps = step_inputs(bucket, self._block_size)
        for name, spec in manifest.step_inputs().items():
            if steps.get(name) != spec:
                return f"{InputName.step(name)} is {spec} in the manifest, and {shown(steps.get(name))} in the bucket"
        results = manifest.module.abi.results
        if len(results) != 1 or results[0].shape[:1] != (bucket.seqs,):
            return f"it gives {', '.join(map(str, results))}, not one row of logits for each of {bucket.seqs} sequences"
        return difference(manifest.model_inputs(), "the manifest", model)

    def _reason(self, bucket: Bucket) -> str:
        key = self._keys.key(bucket)
        if key.digest in self._store.problems:
            return "its manifest can't be used"
        difference = self._store.nearest_difference(key, bucket.name, self._model)
        return difference or "no graph of this name has been captured before"

    def _log_problems(self, problems: list[str], *, lost: bool) -> None:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        if lost and envs.strict():
            raise CacheError(
                f"Strict mode: {problems[0]}{more}. Remove it to have the graph captured again, or run the compile job "
                "again to replace it"
            )
        logger.warning("Passed over: %s%s", problems[0], more)


@dataclass(frozen=True)
class OpenedTraceCache:
    """The trace cache of one preparation. ``cache`` is None where there is none: ``off_because`` says why.

    ``recalls`` is False where it is only filled.
    """

    cache: TraceCache | None
    off_because: str = ""
    recalls: bool = True


def open_for_serving(vllm_config: Any, cache: TieredCache) -> OpenedTraceCache:
    """The trace cache of a server's start."""
    if reason := _off_because():
        return OpenedTraceCache(None, reason)
    try:
        return OpenedTraceCache(TraceCache(vllm_config, cache))
    except UnsupportedError as error:
        return OpenedTraceCache(None, str(error))


def open_for_compiling(vllm_config: Any, cache: TieredCache) -> OpenedTraceCache:
    """The trace cache that a compile job fills, unless nothing would ever be read from it. A strict job has none."""
    if envs.strict():
        return OpenedTraceCache(None, "a strict job captures every graph")
    if current_route() is Route.XLA:
        return OpenedTraceCache(None, _NATIVE_ONLY)
    try:
        trace_cache = TraceCache(vllm_config, cache)
    except UnsupportedError as error:
        logger.info("No manifests are written: %s", error)
        return OpenedTraceCache(None, str(error))
    return OpenedTraceCache(trace_cache, recalls=envs.CACHING_PRECOMPILE.get() or not envs.CACHING_PRECOMPILE.is_set())


_NATIVE_ONLY = "it is for the native route only"


def _off_because() -> str:
    """Why a start has no trace cache; '' where it has one."""
    if envs.DISABLE_COMPILE_CACHE.get():
        return f"{envs.DISABLE_COMPILE_CACHE.name} is set"
    if current_route() is Route.XLA:
        return _NATIVE_ONLY
    if envs.CACHING_PRECOMPILE.get():
        return ""
    if envs.CACHING_PRECOMPILE.is_set():
        return f"{envs.CACHING_PRECOMPILE.name} turns it off"
    value = envs.BACKEND.get()
    state = "is unset" if value is None else f"is {value!r}, which is no route"
    return f"{envs.BACKEND.name} {state}; set it to {Route.NATIVE.value} to turn it on"
