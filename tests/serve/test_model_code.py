"""Models whose code does what capture has to allow for, held against Hugging Face's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.engine import run_cases
from tests.support.scores import assert_scored, score
from tools.tiny_models import HEADS, KEY_VALUE_HEADS, make_tiny

NAMES = {
    "model.embed_tokens": "model.tok_embeddings",
    "lm_head": "output",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def as_internlm2(llama: Path, folder: Path) -> Path:
    """The same model under InternLM2's names, with the queries of each key-value head beside its key and value."""
    config = json.loads((llama / "config.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["InternLM2ForCausalLM"]}))
    weights, found = load_file(llama / "model.safetensors"), {}
    for name, weight in weights.items():
        if ".q_proj." in name:
            rows = [weights[name.replace(".q_proj.", f".{kind}_proj.")] for kind in "qkv"]
            grouped = [each.view(KEY_VALUE_HEADS, -1, each.shape[-1]) for each in rows]
            found[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat(grouped, 1).flatten(0, 1).contiguous()
        elif ".k_proj." not in name and ".v_proj." not in name:
            for old, new in NAMES.items():
                name = name.replace(old, new)
            found[name] = weight
    save_file(found, folder / "model.safetensors")
    assert HEADS % KEY_VALUE_HEADS == 0
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """The model to serve, and the one that Hugging Face can run."""
    root = tmp_path_factory.mktemp("model-code")

    def make(name: str) -> tuple[Path, Path]:
        if name == "internlm2":
            llama = make_tiny(root / "llama", "llama")
            return as_internlm2(llama, root / "internlm2"), llama
        made = make_tiny(root / name, name)
        return made, made

    return make


@pytest.mark.parametrize(
    "names",
    [
        # A function of the model's own is given to torch.compile; forward() has an argument without a default.
        ["cohere", "internlm2"],
        # Literals in forward(), plain attributes.
        pytest.param(["cohere2", "cohere2_moe", "gemma4_text"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_log_probabilities_equal_the_reference(
    models: Callable[[str], tuple[Path, Path]], names: list[str], tmp_path: Path
) -> None:
    made = [models(name) for name in names]
    cases = [score(served, {"VLLM_CACHE_ROOT": str(tmp_path)}) for served, _ in made]
    for (_, reference), result in zip(made, run_cases(cases, "compiled"), strict=True):
        assert_scored(result, reference)
