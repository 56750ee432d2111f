"""CPU compilation from end to end: no weights, nothing executed, and production that starts with hits only."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.forking import run
from tests.support.models import make_tiny
from vllm_neuron.cache.entry import EntryState, examine
from vllm_neuron.cache.local.gc import collect
from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.cache.remote.urls import open_remote
from vllm_neuron.cache.retention import Policy
from vllm_neuron.errors import CacheError

REPOSITORY = Path(__file__).resolve().parents[2]
SIZES = ["--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "2", "--max-num-batched-tokens", "128"]
GRAPHS = ["prefill_s128", "decode_b1", "decode_b2"]
COMMAND = [str(Path(sys.executable).with_name("vllm-neuron"))]
SERVE = [str(Path(sys.executable).with_name("vllm")), "serve"]
PROMPTS = [[5, 17, 300, 41], [7, 8, 9]]


class Site:
    """A folder with a model without weights, a remote tier that was filled from it, and the report of that job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.remote = folder / "remote"
        self.shapes = make_tiny(folder / "build" / "model", weights=False)
        self.home = folder / "home1"
        self.home.mkdir()
        report = folder / "report.json"
        self.job = run(
            [*COMMAND, "compile", str(self.shapes), *SIZES, "--remote", str(self.remote), "--report", str(report)],
            VLLM_CACHE_ROOT=folder / "build-cache", HOME=self.home, PYTHONHASHSEED=0,
        )  # fmt: skip
        self.report: dict[str, Any] = json.loads(report.read_text())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"))


def test_the_job_compiles_and_publishes_every_graph(site: Site) -> None:
    assert site.job.returncode == 0, site.job.stderr[-3000:]
    assert not list(site.shapes.glob("*.safetensors"))
    assert [line["graph"] for line in site.report["graphs"]] == GRAPHS
    assert {(line["source"], line["published"], line["target"]) for line in site.report["graphs"]} == {
        ("compiled", True, "cpu:x86-64-v3")
    }
    published = {path.name for path in site.remote.iterdir() if (path / ".compilation_complete").exists()}
    assert published == {line["key"] for line in site.report["graphs"]}
    for line in site.report["graphs"]:
        assert line["key"] in site.job.stdout
    assert "3 graphs in" in site.job.stdout
    assert "3 compiled; 3 newly published" in site.job.stdout


def test_a_second_job_compiles_nothing(site: Site) -> None:
    """By vLLM's own command, which ends instead of serving."""
    again = run(
        [*SERVE, str(site.shapes), *SIZES],
        VLLM_NEURON_CPU_COMPILE=1,
        NEURON_PLATFORM_TARGET_OVERRIDE="cpu",
        NEURON_LIBTORCH_REMOTE_CACHE=site.remote,
        VLLM_CACHE_ROOT=site.folder / "second-cache",
    )
    assert again.returncode == 0, again.stderr[-3000:]
    assert "3 already in the remote tier" in again.stdout
    assert "compiled" not in again.stdout.split("Graphs of")[1]


def test_a_job_that_is_run_again_captures_only_what_it_must(site: Site, tmp_path: Path) -> None:
    """What a tier has is not captured; what is damaged there is captured, compiled and replaced."""
    remote, (whole, *_, damaged) = tmp_path / "remote", [line["key"] for line in site.report["graphs"]]
    shutil.copytree(site.remote, remote)
    artifact = remote / damaged / "graph.vmfb"
    artifact.write_bytes(artifact.read_bytes()[:-1])
    command = [*COMMAND, "compile", str(site.shapes), *SIZES, "--remote", str(remote)]
    again = run(command, VLLM_CACHE_ROOT=tmp_path / "first")
    log = again.stdout + again.stderr
    assert again.returncode == 0, log[-3000:]
    assert (
        "2 of 3 graphs need no capture (0 from the local tier, 2 from the remote tier); "
        "decode_b2: its artifact is in no tier"
    ) in log
    assert log.count("Captured ") == 1
    assert "1 compiled, 2 already in the remote tier; 1 newly published" in again.stdout
    assert examine(remote / damaged, damaged).state is examine(remote / whole, whole).state is EntryState.COMPLETE
    everything = run([*command, "--json"], VLLM_CACHE_ROOT=tmp_path / "second", TORCH_CACHING_PRECOMPILE=0)
    assert everything.returncode == 0, everything.stderr[-3000:]
    assert everything.stderr.count("Captured ") == len(GRAPHS)
    assert [line["source"] for line in json.loads(everything.stdout)["graphs"]] == ["remote"] * 3


GENERATE = f"""
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(model=sys.argv[1], dtype="float32", max_model_len=128, max_num_seqs=2, max_num_batched_tokens=128)
prompts = [{{"prompt_token_ids": ids}} for ids in {PROMPTS}]
outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
print("TOKENS", json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""


def test_production_with_weights_is_served_from_the_remote_tier_alone(site: Site) -> None:
    """Another folder, home, hash seed and host cache, and strict: any key that differed would be an error."""
    from tests.support.reference import greedy

    production = make_tiny(site.folder / "production" / "elsewhere")
    home = site.folder / "home2"
    home.mkdir()
    done = run(
        [sys.executable, "-c", GENERATE, str(production)],
        VLLM_CACHE_ROOT=site.folder / "production-cache", NEURON_LIBTORCH_REMOTE_CACHE=site.remote, HOME=home,
        VLLM_NEURON_DISABLE_WARMUP_COMPILE=1, PYTHONHASHSEED=1,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "(0 from the local tier, 3 from the remote tier, 0 compiled)" in done.stdout + done.stderr
    tokens = json.loads(done.stdout.split("TOKENS ")[1].splitlines()[0])
    assert tokens == [greedy(production, prompt, 12) for prompt in PROMPTS]


def test_strict_with_empty_tiers_fails_and_says_what_fills_them(site: Site, tmp_path: Path) -> None:
    production = make_tiny(tmp_path / "model")
    done = run(
        [*SERVE, str(production), *SIZES, "--port", "0"],
        VLLM_CACHE_ROOT=tmp_path / "root", NEURON_LIBTORCH_REMOTE_CACHE=tmp_path / "remote",
        VLLM_NEURON_DISABLE_WARMUP_COMPILE=1, STRICT_TEST=tmp_path,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode not in (0, None)
    assert f"Strict mode: 3 of 3 graphs of {production} are in no tier" in output
    for line in site.report["graphs"]:
        assert f"{line['graph']}  key {line['key']}" in output
    assert f"{tmp_path / 'root' / 'neuron' / 'compile_cache'} (local)" in output
    assert f"{tmp_path / 'remote'} (remote, no such folder)" in output
    # It works where it is read: in a shell that is set for strict starts.
    command = f"env -u VLLM_NEURON_DISABLE_WARMUP_COMPILE vllm-neuron compile {production} --dtype float32"
    assert f"To fill the cache, run: {command} --max-model-len 128" in output
    # Said once, and at the end.
    assert output.count("Strict mode: 3 of 3") == 1
    assert "Traceback" not in output
    assert "leaked" not in output
    assert done.stderr.rstrip().endswith("vllm-neuron: error: the engine did not start; its own error is above")
    assert not list(tmp_path.rglob("*.vmfb"))
    mark = f"STRICT_TEST={tmp_path}".encode()
    assert not [process for process in psutil.process_iter() if mark in _environment(process)]


def _environment(process: psutil.Process) -> bytes:
    try:
        return Path("/proc", str(process.pid), "environ").read_bytes()
    except OSError:
        return b""


def test_a_verifying_job_reports_misses_and_compiles_nothing(site: Site, tmp_path: Path) -> None:
    plan = run(
        [*COMMAND, "plan", str(site.shapes), *SIZES, "--check", "--json", "--remote", str(tmp_path / "remote")],
        VLLM_CACHE_ROOT=tmp_path / "root",
    )
    assert plan.returncode == 1
    graphs = json.loads(plan.stdout)["graphs"]
    assert [(line["graph"], line["source"]) for line in graphs] == [(graph, "missing") for graph in GRAPHS]
    assert [line["key"] for line in graphs] == [line["key"] for line in site.report["graphs"]]
    assert not list(tmp_path.rglob("*.vmfb"))


def test_a_plan_is_not_content_with_what_only_this_machine_has(site: Site, tmp_path: Path) -> None:
    plan = run(
        [*COMMAND, "plan", str(site.shapes), *SIZES, "--check", "--remote", str(tmp_path / "remote")],
        VLLM_CACHE_ROOT=site.folder / "build-cache",
    )
    assert plan.returncode == 1
    assert "3 already in the local tier; 3 in no remote tier." in plan.stdout


def test_a_job_whose_graphs_are_gone_when_it_ends_has_failed(site: Site, tmp_path: Path) -> None:
    """Without a remote tier, and with a local one that can't be written: not even root may make folders in /proc."""
    job = run([*COMMAND, "compile", str(site.shapes), *SIZES, "--target", "cpu"], VLLM_CACHE_ROOT="/proc/cache")
    assert job.returncode == 1, job.stdout[-3000:] + job.stderr[-3000:]
    assert "3 failed" in job.stdout
    assert "can't be kept in /proc/cache" in job.stdout


def test_a_job_that_can_publish_nowhere_is_refused_before_anything_is_captured(site: Site, tmp_path: Path) -> None:
    job = run(
        [*COMMAND, "compile", str(site.shapes), *SIZES, "--remote", f"ro+file://{site.remote}"],
        VLLM_CACHE_ROOT=tmp_path / "root",
    )
    assert job.returncode == 2
    (line,) = (job.stdout + job.stderr).splitlines()  # Not a word of vLLM, which is not even imported.
    assert f"every remote cache is read-only ({site.remote}). Name one that can be written to" in line


@pytest.mark.slow
def test_what_a_job_is_about_to_publish_is_not_collected(site: Site, tmp_path: Path) -> None:
    """All that is in the local tier may go, again and again, while the job runs."""
    local, done = LocalTier(tmp_path / "root" / "neuron" / "compile_cache"), threading.Event()

    def collect_all() -> list[str]:
        kept = []
        while not done.is_set():
            with suppress(CacheError):  # While the job has not said yet what it uses.
                kept += [one.kept for one in collect(local, Policy(keep=()))]
        return kept

    with ThreadPoolExecutor(1) as pool:
        collector = pool.submit(collect_all)
        job = run(
            [*COMMAND, "compile", str(site.shapes), *SIZES, "--remote", str(tmp_path / "remote")],
            VLLM_CACHE_ROOT=tmp_path / "root",
        )
        done.set()
        assert "in use" in collector.result()
    assert job.returncode == 0, job.stdout[-3000:] + job.stderr[-3000:]
    assert "3 compiled; 3 newly published" in job.stdout
    assert [one.kept for one in collect(local, Policy(keep=()))] in ([], [""] * 3)
    assert len(open_remote(str(tmp_path / "remote")).keys()) == 3


COMPILE_ONLY = """
import sys
from vllm import LLM
llm = LLM(model=sys.argv[1], dtype="float32", max_model_len=128, max_num_seqs=2, max_num_batched_tokens=128)
print("RETURNED")
for call in (llm.generate, lambda text: llm.chat([{"role": "user", "content": text}])):
    try:
        call("hello")
    except RuntimeError as error:
        print("REFUSED", error)
"""


def test_llm_in_compile_only_mode_compiles_and_then_refuses_to_generate(site: Site) -> None:
    shapes = site.folder / "shapes-of-llm"
    shutil.copytree(site.shapes, shapes)
    done = run(
        [sys.executable, "-c", COMPILE_ONLY, str(shapes)],
        VLLM_CACHE_ROOT=site.folder / "llm-cache", NEURON_LIBTORCH_REMOTE_CACHE=site.remote,
        VLLM_NEURON_CPU_COMPILE=1, NEURON_PLATFORM_TARGET_OVERRIDE="cpu",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "RETURNED" in done.stdout
    assert done.stdout.count("REFUSED VLLM_NEURON_CPU_COMPILE=1 only compiles") == 2
