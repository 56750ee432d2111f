"""From a lowered module to a finished entry: key, look up, and compile what no tier has.

One lookup serves every caller, user code and server and job: local, then remote, then compile, or in strict mode fail.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from vllm_neuron import envs
from vllm_neuron.abi import Abi
from vllm_neuron.cache import failpoint, trust
from vllm_neuron.cache.entry import Entry, write_entry
from vllm_neuron.cache.failpoint import Failpoint
from vllm_neuron.cache.key import ArtifactKey
from vllm_neuron.cache.local import miss_record
from vllm_neuron.cache.source import Source
from vllm_neuron.cache.tiers import TieredCache
from vllm_neuron.compile.attempt import Work, compile_admitted
from vllm_neuron.compile.request import CompileRequest, compile_requests
from vllm_neuron.compilers.base import compiler_for
from vllm_neuron.errors import CacheError, CacheMissError
from vllm_neuron.lowering.module import LoweredModule, ModuleIdentity
from vllm_neuron.routes import Route, default_level
from vllm_neuron.targets import Target, compile_target, lookup_targets

logger = logging.getLogger("vllm.neuron.compile")

DEFAULT_LEVEL = default_level(Route.NATIVE)


class Publish(StrEnum):
    """What is owed to the remote tier: nothing, an attempt, or an entry that is there, else an error."""

    NONE = "none"
    BEST_EFFORT = "best effort"
    REQUIRED = "required"


@dataclass(frozen=True)
class Resolution:
    """A finished entry for one module.

    ``seconds`` is the time spent to look up, wait, fetch, compile and publish. ``published`` says that the remote tier
    got the entry from here.
    """

    key: ArtifactKey
    entry: Entry
    source: Source
    target: Target
    seconds: float
    published: bool = False


class Pipeline:
    """Resolves modules to entries for one route, level and list of targets.

    ``targets`` are looked up in order; a miss of all is compiled for ``compile_for``. ``compiler_args`` are given to
    the compiler after our own flags, and are part of the key; they are in canonical form.
    """

    def __init__(
        self,
        cache: TieredCache,
        compile_for: Target,
        targets: Sequence[Target],
        level: int = DEFAULT_LEVEL,
        *,
        strict: bool = False,
        publish: Publish = Publish.NONE,
        compiler_args: Sequence[str] = (),
    ) -> None:
        self.cache = cache
        self.compile_for = compile_for
        self.targets = list(targets)
        self.level = level
        self.strict = strict
        self.publish = publish
        self.compiler_args = tuple(compiler_args)
        self._derived: dict[tuple[str, str, Abi], dict[str, CompileRequest]] = {}

    @classmethod
    def from_environment(cls, level: int = DEFAULT_LEVEL, compiler_args: Sequence[str] = ()) -> Pipeline:
        """The pipeline that the variables describe. Raises :class:`ConfigError` where they contradict one another."""
        strict = envs.strict()
        publish = Publish.NONE if strict else Publish.BEST_EFFORT
        cache = TieredCache.from_environment()
        return cls(
            cache, compile_target(), lookup_targets(), level,
            strict=strict, publish=publish, compiler_args=compiler_args,
        )  # fmt: skip

    def check_keys(self) -> None:
        """Raises :class:`CompileError` where no key can be made here: it has the compiler's version. Before capture."""
        compiler_for(self.compile_for).version()

    def key(self, module: ModuleIdentity) -> ArtifactKey:
        """The key that a miss of ``module`` is compiled under."""
        return self._requests(module)[self.compile_for.name].key

    def lookup(self, module: ModuleIdentity) -> Resolution | None:
        """The best entry that a tier has, or None. Compiles nothing."""
        start = time.monotonic()
        requests = self._requests(module)
        wanted = {request.key.digest: request for request in (requests[target.name] for target in self.targets)}
        found = self.cache.lookup(*wanted)
        if found is None:
            return None
        request = wanted[found.entry.key]
        return Resolution(request.key, found.entry, found.tier, request.target, time.monotonic() - start)

    def has(self, module: ModuleIdentity) -> bool:
        """Whether a tier says that it has an entry. Fetches nothing."""
        requests = self._requests(module)
        return any(self.cache.where(requests[target.name].key.digest) for target in self.targets)

    def resolve(
        self, module: ModuleIdentity, provenance: Mapping[str, Any], found: Resolution | None = None
    ) -> Resolution:
        """The entry for ``module``, compiled if no tier has it, and published as the policy says.

        ``provenance`` is stored beside a new entry, unhashed, so that a later miss can be explained; its ``graph`` is
        the name for messages. ``found`` is what :meth:`lookup` has given: it is not looked up again. Raises
        :class:`CacheMissError` in strict mode, and for a module of which only the identity is known;
        :class:`CompileError` where the compiler fails, :class:`CacheError` where a required publish fails.
        """
        start = time.monotonic()
        spent = 0.0 if found is None else found.seconds
        resolution = found or self.lookup(module) or self._compile_once(module, provenance)
        published = self._publish(resolution)
        return replace(resolution, seconds=spent + time.monotonic() - start, published=published)

    def _requests(self, module: ModuleIdentity) -> dict[str, CompileRequest]:
        identity = module.format, module.sha256, module.abi
        if identity not in self._derived:
            targets = [self.compile_for, *self.targets]
            self._derived[identity] = compile_requests(module, targets, self.level, self.compiler_args)
        return self._derived[identity]

    def _compile_once(self, module: ModuleIdentity, provenance: Mapping[str, Any]) -> Resolution:
        request = self._requests(module)[self.compile_for.name]
        key = request.key
        if self.strict or not isinstance(module, LoweredModule):
            miss_record.record(self.cache.local, key, provenance)
            raise CacheMissError(
                f"{'Strict mode: ' if self.strict else ''}{provenance.get('graph', 'the graph')} "
                f"(key {key.digest}) is in none of: {', '.join(self.cache.describe())}. To fill the cache, run the "
                f"same without {envs.DISABLE_WARMUP_COMPILE.name} and {envs.ASSERT_CACHE_HIT.name}"
            )
        if self.publish is Publish.REQUIRED and self.cache.remotes:
            trust.check_signs()
        with self.cache.lock(key.digest):
            failpoint.reached(Failpoint.LOCKED)
            # Another process may have compiled it while this one waited. Remote tiers have just been asked.
            there = self.cache.local.lookup(key.digest)
            if there is not None:
                return Resolution(key, there, Source.LOCAL, self.compile_for, 0.0)
            entry = self._compile(module, request, provenance)
        return Resolution(key, entry, Source.COMPILED, self.compile_for, 0.0)

    def _publish(self, resolution: Resolution) -> bool:
        if self.publish is Publish.REQUIRED:
            if not self.cache.remotes:
                self.cache.local.check_kept(resolution.entry)
            return self.cache.publish_remote(resolution.entry)
        if self.publish is Publish.BEST_EFFORT and resolution.source is Source.COMPILED:
            try:
                return self.cache.publish_remote(resolution.entry)
            except CacheError as error:
                logger.warning("%s was compiled, but not published: %s", resolution.key.digest, error)
        return False

    def _compile(self, module: LoweredModule, request: CompileRequest, provenance: Mapping[str, Any]) -> Entry:
        key, compiler = request.key, request.compiler
        about = f"{provenance.get('graph', 'a graph of user code')} for {request.target.name} (key {key.digest})"
        given, made = request.module_file(module), request.artifact_file
        work = Work(key.digest, given, made, request.flags, about, request.target.runs_here)

        def fill(folder: Path) -> None:
            for name, data in request.files(module).items():
                (folder / name).write_bytes(data)
            failpoint.reached(Failpoint.MODULE_WRITTEN)
            report = compile_admitted(self.cache.local, compiler, work, folder)
            failpoint.reached(Failpoint.COMPILED)
            write_entry(
                folder,
                key=key,
                abi=module.abi,
                required_features=compiler.required_features(request.target),
                provenance=provenance,
                compile_seconds=report.seconds,
                peak_memory_bytes=report.peak_memory_bytes,
            )

        return self.cache.local.build(key.digest, fill)
