"""What shapes a graph is in its trace key: a change of any of it means another capture, and the log says of which."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import vllm_neuron
from tests.support.changes import copy_sources, distribution
from tests.support.engine import run_cases
from tests.support.models import make_tiny

ARGS = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 2, "max_num_batched_tokens": 128}
GRAPHS = ["decode_b1", "decode_b2", "prefill_s128"]
MODEL_CLASS = """
from vllm.model_executor.models.llama import LlamaForCausalLM


class Model(LlamaForCausalLM):
    pass
"""
# By kind of change: what the log has to say of it.
EXPECTED = {
    "model": "model.rms_norm_eps: 1e-06 there, 0.25 here",
    "tying": "model.tie_word_embeddings: false there, true here",
    "override": "model.rope_parameters.rope_theta: 10000.0 there, 5.0 here",
    "dtype": "model_config.dtype: torch.float32 there, torch.bfloat16 here",
    "length": "model_config.max_model_len: 128 there, 64 here",
    "sequences": "sizes.max_num_seqs: 2 there, 4 here",
    "tokens": "sizes.max_num_batched_tokens: 128 there, 256 here",
    "block": "cache_config.block_size: 16 there, 32 here",
    "blocks": "cache_config.num_gpu_blocks_override: unset there, 40",
    "kv bytes": "cache_config.kv_cache_memory_bytes: unset there, 41",
    "device": "sizes.memory_bytes: unset there, ",
    "custom ops": "compilation_config.custom_ops: ",
    "variable": "environment.VLLM_FLOAT32_MATMUL_PRECISION: unset there, high here",
    "additional": "additional.mine: unset there, 1 here",
    "torch": "versions.torch: ",
    "transformers": "versions.transformers: ",
    "vllm": "versions.vllm: 0.32.0 there, 9.9 here",
    "torch-mlir": "versions.torch-mlir: ",
    "plugin": "plugins differs",
    "model class": "model_sources.LlamaForCausalLM: unset there",
    "vllm's source": "vllm_sources differs",
    "own source": "own_sources differs",
}
PLUGIN = "[vllm.general_plugins]\nmine = mine:register\n"


def case(
    model: Path, changes: dict[str, Any] | None = None, env: dict[str, str] | None = None, **args: Any
) -> dict[str, Any]:
    return {
        "do": "recall",
        "args": {"model": str(model), **ARGS, **args},
        "changes": changes or {},
        "env": env or {},
    }


def edited(model: Path, to: Path, **fields: Any) -> Path:
    """A copy of a model's folder with other values in its configuration."""
    shutil.copytree(model, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | fields))
    return to


def vllm_with(folder: Path, text: str) -> dict[str, str]:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    copy = copy_sources(Path(spec.submodule_search_locations[0]), folder)
    with (copy / "model_executor" / "layers" / "activation.py").open("a") as file:
        file.write(text)
    return {"vllm": str(copy)}


def own_with(folder: Path, text: str) -> dict[str, str]:
    copy = copy_sources(Path(vllm_neuron.__file__).parent, folder)
    with (copy / "lowering" / "shared" / "passes.py").open("a") as file:
        file.write(text)
    return {"own": str(copy)}


def changed_cases(model: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """By kind of change, the case; what the log has to say of it is in ``EXPECTED``."""
    package = folder / "package"
    package.mkdir()
    (package / "my_models.py").write_text(MODEL_CLASS)
    mlir = distribution(folder / "mlir", "torch-mlir", "20990101")
    plugin = distribution(folder / "plugin", "mine", "1.0", PLUGIN)
    eps = edited(model, folder / "eps", rms_norm_eps=0.25)
    tied = edited(model, folder / "tied", tie_word_embeddings=True)
    return {
        "model": case(eps),
        "tying": case(tied),
        "override": case(model, hf_overrides={"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}),
        "dtype": case(model, dtype="bfloat16"),
        "length": case(model, max_model_len=64),
        "sequences": case(model, max_num_seqs=4),
        "tokens": case(model, max_num_batched_tokens=256),
        "block": case(model, block_size=32),
        "blocks": case(model, num_gpu_blocks_override=40),
        "kv bytes": case(model, kv_cache_memory_bytes=1 << 22),
        "device": case(model, env={"NEURON_PLATFORM_TARGET_OVERRIDE": "trn2", "VLLM_NEURON_CPU_COMPILE": "1"}),
        "custom ops": case(model, compilation_config={"custom_ops": ["none"]}),
        "variable": case(model, env={"VLLM_FLOAT32_MATMUL_PRECISION": "high"}),
        "additional": case(model, additional_config={"mine": 1}),
        "torch": case(model, {"versions": {"torch": "9.9"}}),
        "transformers": case(model, {"versions": {"transformers": "9.9"}}),
        "vllm": case(model, {"versions": {"vllm": "9.9"}}),
        "torch-mlir": case(model, {"path": str(mlir)}),
        "plugin": case(model, {"path": str(plugin)}),
        "model class": case(model, {"path": str(package), "model_class": {"LlamaForCausalLM": "my_models"}}),
        "vllm's source": case(model, vllm_with(folder / "vllm", "# Changed.\n")),
        "own source": case(model, own_with(folder / "own", "# Changed.\n")),
    }


def unchanged_cases(model: Path, folder: Path) -> dict[str, dict[str, Any]]:
    return {
        "nothing": case(model),
        "path": case(edited(model, folder / "elsewhere")),
        "home, logging and wait": case(
            model,
            env={"HOME": str(folder), "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_ENGINE_READY_TIMEOUT_S": "77"},
        ),
        "the job's own variables": case(
            model, env={"VLLM_NEURON_CPU_COMPILE": "1", "NEURON_PLATFORM_TARGET_OVERRIDE": "cpu"}
        ),
        "seed, names and sampling": case(model, seed=7, served_model_name="other", max_logprobs=3),
        "a tokenizer": case(model, tokenizer=str(edited(model, folder / "tokenizer"))),
        "copied sources": case(model, vllm_with(folder / "same-vllm", "") | own_with(folder / "same-own", "")),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every case, by name, after the graphs of the unchanged one were captured."""
    folder = tmp_path_factory.mktemp("changes")
    model = make_tiny(folder / "model", weights=False)
    code = edited(model, folder / "code")
    (code / "mine.py").write_text("ONE = 1\n")
    other_code = edited(code, folder / "other-code")
    (other_code / "mine.py").write_text("ONE = 2\n")
    changed = changed_cases(model, folder)
    first = {"first": case(model) | {"keep": True}}
    code_first = {"code first": case(code, trust_remote_code=True) | {"keep": True}}
    code_changed = {"code changed": case(other_code, trust_remote_code=True)}
    more_buckets = {"more": case(model, additional_config={"neuron_config": {"num_batched_tokens_buckets": [32, 128]}})}
    cases = first | unchanged_cases(model, folder) | changed | more_buckets | code_first | code_changed
    damaged = case(model) | {"keep": True, "damage": True}
    alone = {"NEURON_LIBTORCH_REMOTE_CACHE": ""}
    strict = {"VLLM_NEURON_DISABLE_WARMUP_COMPILE": "1"}
    cases |= {
        "damaged": damaged | {"env": alone | {"VLLM_CACHE_ROOT": str(folder / "damaged")}},
        "damaged, strict": damaged | {"env": alone | strict | {"VLLM_CACHE_ROOT": str(folder / "damaged-strict")}},
        "damaged, but not remotely": damaged,
    }
    root = {"VLLM_CACHE_ROOT": str(folder / "root"), "NEURON_LIBTORCH_REMOTE_CACHE": str(folder / "remote")}
    ready = [one | {"env": root | one["env"]} for one in cases.values()]
    return dict(zip(cases, run_cases(ready, "compiled"), strict=True))


UNCHANGED = (
    "nothing", "path", "home, logging and wait", "the job's own variables", "seed, names and sampling", "a tokenizer",
    "copied sources",
)  # fmt: skip


@pytest.mark.parametrize("change", EXPECTED)
def test_a_change_means_a_capture_and_is_named(change: str, results: dict[str, Any]) -> None:
    result = results[change]
    assert result["exit"] == 0, result["log"][-3000:]
    assert result["found"] == []
    assert EXPECTED[change] in result["report"]


@pytest.mark.parametrize("change", UNCHANGED)
def test_what_does_not_shape_a_graph_changes_nothing(change: str, results: dict[str, Any]) -> None:
    result = results[change]
    assert result["exit"] == 0, result["log"][-3000:]
    assert result["found"] == GRAPHS
    assert result["report"].startswith("Precompile Cache: 3 of 3 graphs need no capture (3 from the local tier")


def test_another_bucket_does_not_disturb_the_others(results: dict[str, Any]) -> None:
    assert results["more"]["found"] == GRAPHS
    assert "3 of 4 graphs need no capture" in results["more"]["report"]
    assert results["more"]["report"].endswith("prefill_s32: no graph of this name has been captured before")


def test_changed_remote_code_is_found(results: dict[str, Any]) -> None:
    assert results["code first"]["found"] == GRAPHS
    assert results["code changed"]["found"] == []
    assert results["code changed"]["report"].endswith(": remote_code differs")


def test_damaged_manifests_mean_captures_and_one_warning(results: dict[str, Any]) -> None:
    result = results["damaged"]
    assert result["found"] == []
    assert result["log"].count("Passed over: the manifest") == 1
    assert "prefill_s128, decode_b1, decode_b2: its manifest can't be used" in result["report"]


def test_damaged_manifests_are_an_error_in_strict_mode(results: dict[str, Any]) -> None:
    error = results["damaged, strict"]["error"]
    assert error.startswith("Strict mode: the manifest ")
    assert "precompile_cache can't be used: " in error
    assert error.endswith("or run the compile job again to replace it")


def test_a_good_remote_manifest_makes_up_for_a_damaged_one(results: dict[str, Any]) -> None:
    result = results["damaged, but not remotely"]
    assert result["found"] == GRAPHS
    assert "(0 from the local tier, 3 from the remote tier)" in result["report"]
