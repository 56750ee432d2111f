"""neuronx-cc, the compiler of AWS Neuron devices: StableHLO text or an HLO module to a NEFF."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_neuron.errors import CompileError, ConfigError
from vllm_neuron.targets import NEURON_TARGETS, target_names

if TYPE_CHECKING:
    from vllm_neuron.lowering.module import ModuleIdentity
    from vllm_neuron.targets import Target

_HEADER_SIZE = 1024
_VERSION_SECONDS = 120  # it loads a large Python package before it answers

_DEVICE_MEMORY = (
    "The graph does not fit the device's memory: lower --max-num-seqs, --max-num-batched-tokens or --max-model-len, "
    "or make the KV cache smaller with --kv-cache-memory-bytes"
)
# What its codes and messages mean for the user.
_ADVICE = {
    "F137": "The machine ran out of memory: one compile takes 10 to 40 GB. "
    "Lower NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS, or compile on a larger machine",
    "F134": "The compiler aborted. Try another --optimization-level, and report the module: it is beside the log",
    "NCC_EOOM": _DEVICE_MEMORY,
    "NCC_EVRF009": _DEVICE_MEMORY,
    "NCC_EVRF059": "A kernel's file is missing from the compiler's installation: install neuronx-cc again",
    "NCC_EARG001": "The target does not have that logical-core setting: unset NEURON_LOGICAL_NC_CONFIG",
    "argument --target: invalid choice": "The installed neuronx-cc does not know this target: install a newer one",
}
_BY_EXIT_CODE = {
    2: "The installed neuronx-cc does not take these arguments: correct compiler_args, or install another release",
    70: "This is an error inside the compiler. What reproduces it is beside the log: the module, and the command line "
    "in command.txt. Try another --optimization-level, and report it to AWS",
}


class NeuronxCompiler:
    """``neuronx-cc``, found on PATH or beside the interpreter."""

    name = "neuronx-cc"
    artifact_suffix = "neff"
    formats: Sequence[str] = ("stablehlo", "hlo")
    memory_bytes = 20 << 30
    error_pattern = re.compile(r"\[INTERNAL_ERROR\]|\bERROR\b|NCC_|\[F1\d\d\]|: error: ")
    memory_pattern = re.compile(r"\[F137\]")
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
        return [
            str(_binary()),
            "compile",
            str(module_path),
            "--framework",
            "XLA",
            *flags,
            "--output",
            str(artifact_path),
            "--logfile",
            self.log_file,
        ]

    def verify(self, artifact: Path) -> None:
        """A NEFF has a header of 1024 bytes that gives its own size and the size of what follows."""
        size = artifact.stat().st_size
        with artifact.open("rb") as file:
            header = file.read(_HEADER_SIZE)
        if len(header) < _HEADER_SIZE:
            raise CompileError(f"{artifact.name} is not a whole NEFF: it has only {size} bytes")
        header_size, data_size = struct.unpack_from("<QQ", header, 8)
        if header_size != _HEADER_SIZE or header_size + data_size != size:
            raise CompileError(
                f"{artifact.name} is not a whole NEFF: its header tells of {header_size} + {data_size} "
                f"bytes, and it has {size}"
            )

    def required_features(self, target: Target) -> tuple[str, ...]:
        """None: the artifact runs on the device."""
        return ()

    def advice(self, returncode: int, log: str) -> str:
        """What the codes in the log call for, those of its first line first; else what the exit code does."""
        for text in (log.partition("\n")[0], log):
            for code, advice in _ADVICE.items():
                if code in text:
                    return advice + (_usage(log) if advice is _DEVICE_MEMORY else "")
        return _BY_EXIT_CODE.get(returncode, "")


def _usage(log: str) -> str:
    found = re.search(r"HBM usage is ([\d.]+ ?\w+)", log)
    return f". It needs {found[1]}" if found else ""


def _binary() -> Path:
    found = _find(os.environ.get("PATH", os.defpath))
    if found is None:
        others = ", ".join(name for name in target_names() if name not in NEURON_TARGETS)
        raise CompileError(
            f"neuronx-cc, the compiler for {', '.join(NEURON_TARGETS)}, is neither on PATH nor beside the Python "
            f"interpreter ({Path(sys.executable).parent}). Install it as AWS's Neuron documentation says. "
            f"Targets that need no neuronx-cc: {others}"
        )
    return found


@functools.lru_cache(maxsize=256)
def _find(path: str) -> Path | None:
    """The program's absolute path, looked for once in each value of PATH."""
    found = shutil.which("neuronx-cc", path=path) or shutil.which(Path(sys.executable).with_name("neuronx-cc"))
    return Path(found).absolute() if found else None


@functools.lru_cache(maxsize=256)
def _version(binary: str) -> str:
    if Path(binary).parent == Path(sys.executable).parent:
        try:
            return importlib.metadata.version("neuronx-cc")
        except importlib.metadata.PackageNotFoundError:
            pass
    output, ending = _ask_version(binary)
    found = re.search(r"Compiler version (\d+\.\d+\S*)", output) or re.search(r"\b(\d+\.\d+\.\S+)", output)
    if found is None or ending:
        last = (output.strip().splitlines() or ["nothing"])[-1]
        raise CompileError(f"{binary} --version does not give a version: it {ending or 'ended'}, and said: {last}")
    return found[1]


def _ask_version(binary: str) -> tuple[str, str]:
    """What ``--version`` prints, and how it went wrong; '' where it did not."""
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                [binary, "--version"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise CompileError(f"{binary} can't be started: {error}") from None
        try:
            code = process.wait(_VERSION_SECONDS)
            ending = f"failed with exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            ending = f"was stopped after {_VERSION_SECONDS} s"
        finally:
            # What it may have started holds the file open, and would be left.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return output.read().decode(errors="replace"), ending
