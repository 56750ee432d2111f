"""This host's processor: its features in LLVM's spelling, its psABI level, its cores and its memory.

IREE does not look at x86 features when it loads an artifact: one that needs AVX-512 loads anywhere, and dies of an
illegal instruction. So an artifact records what it needs, and :func:`check_features` is asked before it is loaded.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Iterable
from pathlib import Path

from vllm_neuron.errors import IncompatibleHostError
from vllm_neuron.host import cgroup

_V1 = ("cmov", "cx8", "fxsr", "mmx", "sse", "sse2", "x87")
_V2 = (*_V1, "crc32", "cx16", "popcnt", "sahf", "sse3", "sse4.1", "sse4.2", "ssse3")
_V3 = (*_V2, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave")
_V4 = (*_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")

# What a compiler may use at each level, worst level first.
LEVELS: dict[str, tuple[str, ...]] = {
    "x86-64": _V1,
    "x86-64-v2": _V2,
    "x86-64-v3": _V3,
    "x86-64-v4": _V4,
    "aarch64": ("fp-armv8", "neon"),
}

# Features beyond the levels that a compiler makes use of in numerical code.
EXTRA_FEATURES: dict[str, tuple[str, ...]] = {
    "x86_64": (
        "aes", "avx512bf16", "avx512bitalg", "avx512fp16", "avx512ifma", "avx512vbmi", "avx512vbmi2", "avx512vnni",
        "avx512vpopcntdq", "avxifma", "avxneconvert", "avxvnni", "avxvnniint16", "avxvnniint8", "gfni", "vaes",
        "vpclmulqdq",
    ),
    "aarch64": (
        "bf16", "complxnum", "dotprod", "fp16fml", "fullfp16", "i8mm", "lse", "rdm", "sve", "sve2",
    ),
}  # fmt: skip

# The kernel's name to LLVM's, where they differ; one flag may stand for several features.
_X86_NAMES: dict[str, tuple[str, ...]] = {
    "fpu": ("x87",), "pni": ("sse3",), "sse4_1": ("sse4.1",), "sse4_2": ("sse4.2", "crc32"), "abm": ("lzcnt",),
    "bmi1": ("bmi",), "lahf_lm": ("sahf",), "pclmulqdq": ("pclmul",), "sha_ni": ("sha",), "rdrand": ("rdrnd",),
    "3dnowprefetch": ("prfchw",), "avx512_bf16": ("avx512bf16",), "avx512_bitalg": ("avx512bitalg",),
    "avx512_fp16": ("avx512fp16",), "avx512_vbmi2": ("avx512vbmi2",), "avx512_vnni": ("avx512vnni",),
    "avx512_vp2intersect": ("avx512vp2intersect",), "avx512_vpopcntdq": ("avx512vpopcntdq",),
    "avx_ifma": ("avxifma",), "avx_ne_convert": ("avxneconvert",), "avx_vnni": ("avxvnni",),
    "avx_vnni_int8": ("avxvnniint8",), "avx_vnni_int16": ("avxvnniint16",), "amx_bf16": ("amx-bf16",),
    "amx_fp16": ("amx-fp16",), "amx_int8": ("amx-int8",), "amx_tile": ("amx-tile",),
}  # fmt: skip
_ARM_NAMES: dict[str, tuple[str, ...]] = {
    "fp": ("fp-armv8",), "asimd": ("neon",), "crc32": ("crc",), "atomics": ("lse",), "asimdhp": ("fullfp16",),
    "asimdrdm": ("rdm",), "jscvt": ("jsconv",), "fcma": ("complxnum",), "lrcpc": ("rcpc",), "dcpop": ("ccpp",),
    "asimddp": ("dotprod",), "asimdfhm": ("fp16fml",), "ilrcpc": ("rcpc-immo",), "paca": ("pauth",),
    "rng": ("rand",), "frint": ("fptoint",),
}  # fmt: skip


@functools.cache
def host_features() -> frozenset[str]:
    """The features of this host's processor, in LLVM's spelling: ``avx512f``, ``sse4.2``, ``lzcnt``, ``neon``."""
    return parse_features(Path("/proc/cpuinfo").read_text(), platform.machine())


def parse_features(cpuinfo: str, machine: str) -> frozenset[str]:
    """The features that every processor in the text of ``/proc/cpuinfo`` has; ``machine`` as ``uname -m`` says it."""
    field, names = ("Features", _ARM_NAMES) if machine == "aarch64" else ("flags", _X86_NAMES)
    processors = [
        frozenset(feature for flag in value.split() for feature in names.get(flag, (flag,)))
        for key, _, value in (line.partition(":") for line in cpuinfo.splitlines())
        if key.strip() == field
    ]
    # Cores may differ, and a thread may run on any of them.
    return frozenset.intersection(*processors) if processors else frozenset()


def psabi_level(features: Iterable[str] | None = None) -> str:
    """The best of ``LEVELS`` that this host has (or that ``features`` make): ``x86-64-v3``, ``aarch64``."""
    return psabi_levels(features)[0]


def psabi_levels(features: Iterable[str] | None = None) -> list[str]:
    """All of ``LEVELS`` that this host has, best first. Raises ``IncompatibleHostError`` where it has none."""
    have = host_features() if features is None else frozenset(features)
    levels = [level for level, needed in LEVELS.items() if have.issuperset(needed)]
    if not levels:
        raise IncompatibleHostError(
            f"this processor ({platform.machine()}) is neither x86-64 nor 64-bit Arm, "
            "and only these can run CPU artifacts"
        )
    return levels[::-1]


def check_features(required: Iterable[str]) -> None:
    """Raises ``IncompatibleHostError`` that names those of ``required`` that this host's processor lacks."""
    lacking = sorted(set(required) - host_features())
    if lacking:
        raise IncompatibleHostError(
            f"the artifact needs processor features that this host does not have: {', '.join(lacking)} "
            f"(this host is {psabi_level()}). Compile for target cpu:{psabi_level()}, or run on a newer processor."
        )


def usable_cores() -> int:
    """Cores that this process can keep busy: its affinity, and its control group's quota rounded down; 1 or more."""
    quota = cgroup.cpu_quota()
    affinity = len(os.sched_getaffinity(0))
    return affinity if quota is None else max(1, min(affinity, int(quota)))


def available_memory_bytes() -> int:
    """Bytes of memory that this process may still allocate without swapping or meeting its control group's limit."""
    import psutil

    free = int(psutil.virtual_memory().available)
    room = cgroup.available_memory()
    return free if room is None else min(free, room)
