"""A compiler that is a Python program of the test's, run as real ones are: for faults that real ones show rarely."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_neuron.compilers.base import CompileReport, run_compiler
from vllm_neuron.errors import CompileError
from vllm_neuron.lowering.module import LoweredModule
from vllm_neuron.targets import Target

# A family: the compiler, a child in a session of its own, and a grandchild there whose parent has ended. Each writes
# its process id into the folder it is given, and sleeps.
FAMILY = """
import os, pathlib, subprocess, sys, time
folder, generation = pathlib.Path(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 0
if generation < 3:
    arguments = [sys.executable, __file__, *sys.argv[1:4], str(generation + 1)]
    subprocess.Popen(arguments, start_new_session=True)
if generation != 2:
    pathlib.Path(f"scratch-{generation}").touch()
    (folder / f"{generation}.tmp").write_text(str(os.getpid()))
    (folder / f"{generation}.tmp").rename(folder / f"{generation}.pid")
    time.sleep(600)
"""
FAMILY_SIZE = 3


class ScriptCompiler:
    """Runs ``python SCRIPT MODULE ARTIFACT FLAGS...``."""

    name = "script"
    artifact_suffix = "bin"
    formats = ("stablehlo", "hlo")
    memory_bytes = 1
    error_pattern = re.compile("error:")
    memory_pattern = re.compile("out of memory")
    log_file = "own.log"

    def __init__(self, script: Path) -> None:
        self.script = script

    def version(self) -> str:
        return "1"

    def flags(self, target: Target, level: int, module: LoweredModule) -> tuple[str, ...]:
        return ()

    def command(self, module_path: Path, artifact_path: Path, flags: Sequence[str]) -> list[str]:
        return [sys.executable, str(self.script), str(module_path), str(artifact_path), *flags]

    def verify(self, artifact: Path) -> None:
        if artifact.read_bytes() == b"damaged":
            raise CompileError("the artifact is damaged")

    def required_features(self, target: Target) -> tuple[str, ...]:
        return ()

    def advice(self, returncode: int, log: str) -> str:
        return "Buy a bigger boat" if returncode == 70 else ""


def compile_with(folder: Path, script: str, *flags: str, timeout: float | None = None) -> CompileReport:
    """Compiles ``folder/out/graph.mlir`` with the script's text."""
    (folder / "out").mkdir(exist_ok=True)
    (folder / "out" / "graph.mlir").write_text("module")
    (folder / "script.py").write_text(script)
    return run_compiler(ScriptCompiler(folder / "script.py"), folder / "out", "graph.mlir", flags, "graph.bin", timeout)


if __name__ == "__main__":  # a caller that a test kills
    compile_with(Path(sys.argv[1]), FAMILY, sys.argv[1])
