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
from vllm_neuron.cache import failpoint, trust
from vllm_neuron.cache.entry import Entry, write_entry
from vllm_neuron.cache.failpoint import Failpoint
from vllm_neuron.cache.key import ArtifactKey, artifact_key
from vllm_neuron.cache.local import miss_record
from vllm_neuron.cache.source import Source
from vllm_neuron.cache.tiers import TieredCache
from vllm_neuron.compile.attempt import Work, compile_admitted
from vllm_neuron.compilers.base import Compiler, compiler_for
from vllm_neuron.errors import CacheError, CacheMissError
from vllm_neuron.lowering.module import LoweredModule, ModuleIdentity
from vllm_neuron.routes import Route, default_level, to_stablehlo
from vllm_neuron.targets import Target, compile_target, lookup_targets

logger = logging.getLogger("vllm.neuron.compile")

DEFAULT_LEVEL = default_level(Route.NATIVE)
CONVERTED_FILE = "converted.mlir"


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

    def key(self, module: ModuleIdentity, target: Target | None = None) -> ArtifactKey:
        """The key of ``module`` for ``target``, by default the one that a miss is compiled for."""
        target = target or self.compile_for
        compiler = compiler_for(target)
        converted = _converted(module, compiler)
        flags = self._flags(target, converted or module)
        version = compiler.version()
        return artifact_key(module, compiler.name, version, flags, target.name, self.level, converted=converted)

    def lookup(self, module: ModuleIdentity) -> Resolution | None:
        """The best entry that a tier has, or None. Compiles nothing."""
        start = time.monotonic()
        keys = {key.digest: (key, target) for target in self.targets for key in [self.key(module, target)]}
        found = self.cache.lookup(*keys)
        if found is None:
            return None
        key, target = keys[found.entry.key]
        return Resolution(key, found.entry, found.tier, target, time.monotonic() - start)

    def has(self, module: ModuleIdentity) -> bool:
        """Whether a tier says that it has an entry. Fetches nothing."""
        return any(self.cache.where(self.key(module, target).digest) for target in self.targets)

    def resolve(self, module: ModuleIdentity, provenance: Mapping[str, Any]) -> Resolution:
        """The entry for ``module``, compiled if no tier has it, and published as the policy says.

        ``provenance`` is stored beside a new entry, unhashed, so that a later miss can be explained; its ``graph`` is
        the name for messages. Raises :class:`CacheMissError` in strict mode, and for a module of which only the
        identity is known; :class:`CompileError` where the compiler fails, :class:`CacheError` where a required publish
        fails.
        """
        start = time.monotonic()
        resolution = self.lookup(module) or self._compile_once(module, provenance)
        published = self._publish(resolution)
        return replace(resolution, seconds=time.monotonic() - start, published=published)

    def _compile_once(self, module: ModuleIdentity, provenance: Mapping[str, Any]) -> Resolution:
        key = self.key(module)
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
            entry = self._compile(module, key, provenance)
        return Resolution(key, entry, Source.COMPILED, self.compile_for, 0.0)

    def _publish(self, resolution: Resolution) -> bool:
        if self.publish is Publish.REQUIRED:
            return self.cache.publish_remote(resolution.entry)
        if self.publish is Publish.BEST_EFFORT and resolution.source is Source.COMPILED:
            try:
                return self.cache.publish_remote(resolution.entry)
            except CacheError as error:
                logger.warning("%s was compiled, but not published: %s", resolution.key.digest, error)
        return False

    def _flags(self, target: Target, module: ModuleIdentity) -> tuple[str, ...]:
        return (*compiler_for(target).flags(target, self.level, module), *self.compiler_args)

    def _compile(self, module: LoweredModule, key: ArtifactKey, provenance: Mapping[str, Any]) -> Entry:
        compiler = compiler_for(self.compile_for)
        converted = _converted(module, compiler)
        graph = provenance.get("graph", "a graph of user code")
        about = f"{graph} for {self.compile_for.name} (key {key.digest})"
        flags = self._flags(self.compile_for, converted or module)
        given = module.file_name if converted is None else CONVERTED_FILE
        work = Work(key.digest, given, artifact_name(compiler, key), flags, about)

        def fill(folder: Path) -> None:
            (folder / module.file_name).write_bytes(module.data)
            if converted is not None:
                (folder / given).write_bytes(converted.data)
            failpoint.reached(Failpoint.MODULE_WRITTEN)
            report = compile_admitted(self.cache.local, compiler, work, folder)
            failpoint.reached(Failpoint.COMPILED)
            write_entry(
                folder,
                key=key,
                abi=module.abi,
                required_features=compiler.required_features(self.compile_for),
                provenance=provenance,
                compile_seconds=report.seconds,
                peak_memory_bytes=report.peak_memory_bytes,
            )

        return self.cache.local.build(key.digest, fill)


def _converted(module: ModuleIdentity, compiler: Compiler) -> LoweredModule | None:
    """The module in the form that the compiler takes; None where it takes the module as it is."""
    if module.format in compiler.formats:
        return None
    assert isinstance(module, LoweredModule), "only modules of the native route are recalled without their bytes"
    return to_stablehlo(module)


def artifact_name(compiler: Compiler, key: ArtifactKey) -> str:
    """``graph.vmfb``; a NEFF carries its key in its name, as the reference's does."""
    return f"graph_{key.digest}.neff" if compiler.artifact_suffix == "neff" else f"graph.{compiler.artifact_suffix}"
