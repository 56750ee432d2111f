"""Architectures whose modules import what is not installed: torchvision, which has a stand-in, and the rest."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import pytest

from tests.support.engine import run_cases
from tools.tiny_models import tiny_config

REFUSED = {
    ("gemma4", "Gemma4ForConditionalGeneration"): "A multimodal model is not supported",
    ("qwen3_5_text", "Qwen3_5ForCausalLM"): "A model with state-space layers is not supported",
}
NOT_INSPECTED = ("llama", "Terratorch")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    root, cases = tmp_path_factory.mktemp("inspection"), []
    for model_type, architecture in (*REFUSED, NOT_INSPECTED):
        config = tiny_config(model_type)
        config.architectures = [architecture]
        config.save_pretrained(root / architecture)
        args = {"model": str(root / architecture), "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 64}
        # What an earlier inspection found is kept in vLLM's cache.
        cases.append({"do": "configure", "args": args, "env": {"VLLM_CACHE_ROOT": str(root / "cache")}})
    return dict(zip((*REFUSED, NOT_INSPECTED), run_cases(cases), strict=True))


@pytest.mark.parametrize(("case", "message"), REFUSED.items())
def test_a_missing_torchvision_hides_no_refusal(
    results: dict[tuple[str, str], dict[str, Any]], case: tuple[str, str], message: str
) -> None:
    assert results[case]["error"].startswith(message), results[case]["log"][-3000:]


def test_an_architecture_that_cannot_be_inspected_is_one_line(results: dict[tuple[str, str], dict[str, Any]]) -> None:
    result = results[NOT_INSPECTED]
    assert "failed to be inspected" in result["error"]
    lines = [line for line in result["log"].splitlines() if "registry.py" in line and " ERROR " in line]
    reason = "Error in inspecting model architecture 'Terratorch': ModuleNotFoundError: No module named 'terratorch'"
    assert len(lines) == 1
    assert lines[0].endswith(reason)


def test_what_stands_in_for_torchvision_can_be_named_and_not_called() -> None:
    if importlib.util.find_spec("torchvision") is not None:
        pytest.skip("torchvision is installed")
    program = """
from vllm_neuron.model.patches.torchvision import stand_in_for_torchvision
stand_in_for_torchvision()
import torchvision.transforms.v2.functional as functional
from torchvision.transforms import InterpolationMode
from transformers.utils import is_torchvision_available
mode: InterpolationMode | None = InterpolationMode.BICUBIC
assert not is_torchvision_available()
functional.resize(None, 2)
"""
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, timeout=120)
    assert done.returncode == 1
    assert "ModuleNotFoundError: resize was called, and torchvision is not installed" in done.stderr
