"""A weight that only loading creates: the bias of Phi's output head, which vLLM's Transformers backend makes so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.support.engine import run_cases
from tests.support.scores import SIZES, assert_scored, score
from tools.tiny_models import VOCABULARY, make_tiny

BIAS = f"weights.lm_head.bias is float32[{VOCABULARY}] in the captured model, and absent in the loaded model"


@pytest.fixture(scope="module")
def phi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Phi, as safetensors."""
    return make_tiny(tmp_path_factory.mktemp("late") / "phi", "phi")


@pytest.fixture(scope="module")
def without_bias(phi: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in a format without headers, and without the bias that its class has."""
    folder = tmp_path_factory.mktemp("late") / "phi-bin"
    transformers.AutoConfig.from_pretrained(phi).save_pretrained(folder)
    weights = load_file(phi / "model.safetensors")
    del weights["lm_head.bias"]
    torch.save(weights, folder / "pytorch_model.bin")
    return folder


@pytest.fixture(scope="module")
def results(phi: Path, without_bias: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    cache = {"VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("cache"))}
    cases = {
        "with": score(phi, cache),
        "without, strict": score(without_bias, cache | {"VLLM_NEURON_DISABLE_WARMUP_COMPILE": "1"}),
        "without": score(without_bias, cache),
    }
    return dict(zip(cases, run_cases(list(cases.values()), "compiled"), strict=True))


def test_a_bias_that_only_loading_creates_is_in_the_graph(results: dict[str, Any], phi: Path) -> None:
    assert_scored(results["with"], phi)
    assert "Captured again" not in results["with"]["log"]


def test_a_model_that_loading_made_otherwise_is_captured_again(results: dict[str, Any], phi: Path) -> None:
    bias = load_file(phi / "model.safetensors")["lm_head.bias"]
    assert bias.abs().max() > 0.1  # Else leaving it out would change nothing.
    assert_scored(results["without"], phi, -bias)
    assert results["without"]["log"].count(f"decode_b1: {BIAS}") == 1


def test_a_model_that_loading_made_otherwise_is_an_error_in_strict_mode(results: dict[str, Any]) -> None:
    result = results["without, strict"]
    assert result["exit"] == 1
    assert result["error"].startswith("Strict mode: 2 graphs do not fit the loaded model. ")
    assert f"decode_b1: {BIAS}" in result["error"]
    assert "vllm-neuron compile" in result["error"]


def test_the_configuration_and_the_headers_of_a_checkpoint_give_the_same_graphs(phi: Path, tmp_path: Path) -> None:
    transformers.AutoConfig.from_pretrained(phi).save_pretrained(tmp_path / "config-only")
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    case = {"do": "plan", "target": "cpu", "env": {"VLLM_CACHE_ROOT": str(tmp_path)}}
    cases = [
        {**case, "argv": [str(tmp_path / "config-only"), "--skip-tokenizer-init", *options], "compile": True},
        {**case, "argv": [str(phi), "--skip-tokenizer-init", *options]},
    ]
    configuration, headers = run_cases(cases, "compiled")
    assert [line["source"] for line in headers["graphs"].values()] == ["local", "local"], headers["log"][-3000:]
    assert {line["key"] for line in headers["graphs"].values()} == {
        line["key"] for line in configuration["graphs"].values()
    }
