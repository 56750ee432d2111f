"""The driver of neuronx-cc, with a program of that name where the real one can't be."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from vllm_neuron.abi import Abi
from vllm_neuron.compilers.base import compiler_for, run_compiler
from vllm_neuron.compilers.neuronx_cc import NeuronxCompiler
from vllm_neuron.errors import CompileError
from vllm_neuron.lowering.module import LoweredModule
from vllm_neuron.targets import resolve_target

STABLEHLO = LoweredModule("stablehlo", b"", Abi((), ()))
HLO = LoweredModule("hlo", b"", Abi((), ()))


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Puts a ``neuronx-cc`` first on PATH."""
    program = folder / "bin" / "neuronx-cc"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nimport sys\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))


def neff(data: bytes = b"tar") -> bytes:
    return struct.pack("<QQQ", 1, 1024, len(data)).ljust(1024, b"\0") + data


def test_stablehlo_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "")
    compiler = compiler_for(resolve_target("trn2"))
    flags = compiler.flags(resolve_target("trn2"), 2, STABLEHLO)
    command = compiler.command(Path("graph.mlir"), Path("graph_k.neff"), flags)
    assert " ".join(command[1:]) == (
        "compile graph.mlir --framework XLA --target trn2 --model-type transformer --auto-cast=none --lnc 2 -O2 "
        "--output graph_k.neff --logfile log-neuron-cc.txt"
    )


@pytest.mark.parametrize(("level", "flag"), [(0, "-O1"), (1, "-O1"), (2, "-O2"), (3, "-O3")])
def test_hlo_flags(level: int, flag: str) -> None:
    assert NeuronxCompiler().flags(resolve_target("trn1"), level, HLO) == ("--target", "trn1", flag)


def test_logical_core_setting_is_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    flags = NeuronxCompiler().flags(resolve_target("trn3"), 2, STABLEHLO)
    assert flags[flags.index("--lnc") + 1] == "1"


def test_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    for use in (NeuronxCompiler().version, lambda: NeuronxCompiler().command(Path("a"), Path("b"), ())):
        with pytest.raises(CompileError, match="neither on PATH nor beside the Python interpreter"):
            use()


def test_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "print('NeuronX Compiler version 2.21.33363.0+82129205\\n\\nPython version 3.11.9')")
    assert NeuronxCompiler().version() == "2.21.33363.0+82129205"


def test_compiles_and_keeps_both_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "a = sys.argv\nopen(a[a.index('--output') + 1], 'wb').write(%r)\nprint('said')\n" % neff()  # noqa: UP031
    install(tmp_path, monkeypatch, body + "open(a[a.index('--logfile') + 1], 'w').write('logged')")
    (tmp_path / "graph.mlir").touch()
    compiler = NeuronxCompiler()
    flags = compiler.flags(resolve_target("trn2"), 1, STABLEHLO)
    report = run_compiler(compiler, tmp_path, "graph.mlir", flags, "graph_k.neff")
    assert report.artifact.read_bytes() == neff()
    assert report.log.read_text() == "said\nlogged"


@pytest.mark.parametrize(
    ("code", "line", "advice"),
    [
        (70, "[F137] neuronx-cc was forcibly killed - insufficient system memory", "10 to 40 GB"),
        (70, "2026 ERROR 1 [NCC_EOOM002] HBM usage is 30 GB", "does not fit the device's memory"),
        (
            2,
            "neuronx-cc: error: argument --target: invalid choice: gen2 (choose trn1)",
            "does not know this target",
        ),
        (70, "[INTERNAL_ERROR] [NCC_INAS001] something", "exit code 70"),
    ],
)
def test_failures_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, line: str, advice: str
) -> None:
    install(tmp_path, monkeypatch, f"print('working'); print({line!r}); print('bye'); sys.exit({code})")
    (tmp_path / "graph.mlir").touch()
    with pytest.raises(CompileError) as caught:
        run_compiler(NeuronxCompiler(), tmp_path, "graph.mlir", (), "graph_k.neff")
    assert f"First error: {line}" in str(caught.value)
    assert advice in str(caught.value)


def test_verify(tmp_path: Path) -> None:
    artifact = tmp_path / "graph.neff"
    artifact.write_bytes(neff())
    NeuronxCompiler().verify(artifact)
    for damaged in (b"", neff()[:1000], neff()[:-1], neff() + b"x", b"\1" * 2000):
        artifact.write_bytes(damaged)
        with pytest.raises(CompileError, match="not a whole NEFF"):
            NeuronxCompiler().verify(artifact)
