"""Starts that capture nothing: after a compile job elsewhere, without a compiler, and what happens where one can't."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import run_cases
from tests.support.forking import run
from tests.support.models import make_tiny
from tests.support.reference import greedy
from tests.support.without import COMPILERS, without_compilers
from vllm_neuron.cache.key import canonical_json, sha256

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = str(Path(sys.executable).with_name("vllm-neuron"))
SIZES = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 2, "max_num_batched_tokens": 128}
GRAPHS = ["prefill_s128", "decode_b1", "decode_b2"]
PROMPT = [5, 17, 300, 41]
# What only a process that captures has a use for.
OF_CAPTURE = (
    "vllm_neuron.graphs.model_capture",
    "vllm_neuron.compile.capture",
    "vllm_neuron.lowering.native.lower",
    "vllm_neuron.lowering.canonical",
)

SERVE = f"""
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(model=sys.argv[1], **{SIZES})
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
[output] = llm.generate([{{"prompt_token_ids": {PROMPT}}}], params, use_tqdm=False)
print("TOKENS", json.dumps(list(output.outputs[0].token_ids)))
print("MODULES", json.dumps(sorted(sys.modules)))
"""


class Site:
    """A remote tier, filled by a compile job from a model without weights, and the model elsewhere with weights."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.remote = folder, folder / "remote"
        shapes = make_tiny(folder / "build" / "model", weights=False)
        self.model = make_tiny(folder / "production" / "elsewhere")
        (folder / "home1").mkdir()
        options = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
        self.job = run(
            [PROGRAM, "compile", str(shapes), *options, "--target", "cpu", "--remote", str(self.remote)],
            VLLM_CACHE_ROOT=folder / "build-cache", HOME=folder / "home1",
        )  # fmt: skip
        assert self.job.returncode == 0, self.job.stderr[-3000:]

    def root(self, name: str) -> Path:
        """A machine's cache folder with a copy of every manifest."""
        folder = self.folder / name / "neuron" / "precompile_cache"
        shutil.copytree(self.remote / ".manifests", folder)
        return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"))


def manifest_of(folder: Path, graph: str) -> Path:
    [path] = [path for path in folder.glob("*.json") if json.loads(path.read_text()).get("graph") == graph]
    return path


def rewrite(path: Path, old: str, new: str) -> None:
    """Replace a text in a manifest, and make its checksum right again: what a defect of ours could write."""
    document = json.loads(path.read_text().replace(old, new))
    del document["checksum"]
    path.write_text(json.dumps(document | {"checksum": sha256(canonical_json(document).encode())}))


def test_production_captures_nothing_from_its_first_start_and_needs_no_compiler(site: Site) -> None:
    """Strict, from another folder and home, in an environment without torch-mlir, JAX and IREE's compiler."""
    (site.folder / "home2").mkdir()
    hidden = without_compilers(site.folder / "hidden")
    done = run(
        [sys.executable, "-c", SERVE, str(site.model)],
        VLLM_CACHE_ROOT=site.folder / "production-cache", NEURON_LIBTORCH_REMOTE_CACHE=site.remote,
        VLLM_NEURON_BACKEND="neuron_native", VLLM_NEURON_DISABLE_WARMUP_COMPILE=1,
        VLLM_ENABLE_V1_MULTIPROCESSING=0, HOME=site.folder / "home2",
        PYTHONPATH=os.pathsep.join([str(hidden), str(REPOSITORY)]),
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-3000:]
    assert "3 of 3 graphs need no capture (0 from the local tier, 3 from the remote tier)" in output
    assert "(0 from the local tier, 3 from the remote tier, 0 compiled)" in output
    lines = {line.split(" ", 1)[0]: line.split(" ", 1)[1] for line in done.stdout.splitlines() if " " in line}
    assert json.loads(lines["TOKENS"]) == greedy(site.model, PROMPT, 8)
    modules = json.loads(lines["MODULES"])
    assert "iree.runtime" in modules
    compilers = (*COMPILERS, *OF_CAPTURE)
    assert not [name for name in modules if name in compilers or name.startswith(tuple(f"{c}." for c in compilers))]
    facts = json.loads(output.split("Start facts: ")[1].splitlines()[0])
    assert facts["manifests"] == {"remote": 3}
    assert facts["graphs"] == {"local": 0, "remote": 3, "compiled": 0}
    assert (facts["captured"], facts["capture_seconds"], facts["compile_seconds"]) == (0, 0, 0)
    assert facts["buckets"] == GRAPHS
    assert set(facts["seconds"]) >= {"before_worker", "recall", "weights", "kv_caches", "load_graphs"}
    report = run([PROGRAM, "start-report", "--json"], VLLM_CACHE_ROOT=site.folder / "production-cache")
    assert json.loads(report.stdout) == facts
    table = run([PROGRAM, "start-report"], VLLM_CACHE_ROOT=site.folder / "production-cache")
    assert "3 graphs for cpu:x86-64-v3, route neuron_native" in table.stdout


def test_without_a_compiler_a_graph_that_has_no_manifest_is_one_clear_error(site: Site, tmp_path: Path) -> None:
    hidden = without_compilers(tmp_path / "hidden")
    done = run(
        [sys.executable, "-c", SERVE, str(site.model)],
        VLLM_CACHE_ROOT=tmp_path / "root", VLLM_NEURON_BACKEND="neuron_native", VLLM_ENABLE_V1_MULTIPROCESSING=0,
        PYTHONPATH=os.pathsep.join([str(hidden), str(REPOSITORY)]),
    )  # fmt: skip
    assert done.returncode != 0
    assert "prefill_s128, decode_b1, decode_b2 can't be captured, because torch-mlir is not installed" in done.stderr
    assert f"Run the compile job for this configuration: vllm-neuron compile {site.model}" in done.stderr


def test_an_archive_is_all_that_a_site_without_a_network_needs(site: Site, tmp_path: Path) -> None:
    """Packed where the job ran, unpacked elsewhere: a strict start without any remote tier captures nothing."""
    archive = tmp_path / "cache.tar"
    packed = run([PROGRAM, "cache", "pack", str(archive), "--json"], VLLM_CACHE_ROOT=site.folder / "build-cache")
    assert len(json.loads(packed.stdout)["manifests"]) == len(GRAPHS)
    unpacked = run([PROGRAM, "cache", "unpack", str(archive), "--json"], VLLM_CACHE_ROOT=tmp_path / "root")
    assert {kind: len(rows) for kind, rows in json.loads(unpacked.stdout).items()} == {"entries": 3, "manifests": 3}
    call = {"prompts": [PROMPT], "params": {"temperature": 0, "max_tokens": 8, "ignore_eos": True}}
    env = {
        "VLLM_CACHE_ROOT": str(tmp_path / "root"),
        "VLLM_NEURON_BACKEND": "neuron_native",
        "VLLM_NEURON_DISABLE_WARMUP_COMPILE": "1",
    }
    start = {"do": "generate", "args": {"model": str(site.model), **SIZES}, "calls": [call], "env": env}
    [result] = run_cases([start], "compiled")
    assert answered_right(site, result)
    assert captured(result) == []
    assert "3 of 3 graphs need no capture (3 from the local tier, 0 from the remote tier)" in result["log"]


def cases(site: Site) -> dict[str, dict[str, Any]]:
    call = {"prompts": [PROMPT], "params": {"temperature": 0, "max_tokens": 8, "ignore_eos": True}}

    def start(root: Path, remote: Path | None = site.remote, **env: str) -> dict[str, Any]:
        variables = {"VLLM_CACHE_ROOT": str(root), "VLLM_NEURON_BACKEND": "neuron_native", **env}
        variables |= {"NEURON_LIBTORCH_REMOTE_CACHE": str(remote)} if remote else {}
        variables = {name: value for name, value in variables.items() if value}
        return {
            "do": "generate",
            "args": {"model": str(site.model), **SIZES},
            "calls": [call],
            "env": variables,
        }

    strict = {"VLLM_NEURON_DISABLE_WARMUP_COMPILE": "1"}
    for name in ("misfit", "misfit-strict"):
        rewrite(manifest_of(site.root(name), "decode_b1"), "weights.lm_head.weight", "weights.lm_tail.weight")
    for name in ("truncated", "truncated-strict"):
        path = manifest_of(site.root(name), "decode_b1")
        path.write_bytes(path.read_bytes()[:-100])
    site.root("no-artifact")
    no_manifests = shutil.copytree(site.remote, site.folder / "no-manifests", ignore=lambda *_: [".manifests"])
    one_lost = shutil.copytree(no_manifests, site.folder / "one-lost")
    document = json.loads(manifest_of(site.remote / ".manifests", "decode_b1").read_text())
    for path in one_lost.iterdir():
        metadata = path / "metadata.json"
        if metadata.exists() and json.loads(metadata.read_text())["key_parts"]["module"] == document["module_sha256"]:
            shutil.rmtree(path)
    return {
        "unset": start(site.folder / "unset", VLLM_NEURON_BACKEND=""),
        "asked for": start(site.folder / "asked", VLLM_NEURON_BACKEND="", TORCH_CACHING_PRECOMPILE="1"),
        "misfit": start(site.folder / "misfit"),
        "misfit, strict": start(site.folder / "misfit-strict", **strict),
        # Before the lenient start, which publishes a good manifest in place of the lost one.
        "truncated, strict": start(site.folder / "truncated-strict", no_manifests, **strict),
        "truncated": start(site.folder / "truncated", no_manifests),
        "after truncated": start(site.folder / "truncated", no_manifests),
        "no artifact": start(site.folder / "no-artifact", one_lost),
    }


@pytest.fixture(scope="module")
def results(site: Site) -> dict[str, dict[str, Any]]:
    made = cases(site)
    return dict(zip(made, run_cases(list(made.values()), "compiled"), strict=True))


def answered_right(site: Site, result: dict[str, Any]) -> bool:
    assert result["exit"] == 0, result["log"][-3000:]
    ids: list[int] = result["calls"][0][0]["outputs"][0]["ids"]
    return ids == greedy(site.model, PROMPT, 8)


def captured(result: dict[str, Any]) -> list[str]:
    return [graph for graph in GRAPHS if f"Captured {graph} in" in result["log"]]


@pytest.mark.slow
def test_without_the_variable_every_start_captures_and_one_line_says_so(site: Site, results: dict[str, Any]) -> None:
    result = results["unset"]
    assert answered_right(site, result)
    assert captured(result) == GRAPHS
    line = "The Precompile Cache is off: VLLM_NEURON_BACKEND is unset; set it to neuron_native to turn it on"
    assert result["log"].count("Precompile Cache") == result["log"].count(line) == 1


@pytest.mark.slow
def test_it_can_be_turned_on_by_itself(site: Site, results: dict[str, Any]) -> None:
    assert answered_right(site, results["asked for"])
    assert captured(results["asked for"]) == []


@pytest.mark.slow
def test_a_manifest_that_does_not_fit_the_loaded_model_is_captured_again(site: Site, results: dict[str, Any]) -> None:
    result = results["misfit"]
    assert answered_right(site, result)
    assert captured(result) == ["decode_b1"]
    reason = "decode_b1: weights.lm_head.weight is absent in the manifest, and float32[1024,128] in the loaded model"
    assert result["log"].count(reason) == 1


@pytest.mark.slow
def test_a_manifest_that_does_not_fit_is_an_error_in_strict_mode(results: dict[str, Any]) -> None:
    result = results["misfit, strict"]
    assert result["exit"] == 1
    assert result["error"].startswith("Strict mode: 1 manifests do not fit the loaded model. decode_b1: weights.lm_")
    assert "vllm-neuron compile" in result["error"]


@pytest.mark.slow
def test_a_truncated_manifest_is_warned_about_once_and_replaced(site: Site, results: dict[str, Any]) -> None:
    result = results["truncated"]
    assert answered_right(site, result)
    assert captured(result) == ["decode_b1"]
    warnings = [line for line in result["log"].splitlines() if "WARNING" in line and "manifest" in line]
    assert len(warnings) == 1
    assert "Passed over: the manifest" in warnings[0]
    assert captured(results["after truncated"]) == []
    assert answered_right(site, results["after truncated"])


@pytest.mark.slow
def test_a_truncated_manifest_is_an_error_in_strict_mode(site: Site, results: dict[str, Any]) -> None:
    result = results["truncated, strict"]
    path = site.folder / "truncated-strict" / "neuron" / "precompile_cache"
    assert result["exit"] == 1
    assert result["error"].startswith("Strict mode: the manifest ")
    assert str(path) in result["error"]


@pytest.mark.slow
def test_a_graph_whose_artifact_is_gone_is_captured_and_compiled(site: Site, results: dict[str, Any]) -> None:
    result = results["no artifact"]
    assert answered_right(site, result)
    assert captured(result) == ["decode_b1"]
    assert "; decode_b1: its artifact is in no tier" in result["log"]
    assert "(0 from the local tier, 2 from the remote tier, 1 compiled)" in result["log"]
