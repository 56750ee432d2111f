"""IREE, the embedded compiler: StableHLO text to a ``.vmfb`` for CPUs, and for some GPUs."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_neuron.errors import CompileError, ConfigError

if TYPE_CHECKING:
    from vllm_neuron.lowering.module import ModuleIdentity
    from vllm_neuron.targets import Target

# What this package is built for, and what a host without the compiler looks artifacts up with.
RELEASE = "3.13.0"
_PACKAGE = "iree-base-compiler"
_GPU_FLAGS = {"cuda": ("cuda", "--iree-cuda-target"), "rocm": ("hip", "--iree-rocm-target")}


class IreeCompiler:
    """``iree-compile`` of the Python package, called as a program."""

    name = "iree"
    artifact_suffix = "vmfb"
    formats: Sequence[str] = ("stablehlo",)
    memory_bytes = 1 << 29  # measured: under 200 MB for 32 layers of 4096
    error_pattern = re.compile(r"\berror:|LLVM ERROR|PLEASE submit a bug report")
    memory_pattern = re.compile("LLVM ERROR: out of memory")
    log_file = ""

    def version(self) -> str:
        """The installed compiler's version; where there is none, of the release that this package is built for."""
        return _installed_version() or RELEASE

    def flags(self, target: Target, level: int, module: ModuleIdentity) -> tuple[str, ...]:
        """IREE's own level of that number and our fixed flags.

        Raises ``ConfigError`` for a level outside 0 to 3 and for a module that is not StableHLO.
        """
        if level not in range(4):
            raise ConfigError(f"optimization level {level} is not one of 0, 1, 2, 3")
        if module.format != "stablehlo":
            raise ConfigError(f"IREE compiles StableHLO, not {module.format}: use the native route for {target.name}")
        return (
            "--iree-input-type=stablehlo",
            "--iree-input-demote-f64-to-f32=false",  # by default IREE changes the signature of main
            *_target_flags(target),
            f"--iree-opt-level=O{level}",
            # With it a bf16 scatter of 128 tokens or more is fused into one stack frame, over the stack limit. And the
            # protection of inputs counts on reads and writes that are not fused.
            "--iree-dispatch-creation-enable-aggressive-fusion=false",
        )

    def command(self, module_path: Path, artifact_path: Path, flags: Sequence[str]) -> list[str]:
        """The command line. Raises ``CompileError`` where the compiler's package is not installed."""
        return [str(_binary()), str(module_path), *flags, "-o", str(artifact_path)]

    def verify(self, artifact: Path) -> None:
        """A ``.vmfb`` is a zip archive, with a check sum, around a FlatBuffer that calls itself IREE."""
        try:
            with zipfile.ZipFile(artifact) as archive:
                damaged = archive.testzip()
                module = archive.read("module.fb")
        except (zipfile.BadZipFile, KeyError, OSError) as error:
            raise CompileError(f"{artifact} is not a whole IREE module: {error}") from None
        if damaged or module[8:12] != b"IREE" or int.from_bytes(module[:4], "little") > len(module):
            raise CompileError(f"{artifact} is not a whole IREE module: {damaged or 'its header'} is damaged")

    def required_features(self, target: Target) -> tuple[str, ...]:
        """All that the target's level may use: IREE itself does not check them at load."""
        return target.required_features

    def advice(self, returncode: int, log: str) -> str:
        """Names a compiler that is not of the release whose flags these are."""
        if "Unknown command line argument" in log:
            return f"This package is built for {_PACKAGE} {RELEASE}, and {_installed_version()} is installed"
        return ""


def _target_flags(target: Target) -> tuple[str, ...]:
    if target.kind != "cpu":
        device, flag = _GPU_FLAGS[target.kind]
        return (f"--iree-hal-target-device={device}", f"{flag}={target.arch}")
    features = ",".join(f"+{feature}" for feature in target.cpu_features)
    return (
        "--iree-hal-target-device=local",
        "--iree-hal-local-target-device-backends=llvm-cpu",
        f"--iree-llvmcpu-target-triple={target.triple}",
        f"--iree-llvmcpu-target-cpu={target.arch}",
        *((f"--iree-llvmcpu-target-cpu-features={features}",) if features else ()),
        "--iree-llvmcpu-debug-symbols=false",
    )


@functools.cache
def _installed_version() -> str | None:
    try:
        return importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def _binary() -> Path:
    """The program itself: what is on PATH is a Python script that loads NumPy first, and stays as its parent."""
    spec = importlib.util.find_spec("iree")
    for place in spec.submodule_search_locations or () if spec else ():
        binary = Path(place, "compiler", "_mlir_libs", "iree-compile")
        if binary.exists():
            return binary
    raise CompileError(
        f"the IREE compiler is not installed. Install it: pip install {_PACKAGE}=={RELEASE} "
        "(or the extra 'compiler' of this package)"
    )
