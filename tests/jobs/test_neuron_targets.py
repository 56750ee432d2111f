"""CPU compilation for trn2, with the test double in neuronx-cc's place."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import psutil
import pytest

from tests.neuronx_cc_double import VERSION, install
from tests.neuronx_cc_double.behaviours import calls_folder
from tests.support.forking import run
from tests.support.models import make_tiny

GRAPHS = ["prefill_s128", "decode_b1", "decode_b2"]
SIZES = ["--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "2", "--max-num-batched-tokens", "128",
         "--block-size", "16", "--gpu-memory-utilization", "0.8"]  # fmt: skip
VLLM_NEURON = str(Path(sys.executable).with_name("vllm-neuron"))
VLLM = str(Path(sys.executable).with_name("vllm"))
GiB = 1 << 30


class Site:
    """A model without weights, caches, and three runs of one job: with failures, without, and with nothing to do."""

    def __init__(self, folder: Path) -> None:
        self.model = make_tiny(folder / "model", weights=False)
        self.cache = folder / "cache" / "neuron" / "compile_cache"
        self.script = folder / "script"
        self.folder = folder
        bin_folder = install(folder / "bin").parent
        self.variables = {
            "PATH": bin_folder, "NEURONX_CC_DOUBLE": self.script, "VLLM_CACHE_ROOT": folder / "cache",
            "NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS": 1,
        }  # fmt: skip
        self.script.write_text("code NCC_EOOM002 HBM usage is 30.5 GB\ninternal\nworks\n")
        self.runs = [self.compile() for _ in range(3)]

    def compile(self) -> tuple[subprocess.CompletedProcess[str], dict[str, Any], int, set[str]]:
        """The job, its report, the number of compiles, and whose failures are kept after it."""
        before, report = len(self.calls()), self.folder / "report.json"
        command = [VLLM_NEURON, "compile", str(self.model), *SIZES, "--target", "trn2", "--report", str(report)]
        done = run([*command, "--remote", str(self.folder / "remote")], **self.variables)
        assert report.exists(), done.stderr[-3000:]
        failures = {path.name for path in (self.cache / ".failures").iterdir()}
        return done, json.loads(report.read_text()), len(self.calls()) - before, failures

    def calls(self) -> list[dict[str, Any]]:
        folder = calls_folder(self.script)
        return [json.loads(path.read_text()) for path in folder.iterdir()] if folder.exists() else []

    def entries(self) -> dict[str, Path]:
        return {line["graph"]: self.cache / line["key"] for line in self.runs[2][1]["graphs"]}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"))


def test_one_graph_that_fails_does_not_stop_the_others(site: Site) -> None:
    done, report, compiles, failures = site.runs[0]
    assert (done.returncode, compiles) == (1, 3)
    assert [line["source"] for line in report["graphs"]] == ["failed", "failed", "compiled"]
    keys = [line["key"] for line in report["graphs"]]
    assert failures == set(keys[:2])
    text = " ".join(done.stdout.split())
    for graph, says in zip(
        GRAPHS, ("[NCC_EOOM002] HBM usage is 30.5 GB. The graph does not", "[NCC_INAS001]"), strict=False
    ):
        message = text.split(f"{graph}: neuronx-cc failed with exit code 70. First error: ")[1]
        assert says in message.split(" Log: ")[0]
    assert not [pid for call in site.calls() for pid in call["pids"] if psutil.pid_exists(pid)]


def test_the_next_run_compiles_what_had_failed_and_the_one_after_nothing(site: Site) -> None:
    found = [
        (done.returncode, compiles, [line["source"] for line in report["graphs"]], failures)
        for done, report, compiles, failures in site.runs[1:]
    ]
    assert found == [
        (0, 2, ["compiled", "compiled", "local"], set()),
        (0, 0, ["local", "local", "local"], set()),
    ]


def test_every_bucket_is_an_entry_on_both_tiers(site: Site) -> None:
    assert list(site.entries()) == GRAPHS
    for graph, local in site.entries().items():
        for entry in (local, site.folder / "remote" / local.name):
            neff = (entry / f"graph_{local.name}.neff").read_bytes()
            header_size, data_size = struct.unpack_from("<QQ", neff, 8)
            assert (header_size, header_size + data_size) == (1024, len(neff))
            assert (entry / "command.txt").read_text() == (
                "neuronx-cc compile graph.mlir --framework XLA --target trn2 --model-type transformer "
                f"--auto-cast=none --lnc 2 -O2 --output graph_{local.name}.neff --logfile log-neuron-cc.txt\n"
            )
            metadata = json.loads((entry / "metadata.json").read_text())
            parts = metadata["key_parts"]
            assert (parts["compiler"], parts["compiler_version"], parts["target"]) == ("neuronx-cc", VERSION, "trn2")
            assert metadata["provenance"]["graph"] == graph
            assert (entry / ".compilation_complete").exists()


def test_the_blocks_follow_from_the_target_and_not_from_this_machine(site: Site) -> None:
    """24 GiB in a logical core, of which 0.8 are used and 0.3 of that for the caches: for a model this small.

    A block of 16 tokens takes, in each of two layers, keys and values of 2 heads of 32 numbers of 4 bytes.
    """
    per_block = 2 * 16 * 2 * (2 * 32 * 4)
    blocks = int(24 * GiB * 0.8 * 0.3) // per_block
    for entry in site.entries().values():
        inputs = json.loads((entry / "metadata.json").read_text())["abi"]["inputs"]
        assert inputs.count(["float32", [blocks * 2 * 16, 32]]) == 4


def test_who_interrupts_a_job_does_not_wait_for_its_compiler(site: Site, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("slow 3600\n" * 3)
    variables = site.variables | {"NEURONX_CC_DOUBLE": script, "VLLM_CACHE_ROOT": tmp_path / "cache"}
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    command = [VLLM_NEURON, "compile", str(site.model), *SIZES, "--target", "trn2"]
    with subprocess.Popen(command, env=environment, text=True, stdout=PIPE, stderr=STDOUT) as job:
        while not (processes := compiling(script)):
            assert job.poll() is None, job.communicate()[0][-3000:]
            time.sleep(0.1)
        job.send_signal(signal.SIGINT)
        output = job.communicate(timeout=300)[0]
    assert job.returncode == 130
    assert "Traceback" not in output
    assert psutil.wait_procs(processes, timeout=60)[1] == []


def compiling(script: Path) -> list[psutil.Process]:
    """The processes whose environment names ``script``, and that are the compiler's."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with suppress(psutil.Error):
            ours = process.environ().get("NEURONX_CC_DOUBLE") == str(script)
            if ours and "--framework" in (process.info["cmdline"] or []):
                found.append(process)
    return found


@pytest.mark.parametrize("command", ["compile", "plan", pytest.param("serve", marks=pytest.mark.slow)])
def test_without_the_compiler(site: Site, tmp_path: Path, command: str) -> None:
    """Told before anything is captured, and nothing is left behind."""
    variables: dict[str, object] = {"PATH": "", "VLLM_CACHE_ROOT": tmp_path / "cache"}
    if command == "serve":
        variables |= {"VLLM_NEURON_CPU_COMPILE": 1, "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}
        done = run([VLLM, "serve", str(site.model), *SIZES], **variables)
    else:
        done = run([VLLM_NEURON, command, str(site.model), *SIZES, "--target", "cpu", "--target", "trn2"], **variables)
    errors = [line for line in done.stderr.splitlines() if ": error: " in line]
    assert done.returncode == 1, done.stderr[-3000:]
    assert len(errors) == 1
    assert "neuronx-cc, the compiler for trn1, trn1n, inf2, trn2, trn3, is neither on PATH" in errors[0]
    assert "Targets that need no neuronx-cc: cpu, cpu:host, cpu:x86-64-v2," in errors[0]
    assert "Traceback" not in done.stderr
    assert "Captured" not in done.stderr + done.stdout
    assert not (tmp_path / "cache" / "neuron").exists()


@pytest.mark.slow
def test_arguments_of_the_users_are_in_the_command_and_in_the_key(site: Site, tmp_path: Path) -> None:
    config = {"neuron_config": {"compiler_args": "--verbose info --auto-cast-type=bf16"}}
    report = tmp_path / "report.json"
    command = [VLLM_NEURON, "compile", str(site.model), *SIZES, "--target", "trn2", "--report", str(report)]
    done = run([*command, "--additional-config", json.dumps(config)], **site.variables)
    assert done.returncode == 0, done.stderr[-3000:]
    keys = [line["key"] for line in json.loads(report.read_text())["graphs"]]
    assert not set(keys) & {entry.name for entry in site.entries().values()}
    text = (site.cache / keys[0] / "command.txt").read_text()
    assert " -O2 --auto-cast-type=bf16 --verbose=info --output " in text


@pytest.mark.slow
def test_the_xla_route_gives_the_compiler_hlo(site: Site, tmp_path: Path) -> None:
    """Which the double parses with JAX. The level is that route's own, and the second run calls no compiler."""
    pytest.importorskip("jax")
    report = tmp_path / "report.json"
    command = [VLLM_NEURON, "compile", str(site.model), *SIZES, "--target", "trn2", "--report", str(report)]
    variables = {**site.variables, "VLLM_NEURON_BACKEND": "vllm_neuron", "VLLM_CACHE_ROOT": tmp_path}
    for compiles in (len(GRAPHS), 0):
        before = len(site.calls())
        done = run(command, **variables)
        assert (done.returncode, len(site.calls()) - before) == (0, compiles), done.stderr[-3000:]
    for key in (line["key"] for line in json.loads(report.read_text())["graphs"]):
        entry = tmp_path / "neuron" / "compile_cache" / key
        assert (entry / "graph.hlo").exists()
        assert (entry / "command.txt").read_text() == (
            "neuronx-cc compile graph.hlo --framework XLA --target trn2 --lnc 2 -O1 "
            f"--output graph_{key}.neff --logfile log-neuron-cc.txt\n"
        )
