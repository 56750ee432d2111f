"""The one table of targets: what can be compiled for, by which compiler, with how much memory.

A name is checked against this table before any work starts. CPU targets are psABI levels, so that an artifact of one
machine runs on another; ``cpu`` stands for the same level everywhere.
"""

from __future__ import annotations

import difflib
import platform
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_neuron import envs
from vllm_neuron.errors import ConfigError
from vllm_neuron.host import cpu

GiB = 1 << 30


@dataclass(frozen=True)
class Target:
    """Something that can be compiled for.

    ``memory_bytes`` is the device memory of one logical core; None where the target does not fix it.
    ``logical_nc`` is the number of physical cores in a logical one (Neuron only).
    ``triple``, ``arch`` and ``cpu_features`` are what IREE is told: ``arch`` is LLVM's name of the processor, or of
    the GPU's generation, and ``cpu_features`` those beyond what ``arch`` has.
    """

    name: str
    kind: str  # "neuron" | "cpu" | "cuda" | "rocm"
    compiler: str  # "iree" | "neuronx-cc"
    memory_bytes: int | None = None
    logical_nc: int | None = None
    triple: str = ""
    arch: str = ""
    cpu_features: tuple[str, ...] = ()

    @property
    def required_features(self) -> tuple[str, ...]:
        """Processor features that a host must have to run an artifact; empty for a target that is no CPU."""
        level = self.name.removeprefix("cpu:").split("+")[0]
        return tuple(sorted({*cpu.LEVELS[level], *self.cpu_features})) if self.kind == "cpu" else ()

    @property
    def runs_here(self) -> bool:
        """True if this package can run an artifact for this target on this machine."""
        return self.kind == "cpu" and cpu.host_features().issuperset(self.required_features)


def _neuron(name: str, memory_gib: int, logical_nc: int) -> Target:
    return Target(name, "neuron", "neuronx-cc", memory_bytes=memory_gib * GiB, logical_nc=logical_nc)


def _cpu(level: str, extra: tuple[str, ...] = ()) -> Target:
    machine, arch = ("aarch64", "generic") if level == "aarch64" else ("x86_64", level)
    name = "+".join((f"cpu:{level}", *extra))
    return Target(name, "cpu", "iree", triple=f"{machine}-unknown-linux-gnu", arch=arch, cpu_features=extra)


def _gpu(kind: str, arch: str) -> Target:
    return Target(f"{kind}:{arch}", kind, "iree", arch=arch)


# Neuron memory is the chip's HBM over its physical cores: trn1 and inf2 32 GiB over 2, trn2 96 over 8, trn3 144 over 8.
_TABLE = {
    target.name: target
    for target in (
        _neuron("trn1", 16, 1),
        _neuron("trn1n", 16, 1),
        _neuron("inf2", 16, 1),
        _neuron("trn2", 12, 2),
        _neuron("trn3", 18, 2),
        _cpu("x86-64-v2"),
        _cpu("x86-64-v3"),
        _cpu("x86-64-v4"),
        _cpu("aarch64"),
        *(_gpu("cuda", arch) for arch in ("sm_80", "sm_86", "sm_89", "sm_120")),
        *(_gpu("rocm", arch) for arch in ("gfx90a", "gfx942", "gfx1100")),
    )
}
NEURON_TARGETS = tuple(name for name, target in _TABLE.items() if target.kind == "neuron")
ALIASES = ("cpu", "cpu:host")
_DEFAULT_CPU = "cpu:aarch64" if platform.machine() == "aarch64" else "cpu:x86-64-v3"

# Names that a user can well expect, and the reason why each is refused.
_REFUSED = {
    **dict.fromkeys(
        ("cuda:sm_90", "cuda:sm_90a", "cuda:sm_100"),
        "this release of IREE generates no code for it; cuda:sm_80 is meant to run on newer devices as well",
    ),
    "vulkan": "IREE's SPIR-V back end does not compile 64-bit integer tensors, which every model has",
    "metal": "IREE's SPIR-V back end does not compile 64-bit integer tensors, which every model has",
    "cuda": "a GPU target names its generation, such as cuda:sm_80",
    "rocm": "a GPU target names its generation, such as rocm:gfx942",
}


def target_names() -> list[str]:
    """Every name that can be given, aliases first."""
    return [*ALIASES, *_TABLE]


def known_targets() -> list[Target]:
    """The table, with the logical-core setting in force where a target can have it."""
    several = (envs.LOGICAL_NC_CONFIG.get() or 1) > 1
    return [
        _with_logical_cores(target) if target.kind == "neuron" and not (several and target.logical_nc == 1) else target
        for target in _TABLE.values()
    ]


def resolve_target(name: str) -> Target:
    """The target of that name. ``cpu`` and ``cpu:host`` become what they stand for; letter case does not matter.

    Raises ``ConfigError`` with the nearest valid name and the list of them.
    """
    wanted = name.strip().lower()
    if wanted == "cpu":
        wanted = _DEFAULT_CPU
    elif wanted == "cpu:host":
        return _host()
    if wanted in _REFUSED:
        raise ConfigError(f"target {name!r} can't be compiled for: {_REFUSED[wanted]}. {_valid()}")
    base, *extra = wanted.split("+")
    target = _TABLE.get(base)
    if target is None:
        nearest = difflib.get_close_matches(wanted, target_names(), n=1, cutoff=0.0)[0]
        raise ConfigError(f"target {name!r} is not known. Did you mean {nearest}? {_valid()}")
    if extra:
        return _with_features(target, extra, name)
    return _with_logical_cores(target) if target.kind == "neuron" else target


def compile_target() -> Target:
    """What this machine compiles for: the override, else its Neuron device, else the default CPU target.

    Raises ``ConfigError`` for an override that is no target, and for a Neuron device of an unknown kind.
    """
    override = envs.TARGET_OVERRIDE.get()
    if override:
        try:
            return resolve_target(override)
        except ConfigError as error:
            raise ConfigError(f"{envs.TARGET_OVERRIDE.name}: {error}") from None
    return resolve_target(neuron_device() or "cpu")


def lookup_targets() -> list[Target]:
    """The targets whose artifacts this host looks for, best first.

    A CPU host with no override can use the artifacts of its own level and of every level below; the target that it
    compiles for is last where the host is below it, and in its place where not.
    """
    default = compile_target()
    if envs.TARGET_OVERRIDE.is_set() or default.kind != "cpu":
        return [default]
    levels = [_TABLE[f"cpu:{level}"] for level in cpu.psabi_levels() if f"cpu:{level}" in _TABLE]
    return levels if default in levels else [*levels, default]


def better_target(target: Target) -> Target | None:
    """The best CPU level of this host, where ``target`` is a CPU target that makes no use of it; else None."""
    best = _TABLE.get(f"cpu:{cpu.psabi_level()}")
    if best is None or target.kind != "cpu" or set(best.required_features).issubset(target.required_features):
        return None
    return best


def has_neuron_device(root: Path = Path("/")) -> bool:
    """True if the Neuron driver shows a device."""
    return (root / "dev/neuron0").exists()


def neuron_device(root: Path = Path("/")) -> str | None:
    """The name of this machine's Neuron target, such as ``trn2``; None without a device.

    Raises ``ConfigError`` where there is a device and neither the driver nor the firmware says which.
    """
    if not has_neuron_device(root):
        return None
    for path in (
        "sys/devices/virtual/neuron_device/neuron0/info/architecture/instance_type",
        "sys/class/dmi/id/product_name",
    ):
        try:
            kind = (root / path).read_text().strip().lower().split(".")[0]
        except OSError:
            continue
        if kind in _TABLE:
            return kind
    raise ConfigError(
        "this machine has a Neuron device, but not of a kind that is known. "
        f"Set {envs.TARGET_OVERRIDE.name} to one of: {', '.join(NEURON_TARGETS)}"
    )


def _host() -> Target:
    """``cpu:host`` as a level and the features beyond it, so that the key says what the artifact needs."""
    level = cpu.psabi_level()
    extra = cpu.host_features().intersection(cpu.EXTRA_FEATURES[platform.machine()])
    return _cpu(level, tuple(sorted(extra)))


def _with_features(target: Target, extra: list[str], name: str) -> Target:
    """A CPU level with features, in the spelling that ``cpu:host`` resolves to: ``cpu:x86-64-v4+avx512bf16``."""
    machine = "aarch64" if target.arch == "generic" else "x86_64"
    known = cpu.EXTRA_FEATURES[machine] if target.kind == "cpu" else ()
    if unknown := [feature for feature in extra if feature not in known]:
        accepted = ", ".join(known) or "none for this target"
        raise ConfigError(f"target {name!r}: {target.name} can't have {', '.join(unknown)}. Accepted: {accepted}")
    return _cpu(target.name.removeprefix("cpu:"), tuple(sorted(set(extra))))


def _with_logical_cores(target: Target) -> Target:
    """``target`` with the logical-core setting in force, and the memory of that many physical cores."""
    cores = envs.LOGICAL_NC_CONFIG.get() or target.logical_nc or 1
    if cores != 1 and target.logical_nc == 1:
        raise ConfigError(
            f"{envs.LOGICAL_NC_CONFIG.name}={cores}: {target.name} has no logical cores of more than one "
            "physical core. Set it to 1, or unset it."
        )
    assert target.memory_bytes is not None
    return replace(target, logical_nc=cores, memory_bytes=target.memory_bytes * cores)


def _valid() -> str:
    return f"Valid targets: {', '.join(target_names())}"
