"""The test double itself: what it takes, what it refuses, and what it leaves."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import tarfile
from pathlib import Path

import psutil
import pytest

from tests.compile.modules import broken, scale
from tests.neuronx_cc_double import VERSION, install
from tests.neuronx_cc_double.behaviours import calls_folder

OPTIONS = ["--framework", "XLA", "--target", "trn2", "--output", "g.neff", "--logfile", "own.log"]
# An HloModuleProto of the least that one has: name, one computation, a program shape.
HLO = b"\x0a\x04main" + b"\x1a\x02\x0a\x00" + b"\x22\x00"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "graph.mlir").write_bytes(scale(3).data)
    (tmp_path / "graph.hlo").write_bytes(HLO)
    return install(tmp_path / "bin")


def run(program: Path, *words: str, script: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": "", "NEURONX_CC_DOUBLE": str(script or "")}
    return subprocess.run(
        [program, *words], cwd=program.parents[1], env=environment, text=True, capture_output=True, timeout=60
    )


def test_version_and_the_help_that_crashes(program: Path) -> None:
    assert run(program, "--version").stdout.startswith(f"NeuronX Compiler version {VERSION}\n")
    help_ = run(program, "compile", "--help")
    assert (help_.returncode, "Traceback" in help_.stderr) == (1, True)


def test_a_neff_and_what_is_left_around_it(program: Path) -> None:
    done = run(program, "compile", "graph.mlir", *OPTIONS, "--model-type", "transformer", "--lnc", "2", "-O3")
    assert done.returncode == 0, done.stderr
    folder = program.parents[1]
    neff = (folder / "g.neff").read_bytes()
    version, header_size, data_size = struct.unpack_from("<QQQ", neff)
    assert (header_size, header_size + data_size) == (1024, len(neff))
    assert neff[40:168].rstrip(b"\0").decode() == VERSION
    assert struct.unpack_from("<I", neff, 552) == (2,)
    assert version > 0
    (folder / "data.tar").write_bytes(neff[1024:])
    with tarfile.open(folder / "data.tar") as archive:
        assert "TEST_DOUBLE" in archive.getnames()
    assert {"own.log", "sg00", "global_metric_store.json"} <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--target", "gen2"], "argument --target: invalid choice: gen2 (choose from trn1, inf2, "),
        (["--framework", "TF"], "argument --framework: invalid choice: TF"),
        (["-O0"], "argument --optlevel/-O: invalid choice: 0"),
        (["--lnc", "4"], "argument --lnc/--logical-nc-config: invalid choice: 4"),
        (["--no-such-option"], "unrecognized arguments: --no-such-option"),
    ],
)
def test_arguments_are_checked(program: Path, words: list[str], says: str) -> None:
    done = run(program, "compile", "graph.mlir", *OPTIONS, *words)
    assert done.returncode == 2
    assert f"neuronx-cc: error: {says}" in done.stderr


@pytest.mark.parametrize("missing", ["--framework", "--target", "--output"])
def test_what_must_be_given(program: Path, missing: str) -> None:
    at = OPTIONS.index(missing)
    done = run(program, "compile", "graph.mlir", *OPTIONS[:at], *OPTIONS[at + 2 :])
    assert (done.returncode, f"required: {missing}" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("bad.mlir", broken().data, "bad.mlir can't be parsed"),
        ("bad.mlir", b"module {}", "there is no function main"),
        ("bad.mlir", scale(3).data.replace(b"multiply", b"multiplex"), "'stablehlo.multiplex' is unknown"),
        ("bad.hlo", b"", "lacks the fields"),
        ("bad.hlo", HLO[:-1], "ends within a number"),
        ("bad.hlo", HLO[:3], "ends within a field"),
        ("bad.hlo", scale(3).data, "wire type"),
        ("bad.hlo", HLO + b"\x2a\x00", "field 5 of the HloModuleProto has wire type 2"),
    ],
)
def test_a_malformed_module_fails(program: Path, name: str, data: bytes, says: str) -> None:
    (program.parents[1] / name).write_bytes(data)
    done = run(program, "compile", name, *OPTIONS)
    assert (done.returncode, says in done.stdout) == (70, True), done.stdout + done.stderr
    assert not (program.parents[1] / "g.neff").exists()


def test_hlo_by_its_structure(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program.parents[1] / "jaxlib.py").write_text("raise ImportError('left out: the proto is too small for it')")
    monkeypatch.setenv("PYTHONPATH", str(program.parents[1]))
    assert run(program, "compile", "graph.hlo", *OPTIONS).returncode == 0


def test_one_behaviour_per_compile_and_children_left_behind(program: Path) -> None:
    script = program.parents[1] / "script"
    script.write_text("exits 3\nkilled\nworks\n")
    codes = [run_and_kill_children(program, script) for _ in range(4)]
    assert codes == [(3, 2), (-signal.SIGKILL, 2), (0, 0), (0, 0)]


def run_and_kill_children(program: Path, script: Path) -> tuple[int, int]:
    """The exit code of a compile, and the number of children that it left."""
    environment = {**os.environ, "NEURONX_CC_DOUBLE": str(script)}
    done = subprocess.run(
        [program, "compile", "graph.mlir", *OPTIONS], cwd=program.parents[1], env=environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60,
    )  # fmt: skip
    latest = max(calls_folder(script).iterdir(), key=lambda path: int(path.stem))
    left = [psutil.Process(pid) for pid in json.loads(latest.read_text())["pids"][1:] if psutil.pid_exists(pid)]
    alive = [process for process in left if process.status() != psutil.STATUS_ZOMBIE]
    for process in alive:
        process.kill()
    return done.returncode, len(alive)


def test_hlo_by_jaxlib(program: Path) -> None:
    """What has the fields of an HLO module need not be one."""
    jax = pytest.importorskip("jax")
    computation = jax.jit(lambda x: x * 3).lower(jax.ShapeDtypeStruct((4,), "float32")).compiler_ir("hlo")
    (program.parents[1] / "real.hlo").write_bytes(computation.as_serialized_hlo_module_proto())
    done = run(program, "compile", "real.hlo", *OPTIONS)
    assert done.returncode == 0, done.stdout + done.stderr
    hollow = run(program, "compile", "graph.hlo", *OPTIONS)
    assert hollow.returncode == 70
    assert "graph.hlo can't be parsed" in hollow.stdout
