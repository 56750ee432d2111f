"""``vllm-neuron doctor``: what commonly goes wrong, checked, with the fix."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import typer

from vllm_neuron import envs
from vllm_neuron.cache import trust
from vllm_neuron.cache.disk import folders
from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.cache.remote.tier import RemoteTier
from vllm_neuron.cache.remote.urls import open_remotes
from vllm_neuron.cli.keys import Json
from vllm_neuron.compilers.base import compiler_for
from vllm_neuron.compilers.iree import RELEASE
from vllm_neuron.errors import NeuronError
from vllm_neuron.host.cpu import available_memory_bytes, check_features, psabi_level, usable_cores
from vllm_neuron.routes import ACCEPTED
from vllm_neuron.targets import compile_target, lookup_targets, resolve_target

_LOW_SPACE_BYTES = 2 << 30
_LOST_WITH_CONTAINER = ("overlay", "tmpfs", "ramfs", "aufs")
_CONTAINER_SIGNS = (Path("/.dockerenv"), Path("/run/.containerenv"))
_NO_SUCH_KEY = "0" * 32


class Verdict(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """What one check saw, and what to do about it ('' where nothing needs to be done)."""

    check: str
    verdict: Verdict
    found: str
    fix: str = ""


def doctor(as_json: Json = False) -> None:
    """Check variables, cache tiers, compilers and this machine. Exits with 1 if something will not work."""
    findings = [finding for check in CHECKS for finding in _run(check)]
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            typer.echo(f"{finding.verdict.value:8}{finding.check}: {finding.found}")
            if finding.fix:
                typer.echo(f"{'':8}fix: {finding.fix}")
    sys.exit(any(finding.verdict is Verdict.ERROR for finding in findings))


def _run(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of a check; one that can't be made because of a bad setting is a finding too."""
    name = check.__name__.strip("_").replace("_", " ")
    try:
        yield from check()
    except (NeuronError, OSError) as error:
        yield Finding(name, Verdict.ERROR, str(error))


def _variables() -> Iterator[Finding]:
    for name, nearest in envs.unknown_names().items():
        yield Finding(
            "variables",
            Verdict.WARNING,
            f"{name} is not a known variable",
            f"did you mean {nearest}? Else unset {name}",
        )
    envs.check_values()
    trust.check_variables()
    route = envs.BACKEND.get()
    if route is not None and route not in ACCEPTED:
        fix = f"set {envs.BACKEND.name} to {', '.join(ACCEPTED)}, or unset it"
        found = f"{envs.BACKEND.name} is {route!r}, which is no route: the native one runs, without Precompile Cache"
        yield Finding("variables", Verdict.WARNING, found, fix)
        return
    count = sum(variable.is_set() for variable in envs.VARIABLES)
    yield Finding("variables", Verdict.OK, f"{count} of ours are set, each with a value that is accepted")


def _local_tier() -> Iterator[Finding]:
    if envs.DISABLE_COMPILE_CACHE.get():
        yield Finding(
            "local tier",
            Verdict.WARNING,
            "the cache is disabled: every process compiles for itself",
            f"unset {envs.DISABLE_COMPILE_CACHE.name}",
        )
        return
    tier = LocalTier(Path(envs.get_neuron_compile_cache_dir()))
    kind = envs.filesystem(tier.root) or "unknown file system"
    place = _nearest_existing(tier.root)
    free = shutil.disk_usage(place).free
    where = f"{tier.root} ({kind}, {free / 2**30:.1f} GiB free, {len(tier.keys())} entries)"
    move = f"set {envs.CACHE_ROOT.name} to a folder on a disk of this machine"
    if not tier.writable:
        yield Finding("local tier", Verdict.WARNING, f"{where} can't be written to: what is compiled is not kept", move)
    elif kind.startswith(envs.NETWORK_FILESYSTEMS):
        yield Finding("local tier", Verdict.WARNING, f"{where} is on the network: locks may be slow or missing", move)
    elif folders.is_full(place) or free < _LOW_SPACE_BYTES:
        yield Finding(
            "local tier", Verdict.WARNING, f"{where} is nearly full", "run `vllm-neuron cache gc --max-size 10G`"
        )
    elif kind in _LOST_WITH_CONTAINER and _in_container():
        fix = f"mount a volume and point {envs.CACHE_ROOT.name} at it, or name a remote tier"
        yield Finding("local tier", Verdict.WARNING, f"{where} is lost when this container is removed", fix)
    else:
        yield Finding("local tier", Verdict.OK, where)


def _remote_tiers() -> Iterator[Finding]:
    remotes = open_remotes(envs.REMOTE_CACHE.get())
    if not remotes:
        fix = f"set {envs.REMOTE_CACHE.name}, where other machines are to use what this one compiles, or the reverse"
        yield Finding("remote tier", Verdict.OK, "none", fix)
    for remote in remotes:
        yield _remote_tier(remote)


def _remote_tier(remote: RemoteTier) -> Finding:
    mark = ", read-only" if remote.read_only else ""
    try:
        remote.metadata(_NO_SUCH_KEY)
        there = remote.exists()
    except (OSError, NeuronError) as error:
        fix = "check that the store is up, the name, the network and the credentials"
        return Finding("remote tier", Verdict.ERROR, f"{remote.name}{mark} can't be asked: {error}", fix)
    path = Path(remote.name)
    if not there:
        return Finding(
            "remote tier",
            Verdict.WARNING,
            f"{remote.name}{mark} is not there (yet)",
            "mount it, or publish to it: it is made with the first entry",
        )
    if path.is_absolute() and not remote.read_only and not os.access(path, os.W_OK | os.X_OK):
        return Finding(
            "remote tier",
            Verdict.WARNING,
            f"{remote.name} can't be written to",
            f"let this user write to it, or write ro+file://{path}",
        )
    return Finding("remote tier", Verdict.OK, f"{remote.name}{mark} answers")


def _compilers() -> Iterator[Finding]:
    target = compile_target()
    compiler = compiler_for(target)
    try:
        compiler.command(Path("graph"), Path("artifact"), ())
        version = compiler.version()
    except NeuronError as error:
        yield Finding(
            "compiler",
            Verdict.WARNING,
            f"{compiler.name}, for {target.name}: {error}",
            "only hits can be served from this machine",
        )
        return
    if compiler.name == "iree" and version != RELEASE:
        fix = f"run `pip install iree-base-compiler=={RELEASE}`, or keys differ from those of others"
        found = f"IREE {version} is installed, this release is built for {RELEASE}"
        yield Finding("compiler", Verdict.WARNING, found, fix)
    else:
        yield Finding("compiler", Verdict.OK, f"{compiler.name} {version}, for {target.name}")


def _machine() -> Iterator[Finding]:
    memory = available_memory_bytes() / 2**30
    yield Finding("machine", Verdict.OK, f"{usable_cores()} cores, {memory:.1f} GiB of memory, {psabi_level()}")
    target = resolve_target("cpu")
    try:
        check_features(compiler_for(target).required_features(target))
    except NeuronError as error:
        yield Finding("cpu features", Verdict.WARNING, str(error), "compile for an older level, such as cpu:x86-64-v2")
        return
    levels = ", ".join(one.name for one in lookup_targets())
    yield Finding("cpu features", Verdict.OK, f"artifacts for {target.name} run here; looked up, best first: {levels}")


def _nearest_existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _in_container() -> bool:
    return any(sign.exists() for sign in _CONTAINER_SIGNS) or "KUBERNETES_SERVICE_HOST" in os.environ


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (_variables, _local_tier, _remote_tiers, _compilers, _machine)
