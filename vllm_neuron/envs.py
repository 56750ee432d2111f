"""The one table of environment variables, read at use and never at import.

An empty string is an unset variable. An older name works, with a warning; the new name wins where both are set.
"""

from __future__ import annotations

import difflib
import functools
import getpass
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from vllm_neuron.errors import ConfigError
from vllm_neuron.parsers import (
    BOOLEAN,
    COUNT,
    FILE,
    FILES,
    FRACTION,
    GIBIBYTES,
    LEVEL,
    LOGICAL_CORES,
    PATH,
    REMOTES,
    SECONDS,
    TEXT,
    Parser,
    absolute,
)  # fmt: skip

logger = logging.getLogger("vllm.neuron.envs")

T = TypeVar("T")

_PREFIXES = ("VLLM_NEURON_", "NEURON_LIBTORCH_")
NETWORK_FILESYSTEMS = ("nfs", "lustre")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable. ``default`` is a value, or a function of the environment that gives one."""

    name: str
    parse: Parser[T]
    default: T | Callable[[], T]
    meaning: str
    old_names: tuple[str, ...] = ()
    default_text: str = ""

    def get(self) -> T:
        """The value in force now. Raises ``ConfigError`` that names the variable and what it accepts."""
        name = self._name_in_force()
        if name is None:
            return self.default() if callable(self.default) else self.default
        text = os.environ[name]
        try:
            return self.parse(text.strip())
        except ValueError:
            accepted = f"accepted: {self.parse.accepted}"
            raise ConfigError(f"{name}={text!r} is not valid; {accepted}. Correct it, or unset it.") from None

    def is_set(self) -> bool:
        """True if the variable, or an older name of it, has a value that is not empty."""
        return self._name_in_force() is not None

    def _name_in_force(self) -> str | None:
        names = [name for name in (self.name, *self.old_names) if os.environ.get(name, "").strip()]
        for old in (name for name in names if name in self.old_names):
            wins = f"; {self.name} is set too, and wins" if names[0] != old else ""
            _warn_once(f"{old} is an old name of {self.name}{wins}. Use {self.name}.")
        return names[0] if names else None


def strict() -> bool:
    """True if a graph that is in no tier of the cache is an error, and nothing may be compiled."""
    return DISABLE_WARMUP_COMPILE.get() or ASSERT_CACHE_HIT.get()


def get_neuron_compile_cache_dir() -> str:
    """The absolute path of the cache's local tier. Does not create it.

    A default that is on a network file system is replaced by a folder on this machine: kernel locks are slow there,
    and on some servers they don't hold between hosts.
    """
    artifacts = COMPILED_ARTIFACTS.get()
    if artifacts and not CACHE_ROOT.is_set():
        _warn_once(f"{COMPILED_ARTIFACTS.name} is deprecated. Use {CACHE_ROOT.name} to say where the cache is.")
        return artifacts
    if artifacts:
        _warn_once(f"{COMPILED_ARTIFACTS.name} is ignored, because {CACHE_ROOT.name} is set, and wins.")
    return str(_neuron_folder() / "compile_cache")


def get_neuron_precompile_cache_dir() -> str:
    """The absolute path of the folder that this machine's manifests are in. Does not create it."""
    return str(_neuron_folder() / "precompile_cache")


def _neuron_folder() -> Path:
    folder = Path(CACHE_ROOT.get(), "neuron")
    if CACHE_ROOT.is_set() or not (kind := filesystem(folder)).startswith(NETWORK_FILESYSTEMS):
        return folder
    local = Path("/tmp", f"vllm_neuron_wdir_{_user()}", "neuron")
    _warn_once(f"{folder} is on a network file system ({kind}): the local cache is in {local}. "
               f"Set {CACHE_ROOT.name} to choose another folder.")  # fmt: skip
    return local


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # A user without a name; an OSError from Python 3.13 on.
        return str(os.getuid())


def check_environment() -> None:
    """:func:`check_values`, and a warning, once, about old and misspelt names."""
    _warn_about_unknown_names()
    check_values()


def check_values() -> None:
    """Raises ``ConfigError`` for a bad value of a variable, and for variables that contradict each other."""
    for variable in VARIABLES:
        variable.get()
    if CPU_COMPILE.get():
        for other in (CPU_MODE, DISABLE_COMPILE_CACHE, DISABLE_GRAPH_CAPTURE):
            if other.get():
                raise _conflict(CPU_COMPILE, other)
        if not TARGET_OVERRIDE.is_set():
            raise ConfigError(f"{CPU_COMPILE.name} needs a target to compile for: set {TARGET_OVERRIDE.name}, "
                              "for example to trn2 or cpu.")  # fmt: skip
    if DISABLE_COMPILE_CACHE.get():
        for strict_variable in (DISABLE_WARMUP_COMPILE, ASSERT_CACHE_HIT):
            if strict_variable.get():
                raise _conflict(strict_variable, DISABLE_COMPILE_CACHE)


def _conflict(one: Variable[bool], other: Variable[bool]) -> ConfigError:
    return ConfigError(f"{one.name} and {other.name} contradict each other. Unset one of them.")


def _warn_about_unknown_names() -> None:
    for name, nearest in unknown_names().items():
        _warn_once(f"{name} is not a known variable, and has no effect. Did you mean {nearest}?")


def unknown_names() -> dict[str, str]:
    """Variables that are set and look like ours, but are not: each with the nearest name that is."""
    known = {name for variable in VARIABLES for name in (variable.name, *variable.old_names)}
    ours = [variable.name for variable in VARIABLES]
    return {
        name: difflib.get_close_matches(name, ours, n=1, cutoff=0.0)[0]
        for name in sorted(os.environ)
        if name.startswith(_PREFIXES) and name not in known and os.environ[name].strip()
    }


@functools.lru_cache(maxsize=256)
def _warn_once(message: str) -> None:
    logger.warning(message)


def filesystem(path: Path) -> str:
    """The type of the file system that ``path`` is on, or would be on, such as ``ext4``; '' where it is unknown."""
    import psutil

    real = Path(os.path.realpath(path))
    mounts = [part for part in psutil.disk_partitions(all=True) if real.is_relative_to(part.mountpoint)]
    # Of mounts at one place the last one covers the others, and max() keeps the first: hence the reversal.
    return max(reversed(mounts), key=lambda part: len(part.mountpoint)).fstype if mounts else ""


def _default_cache_root() -> str:
    root = os.path.expanduser(os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "vllm"))  # noqa: PTH111, PTH118
    # A user with no home and no name has the home that containers give one.
    return "/.cache/vllm" if root.startswith("~") else absolute(root)


BACKEND: Variable[str | None] = Variable(
    "VLLM_NEURON_BACKEND", TEXT, None,
    "Compilation route: `neuron_native` or `neuron` is the native one, `vllm_neuron` the deprecated XLA one. "
    "Any other value is warned about, and the native route runs.",
    default_text="unset: the native route",
)  # fmt: skip
CPU_COMPILE = Variable(
    "VLLM_NEURON_CPU_COMPILE", BOOLEAN, False,
    "Compile only: never execute a graph, never need a device, never need the weights. "
    "Needs `NEURON_PLATFORM_TARGET_OVERRIDE`.",
)  # fmt: skip
CPU_MODE = Variable(
    "VLLM_NEURON_CPU_MODE", BOOLEAN, False,
    "Run the model on the CPU with plain PyTorch: no compiler, no artifacts. "
    "Together with `VLLM_NEURON_CPU_COMPILE`: an error at start.",
)  # fmt: skip
TARGET_OVERRIDE: Variable[str | None] = Variable(
    "NEURON_PLATFORM_TARGET_OVERRIDE", TEXT, None,
    "Target to compile for, such as `trn2`, `cpu` or `cpu:x86-64-v4`. `vllm-neuron targets` lists them.",
    default_text="unset: the Neuron device of this machine, else `cpu`",
)  # fmt: skip
CACHE_ROOT = Variable(
    "VLLM_CACHE_ROOT", PATH, _default_cache_root,
    "vLLM's own cache folder. The local tier is `neuron/compile_cache` in it.",
    default_text="`~/.cache/vllm` (`$XDG_CACHE_HOME/vllm`, where that is set)",
)  # fmt: skip
REMOTE_CACHE: Variable[str | None] = Variable(
    "NEURON_LIBTORCH_REMOTE_CACHE", REMOTES, None,
    "Remote tier: a folder that machines share, as a path or a `file://` URL; an object store, such as "
    "`s3://bucket/prefix`; or a published folder, `https://…`, read-only. Compile jobs fill it. Of several, separated "
    "by commas, the first that has an entry serves it. `ro+` before a URL: never publish there.",
    ("VLLM_NEURON_REMOTE_CACHE",), "unset: no remote tier",
)  # fmt: skip
CACHE_SIGNING_KEY: Variable[str | None] = Variable(
    "VLLM_NEURON_CACHE_SIGNING_KEY", FILE, None,
    "Private Ed25519 key, as a PEM file. Entries that are published to a remote tier are signed with it, and its own "
    "signature is trusted. Needs the package `cryptography`.",
    default_text="unset: nothing is signed",
)  # fmt: skip
CACHE_TRUSTED_KEYS: Variable[tuple[str, ...] | None] = Variable(
    "VLLM_NEURON_CACHE_TRUSTED_KEYS", FILES, None,
    "Public Ed25519 keys, as PEM files. Entries come from a remote tier or an archive only with a valid signature by "
    "one of them. Needs the package `cryptography`.",
    default_text="unset: entries need no signature",
)  # fmt: skip
DISABLE_COMPILE_CACHE = Variable(
    "NEURON_LIBTORCH_DISABLE_COMPILE_CACHE", BOOLEAN, False,
    "No cache and no coordination: every process compiles for itself. "
    "Together with strict mode or CPU compilation: an error at start.",
    ("VLLM_NEURON_DISABLE_COMPILE_CACHE",),
)  # fmt: skip
COMPILATION_TIMEOUT = Variable(
    "NEURON_LIBTORCH_COMPILATION_TIMEOUT", SECONDS, 600.0,
    "How long a process waits, without a sign of life, for the one that compiles what it needs.",
    ("VLLM_NEURON_COMPILATION_TIMEOUT",),
)  # fmt: skip
COMPILER_TIMEOUT = Variable("VLLM_NEURON_COMPILER_TIMEOUT", SECONDS, 14400.0, "Longest time that one compiler may run.")
COMPILE_WORKERS = Variable(
    "NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS", COUNT, 8,
    "Most compilers that run at once. The cores and the memory of the machine may allow fewer.",
    ("VLLM_NEURON_PARALLEL_COMPILE_WORKERS",),
)  # fmt: skip
TRACE_WORKERS = Variable(
    "VLLM_NEURON_PARALLEL_TRACE_WORKERS", COUNT, 8,
    "Most processes that capture graphs at once.",
)  # fmt: skip
DISABLE_PARALLEL_TRACE = Variable(
    "VLLM_NEURON_DISABLE_PARALLEL_TRACE", BOOLEAN, False,
    "Capture graphs in the worker process itself.",
)  # fmt: skip
DISABLE_GRAPH_CAPTURE = Variable(
    "NEURON_LIBTORCH_DISABLE_GRAPH_CAPTURE_BACKEND", BOOLEAN, False,
    "Skip the phase that captures and compiles all graphs ahead: each is looked up when warm-up comes to it. "
    "Together with `VLLM_NEURON_CPU_COMPILE`: an error at start.",
    ("VLLM_NEURON_DISABLE_GRAPH_CAPTURE_BACKEND",),
)  # fmt: skip
DISABLE_WARMUP_COMPILE = Variable(
    "VLLM_NEURON_DISABLE_WARMUP_COMPILE", BOOLEAN, False,
    "Strict mode: a graph that is in no tier of the cache is an error, and nothing is compiled. "
    "Together with `VLLM_NEURON_CPU_COMPILE`: report the misses, and compile nothing.",
)  # fmt: skip
ASSERT_CACHE_HIT = Variable(
    "NEURON_LIBTORCH_ASSERT_CACHE_HIT", BOOLEAN, False,
    "The same as `VLLM_NEURON_DISABLE_WARMUP_COMPILE`.",
    ("VLLM_NEURON_ASSERT_CACHE_HIT",),
)  # fmt: skip
CACHING_PRECOMPILE = Variable(
    "TORCH_CACHING_PRECOMPILE", BOOLEAN, lambda: BACKEND.get() in ("neuron_native", "neuron"),
    "The Precompile Cache: a start that finds its graphs in the cache skips capturing them. Native route only. "
    "A compile job always fills it, and skips what it finds in it unless this is 0.",
    default_text="1 where `VLLM_NEURON_BACKEND` is `neuron_native` or `neuron`, else 0",
)  # fmt: skip
COMPILED_ARTIFACTS: Variable[str | None] = Variable(
    "NEURON_COMPILED_ARTIFACTS", PATH, None,
    "Deprecated: the folder of the local tier itself. `VLLM_CACHE_ROOT` wins.",
    default_text="unset",
)  # fmt: skip
LOGICAL_NC_CONFIG: Variable[int | None] = Variable(
    "NEURON_LOGICAL_NC_CONFIG", LOGICAL_CORES, None,
    "Physical cores per logical Neuron core. Given to neuronx-cc as `--lnc`; part of the key.",
    default_text="unset: 2 on trn2 and trn3",
)  # fmt: skip
BARRIER_TIMEOUT = Variable("VLLM_NEURON_BARRIER_TIMEOUT", SECONDS, 3600.0, "How long ranks wait for one another.")
LOG_LEVEL = Variable("VLLM_NEURON_LOG_LEVEL", LEVEL, "INFO", "Least severe message that is logged.")
KV_BUDGET_CAP_FRACTION = Variable(
    "VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION", FRACTION, 0.30,
    "Largest part of a device's usable memory that the KV cache may take.",
)  # fmt: skip
MIN_KV_BUDGET_GIB = Variable(
    "VLLM_NEURON_MIN_KV_BUDGET_GIB", GIBIBYTES, 1.0,
    "Smallest KV cache, in GiB, that a device's memory must leave room for.",
)  # fmt: skip

VARIABLES: tuple[Variable[Any], ...] = tuple(value for value in list(globals().values()) if isinstance(value, Variable))
