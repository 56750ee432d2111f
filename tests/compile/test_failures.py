"""Every way in which neuronx-cc can fail: what the user reads, what is kept, and that nothing is left running."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import psutil
import pytest

from tests.compile.modules import broken, scale
from tests.neuronx_cc_double import install
from tests.neuronx_cc_double.behaviours import calls_folder
from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.cache.source import Source
from vllm_neuron.cache.tiers import TieredCache
from vllm_neuron.compile.pipeline import Pipeline
from vllm_neuron.errors import CompileError
from vllm_neuron.lowering.module import LoweredModule
from vllm_neuron.targets import resolve_target

INSIDE = (
    "This is an error inside the compiler. What reproduces it is beside the log: the module, and the command line in "
    "command.txt. Try another --optimization-level, and report it to AWS"
)
REPORT = (
    "If it happens again, report it to the compiler's makers. What reproduces it is beside the log: the module, and "
    "the command line in command.txt"
)
DEVICE_MEMORY = (
    "The graph does not fit the device's memory: lower --max-num-seqs, --max-num-batched-tokens or --max-model-len, "
    "or make the KV cache smaller with --kv-cache-memory-bytes"
)
F137 = (
    "[F137] neuronx-cc was forcibly killed - This most commonly occurs due to insufficient system memory. Using a "
    "smaller data type, dimensions, batch size, or a larger instance type may help"
)
TWICE = "compiled twice, the second time alone, with N GiB of memory free: "
ERROR = "First error: 2026-01-01T00:00:00Z ERROR 1 [Tensorizer]: "

# What is played, and the first line that the user reads, up to the place of the log.
FAILURES = {
    "memory": f"{TWICE}neuronx-cc failed with exit code 70. First error: {F137}. The machine ran out of memory: one "
    "compile takes 10 to 40 GB. Lower NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS, or compile on a larger machine",
    "killed": f"{TWICE}neuronx-cc was ended by signal 9 (Killed). Most likely the machine ran out of memory: lower "
    "NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS (now 8), or give it more memory",
    "aborts": "neuronx-cc failed with exit code 70. First error: [F134] neuronx-cc terminated abnormally - Please open "
    "a support ticket. The compiler aborted. Try another --optimization-level, and report the module: it is beside "
    "the log",
    "code NCC_EOOM001 HBM usage is 30.5 GB of 24 GB": f"neuronx-cc failed with exit code 70. {ERROR}[NCC_EOOM001] HBM "
    f"usage is 30.5 GB of 24 GB. {DEVICE_MEMORY}. It needs 30.5 GB",
    "code NCC_EOOM002 too much": f"neuronx-cc failed with exit code 70. {ERROR}[NCC_EOOM002] too much. {DEVICE_MEMORY}",
    "code NCC_EVRF009 too much": f"neuronx-cc failed with exit code 70. {ERROR}[NCC_EVRF009] too much. {DEVICE_MEMORY}",
    "code NCC_EVRF059 a.py": f"neuronx-cc failed with exit code 70. {ERROR}[NCC_EVRF059] a.py. A kernel's file is "
    "missing from the compiler's installation: install neuronx-cc again",
    "code NCC_EARG001 lnc": f"neuronx-cc failed with exit code 70. {ERROR}[NCC_EARG001] lnc. The target does not have "
    "that logical-core setting: unset NEURON_LOGICAL_NC_CONFIG",
    "code NCC_EXYZ123 news": f"neuronx-cc failed with exit code 70. {ERROR}[NCC_EXYZ123] news. {INSIDE}",
    "internal": "neuronx-cc failed with exit code 70. First error: [INTERNAL_ERROR] [NCC_INAS001] An Internal Compiler "
    f"Error has occurred. {INSIDE}",
    "floods": "neuronx-cc failed with exit code 70. First error: [INTERNAL_ERROR] [NCC_INAS001] after many words. "
    f"{INSIDE}",
    "exits 70": f"neuronx-cc failed with exit code 70. {INSIDE}",
    "exits 2": "neuronx-cc failed with exit code 2. The installed neuronx-cc does not take these arguments: correct "
    "compiler_args, or install another release",
    "exits 3": f"neuronx-cc failed with exit code 3. {REPORT}",
    "exits 139": f"neuronx-cc failed with exit code 139, as after signal 11 (Segmentation fault). {REPORT}",
    "exits 255": f"neuronx-cc failed with exit code 255. {REPORT}",
    "crashes": f"neuronx-cc failed with exit code 1. {REPORT}",
    "targets trn1,inf2": "neuronx-cc failed with exit code 2. First error: neuronx-cc: error: argument --target: "
    "invalid choice: trn2 (choose from trn1, inf2). The installed neuronx-cc does not know this target: install a "
    "newer one",
    "truncates": "neuronx-cc ended without an error, but graph_KEY.neff is not a whole NEFF: its header tells of 1024 "
    f"+ 10240 bytes, and it has 5632. {REPORT}",
    "no artifact": f"neuronx-cc ended without an error and without an artifact. {REPORT}",
    "hangs": "neuronx-cc was stopped after 3 s, its time limit. If it was making progress, raise "
    "VLLM_NEURON_COMPILER_TIMEOUT",
}  # fmt: skip


class Bench:
    """A pipeline for trn2 over a cache of its own, with the double as its compiler."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.script = folder, folder / "script"
        monkeypatch.setenv("PATH", str(install(folder / "bin").parent))
        monkeypatch.setenv("NEURONX_CC_DOUBLE", str(self.script))
        self.root = folder / "cache"
        target = resolve_target("trn2")
        self.pipeline = Pipeline(TieredCache(LocalTier(self.root)), target, [target])

    def play(self, script: str) -> None:
        self.script.write_text(script)

    def calls(self) -> list[dict[str, list[int]]]:
        folder = calls_folder(self.script)
        return [json.loads(path.read_text()) for path in folder.iterdir()] if folder.exists() else []

    def error(self, module: LoweredModule) -> str:
        with pytest.raises(CompileError) as caught:
            self.pipeline.resolve(module, {"graph": "decode_b1"})
        return str(caught.value)

    def record(self, module: LoweredModule) -> Path:
        return self.root / ".failures" / self.pipeline.key(module).digest


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def alive(calls: list[dict[str, list[int]]]) -> list[int]:
    return [pid for call in calls for pid in call["pids"] if psutil.pid_exists(pid)]


@pytest.mark.parametrize("behaviour", FAILURES)
def test_what_the_user_reads(bench: Bench, behaviour: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NEURON_COMPILER_TIMEOUT", "3" if behaviour == "hangs" else "120")
    bench.play(behaviour)
    message = bench.error(scale(3))
    key, record = bench.pipeline.key(scale(3)).digest, bench.record(scale(3))
    found = re.sub(r"with \d+ GiB", "with N GiB", message.splitlines()[0]).replace(f"_{key}", "_KEY")
    assert found == f"{FAILURES[behaviour]}. Log: {record / 'compiler.log'}"
    assert len(message) < 10_000
    calls = bench.calls()
    assert len(calls) == (2 if behaviour in ("memory", "killed") else 1)
    assert not alive(calls)
    # What reproduces it is there, and nothing else is.
    assert {path.name for path in record.iterdir()} == {"graph.mlir", "command.txt", "compiler.log", "diagnosis.txt"}
    assert (record / "graph.mlir").read_bytes() == scale(3).data
    assert (
        (record / "command.txt").read_text().startswith("neuronx-cc compile graph.mlir --framework XLA --target trn2")
    )
    assert (record / "diagnosis.txt").read_text() == f"decode_b1 for trn2 (key {key})\n\n{message}\n"
    assert bench.pipeline.cache.local.keys() == []
    assert not [path for path in bench.root.rglob("*") if ".staging/" in str(path)]


def test_a_malformed_module(bench: Bench) -> None:
    bench.play("works")
    assert bench.error(broken()).startswith(
        "neuronx-cc failed with exit code 70. First error: ERROR: graph.mlir can't be parsed: Unable to parse"
    )


def test_a_failure_is_tried_again_and_forgotten_on_success(bench: Bench) -> None:
    bench.play("internal\nworks")
    bench.error(scale(3))
    assert bench.record(scale(3)).exists()
    resolution = bench.pipeline.resolve(scale(3), {})
    assert resolution.source is Source.COMPILED
    assert not bench.record(scale(3)).exists()
    assert len(bench.calls()) == 2
    assert bench.pipeline.resolve(scale(3), {}).source is Source.LOCAL
    assert len(bench.calls()) == 2


def test_the_latest_failure_of_a_key_is_kept(bench: Bench) -> None:
    bench.play("crashes\nexits 3")
    bench.error(scale(3))
    bench.error(scale(3))
    assert "exit code 3" in (bench.record(scale(3)) / "diagnosis.txt").read_text()


@pytest.mark.parametrize("lack", ["memory", "killed"])
def test_one_that_lacks_memory_works_when_it_is_alone(bench: Bench, lack: str) -> None:
    bench.play(f"{lack}\nworks")
    assert bench.pipeline.resolve(scale(3), {}).source is Source.COMPILED
    assert len(bench.calls()) == 2
    assert not alive(bench.calls())
    assert not bench.record(scale(3)).exists()


def test_without_a_cache_to_write_to_the_files_are_kept_elsewhere(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench.root.mkdir()
    (bench.root / ".failures").write_text("a file where a folder has to be")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    bench.play("exits 3")
    message = bench.error(scale(3))
    (record,) = (tmp_path / "tmp").glob("vllm-neuron-failure-*")
    assert message.splitlines()[0] == f"neuronx-cc failed with exit code 3. {REPORT}. Log: {record / 'compiler.log'}"
    assert (record / "graph.mlir").read_bytes() == scale(3).data


def test_only_so_many_failures_are_kept(bench: Bench) -> None:
    bench.play("exits 3")
    bench.error(scale(3))
    for number in range(60):
        folder = bench.root / ".failures" / f"{number:032x}"
        folder.mkdir()
        os.utime(folder, (number, number))
    bench.error(scale(4))
    kept = sorted(path.name for path in (bench.root / ".failures").iterdir())
    assert len(kept) == 50
    assert {bench.pipeline.key(scale(3)).digest, bench.pipeline.key(scale(4)).digest, f"{59:032x}"} <= set(kept)


def test_the_key_has_the_version_and_the_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = resolve_target("trn2")

    def key(version: str, *arguments: str) -> str:
        monkeypatch.setenv("PATH", str(install(tmp_path / version, version).parent))
        cache = TieredCache(LocalTier(tmp_path / "cache"))
        return Pipeline(cache, target, [target], compiler_args=arguments).key(scale(3)).digest

    keys = [key("2.21.1.0"), key("2.22.1.0"), key("2.22.1.0", "--verbose=info"), key("2.22.1.0", "--verbose=debug")]
    assert len(set(keys)) == 4
    assert keys[0] == key("2.21.1.0")


def test_extra_arguments_reach_the_compiler(tmp_path: Path, bench: Bench) -> None:
    bench.play("works")
    bench.pipeline.compiler_args = ("--auto-cast-type=bf16", "--enable-saturate-infinity")
    entry = bench.pipeline.resolve(scale(3), {}).entry
    words = (entry.path / "command.txt").read_text().split()
    assert words[words.index("--enable-saturate-infinity") - 1] == "--auto-cast-type=bf16"
    bench.pipeline.compiler_args = ("--no-such=1",)
    assert "unrecognized arguments: --no-such=1. The installed neuronx-cc does not take these" in bench.error(scale(4))
