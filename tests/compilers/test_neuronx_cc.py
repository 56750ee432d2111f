"""The driver of neuronx-cc: how it is found, asked and called. What its failures say is tested with the pipeline."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import psutil
import pytest

from vllm_neuron.abi import Abi
from vllm_neuron.compilers import neuronx_cc
from vllm_neuron.compilers.base import check_compiler, compiler_for, run_compiler
from vllm_neuron.compilers.neuronx_cc import NeuronxCompiler
from vllm_neuron.errors import CompileError
from vllm_neuron.lowering.module import LoweredModule
from vllm_neuron.targets import resolve_target, target_names

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


@pytest.mark.parametrize("path", ["", "/nowhere"])
def test_missing(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setenv("PATH", path)
    uses = (
        NeuronxCompiler().version,
        lambda: NeuronxCompiler().command(Path("a"), Path("b"), ()),
        lambda: check_compiler(resolve_target("inf2")),
    )
    for use in uses:
        with pytest.raises(CompileError) as caught:
            use()
        assert str(caught.value) == (
            "neuronx-cc, the compiler for trn1, trn1n, inf2, trn2, trn3, is neither on PATH nor beside the Python "
            f"interpreter ({Path(sys.executable).parent}). Install it as AWS's Neuron documentation says. Targets that "
            f"need no neuronx-cc: {', '.join(name for name in target_names() if name[:3] not in ('trn', 'inf'))}"
        )


def test_found_by_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "bin")
    assert NeuronxCompiler().command(Path("a"), Path("b"), ())[0] == str(tmp_path / "bin" / "neuronx-cc")


def test_a_file_that_is_no_program_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "")
    (tmp_path / "bin" / "neuronx-cc").chmod(0o644)
    with pytest.raises(CompileError, match="neither on PATH"):
        NeuronxCompiler().version()


def test_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "print('NeuronX Compiler version 2.21.33363.0+82129205\\n\\nPython version 3.11.9')")
    assert NeuronxCompiler().version() == "2.21.33363.0+82129205"


def test_the_version_is_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = f"open({str(tmp_path / 'asked')!r}, 'a').write('once ')"
    install(tmp_path, monkeypatch, f"{asked}; print('NeuronX Compiler version 2.9.1')")
    assert [NeuronxCompiler().version() for _ in range(3)] == ["2.9.1"] * 3
    assert (tmp_path / "asked").read_text() == "once "


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("sys.exit('no licence')", "it failed with exit code 1, and said: no licence"),
        ("print('hello')", "it ended, and said: hello"),
        ("print('NeuronX Compiler version 2.9.1'); sys.exit(3)", "it failed with exit code 3, and said: NeuronX"),
        ("import time; print('wait', flush=True); time.sleep(600)", "it was stopped after 1 s, and said: wait"),
    ],
)
def test_a_version_that_can_not_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, says: str) -> None:
    monkeypatch.setattr(neuronx_cc, "_VERSION_SECONDS", 120 if "sleep" not in body else 1)
    install(tmp_path, monkeypatch, body)
    with pytest.raises(CompileError) as caught:
        NeuronxCompiler().version()
    program = tmp_path / "bin" / "neuronx-cc"
    assert str(caught.value).startswith(f"{program} --version does not give a version: {says}")


def test_what_asking_for_the_version_starts_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = "p = subprocess.Popen(['/bin/sleep', '600']); open({!r}, 'w').write(str(p.pid))"
    body = f"import subprocess; {child.format(str(tmp_path / 'pid'))}; print('NeuronX Compiler version 2.9.1')"
    install(tmp_path, monkeypatch, body)
    assert NeuronxCompiler().version() == "2.9.1"
    process = psutil.Process(pid) if psutil.pid_exists(pid := int((tmp_path / "pid").read_text())) else None
    if process is not None:
        process.wait(60)


def test_compiles_and_keeps_both_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "a = sys.argv\nopen(a[a.index('--output') + 1], 'wb').write(%r)\nprint('said')\n" % neff()  # noqa: UP031
    install(tmp_path, monkeypatch, body + "open(a[a.index('--logfile') + 1], 'w').write('logged')")
    (tmp_path / "graph.mlir").touch()
    compiler = NeuronxCompiler()
    flags = compiler.flags(resolve_target("trn2"), 1, STABLEHLO)
    report = run_compiler(compiler, tmp_path, "graph.mlir", flags, "graph_k.neff")
    assert report.artifact.read_bytes() == neff()
    assert report.log.read_text() == "said\nlogged"


def test_verify(tmp_path: Path) -> None:
    artifact = tmp_path / "graph.neff"
    artifact.write_bytes(neff())
    NeuronxCompiler().verify(artifact)
    for damaged in (b"", neff()[:1000], neff()[:-1], neff() + b"x", b"\1" * 2000):
        artifact.write_bytes(damaged)
        with pytest.raises(CompileError, match="not a whole NEFF"):
            NeuronxCompiler().verify(artifact)
