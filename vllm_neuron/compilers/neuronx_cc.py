"""neuronx-cc, the compiler of AWS Neuron devices: StableHLO text or an HLO module to a NEFF."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_neuron.errors import CompileError, ConfigError

if TYPE_CHECKING:
    from vllm_neuron.lowering.module import ModuleIdentity
    from vllm_neuron.targets import Target

_HEADER_SIZE = 1024
_VERSION_SECONDS = 120  # it loads a large Python package before it answers

# What the codes in its log mean for the user.
_ADVICE = {
    "F137": "The machine ran out of memory: one compile takes 10 to 40 GB. Run fewer at once, or on a larger machine",
    "F134": "The compiler aborted. Try another optimization level, and report the module with its log",
    "NCC_EOOM": "The graph does not fit the device's memory: use smaller buckets, a shorter max_model_len, more "
    "tensor parallelism, or a smaller KV cache",
    "NCC_EVRF009": "The graph does not fit the device's memory: use smaller buckets, a shorter max_model_len, more "
    "tensor parallelism, or a smaller KV cache",
    "NCC_EVRF059": "A kernel's file is missing from the compiler's installation: install it again",
    "NCC_EARG001": "The device does not have that logical-core setting: unset NEURON_LOGICAL_NC_CONFIG",
    "invalid choice": "The installed neuronx-cc does not know this target: install a newer one",
}


class NeuronxCompiler:
    """``neuronx-cc``, found on PATH or beside the interpreter."""

    name = "neuronx-cc"
    artifact_suffix = "neff"
    formats: Sequence[str] = ("stablehlo", "hlo")
    memory_bytes = 20 << 30
    error_pattern = re.compile(r"\[INTERNAL_ERROR\]|\bERROR\b|NCC_|\[F1\d\d\]|: error: ")
    log_file = "log-neuron-cc.txt"

    def version(self) -> str:
        """The installed compiler's version. Raises ``CompileError`` where there is none."""
        return _version(str(_binary()))

    def flags(self, target: Target, level: int, module: ModuleIdentity) -> tuple[str, ...]:
        """Level 0 is neuronx-cc's lowest, 1. Raises ``ConfigError`` for a level outside 0 to 3."""
        if level not in range(4):
            raise ConfigError(f"optimization level {level} is not one of 0, 1, 2, 3")
        model = ("--model-type", "transformer", "--auto-cast=none") if module.format == "stablehlo" else ()
        cores = ("--lnc", str(target.logical_nc)) if target.name not in ("trn1", "trn1n", "inf2") else ()
        return ("--target", target.name, *model, *cores, f"-O{max(level, 1)}")

    def command(self, module_path: Path, artifact_path: Path, flags: Sequence[str]) -> list[str]:
        """The command line. Raises ``CompileError`` where the compiler is not installed."""
        return [str(_binary()), "compile", str(module_path), "--framework", "XLA", *flags,
                "--output", str(artifact_path), "--logfile", self.log_file]  # fmt: skip

    def verify(self, artifact: Path) -> None:
        """A NEFF has a header of 1024 bytes that gives its own size and the size of what follows."""
        size = artifact.stat().st_size
        with artifact.open("rb") as file:
            header = file.read(_HEADER_SIZE)
        if len(header) < _HEADER_SIZE:
            raise CompileError(f"{artifact} is not a whole NEFF: it has only {size} bytes")
        header_size, data_size = struct.unpack_from("<QQ", header, 8)
        if header_size != _HEADER_SIZE or header_size + data_size != size:
            raise CompileError(f"{artifact} is not a whole NEFF: its header tells of {header_size} + {data_size} "
                               f"bytes, and it has {size}")  # fmt: skip

    def required_features(self, target: Target) -> tuple[str, ...]:
        """None: the artifact runs on the device."""
        return ()

    def advice(self, returncode: int, log: str) -> str:
        """What the codes in the log call for."""
        return next((advice for code, advice in _ADVICE.items() if code in log), "")


def _binary() -> Path:
    for path in (shutil.which("neuronx-cc"), Path(sys.executable).with_name("neuronx-cc")):
        if path is not None and Path(path).exists():
            return Path(path).absolute()
    raise CompileError("neuronx-cc is neither on PATH nor beside the Python interpreter. Install it as AWS's Neuron "
                       "documentation says, or compile for another target, such as cpu")  # fmt: skip


@functools.cache
def _version(binary: str) -> str:
    if Path(binary).parent == Path(sys.executable).parent:
        try:
            return importlib.metadata.version("neuronx-cc")
        except importlib.metadata.PackageNotFoundError:
            pass
    try:
        output = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=_VERSION_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{binary} can't be asked for its version: {error}") from None
    found = re.search(r"\b\d+\.\d+\.\S+", output.stdout + output.stderr)
    if not found:
        raise CompileError(f"{binary} --version gives no version (exit code {output.returncode})")
    return found[0]
