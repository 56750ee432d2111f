"""The packaged 135M model: compiled without its weights, then served strictly, word for word as Hugging Face has it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SIZES = ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "4", "--max-num-batched-tokens", "256"]
GRAPHS = ["prefill_s128", "prefill_s256", "decode_b1", "decode_b2", "decode_b4"]
VLLM_NEURON = str(Path(sys.executable).with_name("vllm-neuron"))
QUESTIONS = [
    "What is the capital of France?",
    "Name three primary colours.",
    "Write a haiku about the sea.",
    "Explain in one sentence why the sky is blue.",
    "What is 12 times 12?",
    "Translate 'good morning' to Spanish.",
    "List two mammals that live in the ocean.",
    "Give me a short recipe for pancakes.",
]
TOKENS = 64

GENERATE = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(model=sys.argv[1], dtype="float32", max_model_len=512, max_num_seqs=4, max_num_batched_tokens=256)
chats = [[{"role": "user", "content": text}] for text in json.loads(sys.argv[2])]
outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=int(sys.argv[3]), ignore_eos=True), use_tqdm=False)
found = [[list(output.prompt_token_ids), list(output.outputs[0].token_ids)] for output in outputs]
print("FOUND", json.dumps(found))
"""


def run(command: list[str], **variables: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=900)


@pytest.fixture(scope="module")
def shapes(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder without its weights."""
    folder = tmp_path_factory.mktemp("shapes") / "elsewhere"
    shutil.copytree(smollm2, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


@pytest.fixture(scope="module")
def remote(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A remote tier with every graph of the model, from a job that saw no weights."""
    folder = tmp_path_factory.mktemp("remote")
    home = tmp_path_factory.mktemp("home")
    job = run(
        [VLLM_NEURON, "compile", str(shapes), *SIZES, "--remote", str(folder)],
        VLLM_CACHE_ROOT=home / "cache", HOME=home, PYTHONHASHSEED=0,
    )  # fmt: skip
    assert job.returncode == 0, job.stderr[-3000:]
    return folder


def plan(model: Path, home: Path, remote: Path, seed: int) -> dict[str, Any]:
    done = run(
        [VLLM_NEURON, "plan", str(model), *SIZES, "--json", "--check", "--remote", str(remote)],
        VLLM_CACHE_ROOT=home / "cache", HOME=home, PYTHONHASHSEED=seed,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_keys_are_the_same_with_and_without_weights(smollm2: Path, shapes: Path, remote: Path, tmp_path: Path) -> None:
    with_weights = plan(smollm2, tmp_path / "one", remote, 1)
    without = plan(shapes, tmp_path / "other", remote, 0)
    keys = [(line["graph"], line["key"]) for line in with_weights["graphs"]]
    assert [graph for graph, _ in keys] == GRAPHS
    assert keys == [(line["graph"], line["key"]) for line in without["graphs"]]
    assert len({key for _, key in keys}) == len(GRAPHS)


def test_a_strict_server_answers_as_hugging_face_does(smollm2: Path, remote: Path, tmp_path: Path) -> None:
    done = run(
        [sys.executable, "-c", GENERATE, str(smollm2), json.dumps(QUESTIONS), str(TOKENS)],
        VLLM_CACHE_ROOT=tmp_path / "cache", HOME=tmp_path, NEURON_LIBTORCH_REMOTE_CACHE=remote,
        VLLM_NEURON_DISABLE_WARMUP_COMPILE=1, PYTHONHASHSEED=1,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"(0 from the local tier, {len(GRAPHS)} from the remote tier, 0 compiled)" in done.stdout + done.stderr
    found = json.loads(done.stdout.split("FOUND ")[1].splitlines()[0])
    assert [tokens for _, tokens in found] == [hugging_face(smollm2, prompt) for prompt, _ in found]


def hugging_face(folder: Path, prompt: list[int]) -> list[int]:
    """Greedy tokens of the reference implementation, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            eos_token_id=None,
            pad_token_id=2,
        )
    tokens: list[int] = ids[0, len(prompt) :].tolist()
    return tokens
