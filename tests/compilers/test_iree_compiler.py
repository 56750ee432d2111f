"""The real iree-compile: what it is given, what it gives, and what its failures say."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import psutil
import pytest

from vllm_neuron.abi import Abi
from vllm_neuron.compilers.base import CompileReport, compiler_for, run_compiler
from vllm_neuron.compilers.iree import IreeCompiler
from vllm_neuron.errors import CompileError, ConfigError
from vllm_neuron.host.cpu import LEVELS
from vllm_neuron.lowering.module import LoweredModule
from vllm_neuron.targets import resolve_target, target_names

DOT = """
func.func @main(%x: tensor<8x64xf32>, %w: tensor<64x32xf32>) -> tensor<8x32xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
     : (tensor<8x64xf32>, tensor<64x32xf32>) -> tensor<8x32xf32>
  %1 = stablehlo.exponential %0 : tensor<8x32xf32>
  return %1 : tensor<8x32xf32>
}
"""
STABLEHLO = LoweredModule("stablehlo", b"", Abi((), ()))


def build(folder: Path, target: str = "cpu:x86-64-v3", text: str = DOT, level: int = 2) -> CompileReport:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "graph.mlir").write_text(text)
    compiler = IreeCompiler()
    return run_compiler(
        compiler, folder, "graph.mlir", compiler.flags(resolve_target(target), level, STABLEHLO), "graph.vmfb"
    )


def test_same_bytes_from_another_folder_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = build(tmp_path / "one").artifact.read_bytes()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert build(tmp_path / "deep" / "er" / "two").artifact.read_bytes() == one
    assert str(tmp_path).encode() not in one


@pytest.mark.parametrize("level", ["x86-64-v2", "x86-64-v3", "x86-64-v4"])
def test_an_artifact_uses_no_feature_beyond_those_it_is_said_to_need(tmp_path: Path, level: str) -> None:
    """IREE writes into the artifact which features it gave to LLVM."""
    module = zipfile.ZipFile(build(tmp_path, f"cpu:{level}").artifact).read("module.fb")
    found = re.search(rb'cpu_features = "([^"]*)"', module)
    assert found
    used = {feature.removeprefix("+") for feature in found[1].decode().split(",")}
    assert used == set(LEVELS[level])
    assert set(IreeCompiler().required_features(resolve_target(f"cpu:{level}"))) == used


@pytest.mark.parametrize("name", [name for name in target_names() if name.startswith(("cpu", "cuda", "rocm"))])
def test_every_target_of_the_table_compiles_here(tmp_path: Path, name: str) -> None:
    report = build(tmp_path, name)
    assert 1000 < report.artifact.stat().st_size < 100_000
    assert report.peak_memory_bytes < IreeCompiler.memory_bytes


def test_flags_are_canonical() -> None:
    compiler = compiler_for(resolve_target("cpu"))
    flags = compiler.flags(resolve_target("cpu:host"), 3, STABLEHLO)
    assert flags == compiler.flags(resolve_target(resolve_target("cpu:host").name), 3, STABLEHLO)
    assert "--iree-opt-level=O3" in flags
    assert not any("host" in flag or "/" in flag for flag in flags)
    everything = {compiler.flags(resolve_target(name), level, STABLEHLO) for name in ("cpu:x86-64-v3", "cuda:sm_80",
                  "cpu:x86-64-v4", "cpu:aarch64", "rocm:gfx942") for level in range(4)}  # fmt: skip
    assert len(everything) == 20


def test_refuses_what_it_can_not_compile() -> None:
    with pytest.raises(ConfigError, match="optimization level 4 is not one of 0, 1, 2, 3"):
        IreeCompiler().flags(resolve_target("cpu"), 4, STABLEHLO)
    with pytest.raises(ConfigError, match="IREE compiles StableHLO, not hlo"):
        IreeCompiler().flags(resolve_target("cpu"), 2, LoweredModule("hlo", b"", Abi((), ())))


def test_version_is_the_release_that_the_project_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    asked = re.search(r"iree-base-compiler==([\w.]+)", str(project["optional-dependencies"]))
    assert asked
    assert IreeCompiler().version() == asked[1]
    assert f"iree-base-runtime=={asked[1]}" in project["dependencies"]


WITHOUT_COMPILER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from vllm_neuron.compilers.iree import IreeCompiler, RELEASE
print(IreeCompiler().version() == RELEASE)
try:
    IreeCompiler().command(Path("graph.mlir"), Path("graph.vmfb"), ())
except Exception as error:
    print(type(error).__name__, error)
"""


def test_without_the_compiler() -> None:
    # -S leaves out site-packages, where IREE is.
    command = [sys.executable, "-S", "-c", WITHOUT_COMPILER, str(Path(__file__).parents[2])]
    version, error = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert version == "True"
    assert error.startswith("CompileError the IREE compiler is not installed. Install it: pip install iree-base-comp")


def test_runs_the_program_itself_and_not_the_script_on_path(tmp_path: Path) -> None:
    binary = Path(build(tmp_path).command[0])
    assert binary.read_bytes()[:4] == b"\x7fELF"


def test_bad_module_is_diagnosed(tmp_path: Path) -> None:
    with pytest.raises(CompileError) as caught:
        build(tmp_path, text="func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> { return %y : tensor<4xf32> }")
    message = str(caught.value)
    assert "iree failed with exit code 1. First error: graph.mlir:1:" in message
    assert "undeclared SSA value name" in message
    assert str(tmp_path / "compiler.log") in message


def test_compiler_of_another_release_is_named(tmp_path: Path) -> None:
    (tmp_path / "graph.mlir").write_text(DOT)
    with pytest.raises(CompileError, match=r"built for iree-base-compiler 3\.13\.0, and .* is installed"):
        run_compiler(IreeCompiler(), tmp_path, "graph.mlir", ("--iree-no-such-flag",), "graph.vmfb")


def test_verify_finds_damage(tmp_path: Path) -> None:
    artifact = build(tmp_path).artifact
    whole = artifact.read_bytes()
    IreeCompiler().verify(artifact)
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    for damaged in (b"", whole[:-1], whole[:middle], flipped, b"\x7fELF" + whole[4:], b"\0" * len(whole)):
        artifact.write_bytes(damaged)
        with pytest.raises(CompileError, match="not a whole IREE module"):
            IreeCompiler().verify(artifact)


def test_killed_caller_leaves_no_iree_compile(tmp_path: Path) -> None:
    """A compile of many seconds: every dot product is of another shape."""
    lines, last = [], "%x"
    for index in range(1, 400):
        rows, columns = 63 + index, 64 + index
        types = f"(tensor<8x{rows}xf32>, tensor<{rows}x{columns}xf32>) -> tensor<8x{columns}xf32>"
        lines.append(f"  %w{index} = stablehlo.iota dim = 0 : tensor<{rows}x{columns}xf32>")
        lines.append(f"  %{index} = stablehlo.dot_general {last}, %w{index}, contracting_dims = [1] x [0] : {types}")
        last = f"%{index}"
    text = "func.func @main(%x: tensor<8x64xf32>) -> tensor<8x463xf32> {\n" + "\n".join(lines)
    (tmp_path / "slow.mlir").write_text(f"{text}\n  return {last} : tensor<8x463xf32>\n}}")
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); from test_iree_compiler import build\n"
        "folder = Path(sys.argv[2]); build(folder / 'out', text=(folder / 'slow.mlir').read_text())"
    )
    caller = subprocess.Popen([sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path)])
    compilers: list[psutil.Process] = []
    deadline = time.monotonic() + 60
    while not compilers:
        assert caller.poll() is None, "the compile ended before it could be killed"
        assert time.monotonic() < deadline
        children = psutil.Process(caller.pid).children(recursive=True)
        compilers = [child for child in children if child.name() == "iree-compile"]
    os.kill(caller.pid, signal.SIGKILL)
    caller.wait()
    while any(process.is_running() for process in compilers) or list((tmp_path / "out").glob(".scratch-*")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not (tmp_path / "out" / "graph.vmfb").exists()
