"""Which of vLLM's options change the keys of compiled graphs, and that a miss names the one that did.

Every case is a compile job in strict mode, over a cache that holds the graphs of one configuration for a CPU target and
of one for a Neuron target.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.neuronx_cc_double import install
from tests.support.engine import run_cases
from tests.support.models import make_tiny

GRAPHS = ["prefill_s128", "decode_b1"]
SIZES = ["--dtype=float32", "--max-model-len=128", "--max-num-seqs=1", "--max-num-batched-tokens=128"]
# What SIZES give on a CPU: a block of 16 tokens of one layer, keys and values, 2 heads of 32, four bytes each.
BLOCKS = 128 // 16 + 1
BLOCK_BYTES = 16 * 2 * 2 * 32 * 4


def neuron(**options: Any) -> str:
    return f"--additional-config={json.dumps({'neuron_config': options})}"


@dataclass(frozen=True)
class Case:
    """More options than ``sizes``, for a target; ``says`` is what a miss has to name, '' where there may be none.

    ``env`` are variables, and ``memory`` is the size in bytes of the machine that it runs on, 0: as it is.
    """

    options: str | list[str] = ""
    says: str = ""
    target: str = "cpu"
    env: dict[str, str] = field(default_factory=dict)
    memory: int = 0
    sizes: tuple[str, ...] = tuple(SIZES)

    @property
    def words(self) -> list[str]:
        return self.options.split() if isinstance(self.options, str) else self.options


CHANGES = {
    "length": Case("--max-model-len=64", "max_model_len: 128 there, 64 here"),
    "sequences": Case("--max-num-seqs=2", "max_num_seqs: 1 there, 2 here"),
    "tokens": Case("--max-num-batched-tokens=64", "max_num_batched_tokens: 128 there, 64 here"),
    "prefill buckets": Case(
        [neuron(num_batched_tokens_buckets=[32, 128])], "graph: prefill_s128 there, prefill_s32 here"
    ),
    "dtype": Case("--dtype=bfloat16", "dtype: float32 there, bfloat16 here"),
    "block": Case("--block-size=32", "block_size: 16 there, 32 here"),
    "level": Case("-O1", "level: O2 there, O1 here"),
    "override": Case(["--hf-overrides", '{"rms_norm_eps": 0.25}'], "config.rms_norm_eps: 1e-06 there, 0.25 here"),
    "target": Case("", "target: cpu:x86-64-v3 there, cpu:x86-64-v2 here", "cpu:x86-64-v2"),
    "compiler arguments": Case(
        [neuron(compiler_args="--enable-fast-loading-neuron-binaries")],
        "flags: nothing more there, --enable-fast-loading-neuron-binaries here", "trn2",
    ),
    "share of the device": Case(
        "--gpu-memory-utilization=0.5", "gpu_memory_utilization: 0.92 there, 0.5 here", "trn2"
    ),
}  # fmt: skip
MORE_CHANGES = {
    "blocks": Case("--num-gpu-blocks-override=40", "num_gpu_blocks_override: unset there, 40 here"),
    "kv bytes": Case(f"--kv-cache-memory-bytes={1 << 22}", f"kv_cache_memory_bytes: unset there, {1 << 22} here"),
    "decode buckets": Case(
        ["--max-num-seqs=4", neuron(num_seqs_buckets=[2, 4])], "max_num_seqs: 1 there, 4 here"
    ),
    "contexts": Case(
        ["--max-model-len=256", neuron(decode_context_length_buckets=[128])], "max_model_len: 128 there, 256 here"
    ),
    "route": Case("", "module_format: stablehlo there, hlo here", env={"VLLM_NEURON_BACKEND": "vllm_neuron"}),
    "device": Case("", "target: trn2 there, trn1 here", "trn1"),
    "layers": Case(["--hf-overrides", '{"num_hidden_layers": 2}'], "config.num_hidden_layers: 1 there, 2 here"),
}  # fmt: skip
NEUTRAL = {
    "names": "--served-model-name=other --port=8123 --host=0.0.0.0 --api-key=secret",
    "seed": "--seed=7",
    "share of a machine": "--gpu-memory-utilization=0.5",
    "answers": "--max-logprobs=3 --generation-config=vllm --logprobs-mode=processed_logprobs",
    "statistics": "--disable-log-stats --enable-log-requests",
    "tokenizer": "--tokenizer={tokenizer} --tokenizer-mode=slow",
    "prefix caching": "--no-enable-prefix-caching",
    "template": "--chat-template={tokenizer}/chat_template.jinja",
    "ranks that are left out": "--tensor-parallel-size=1",
}
# The same number of blocks, by other ways.
SAME_BLOCKS = {
    "number": Case(f"--num-gpu-blocks-override={BLOCKS}"),
    "bytes": Case(f"--kv-cache-memory-bytes={BLOCKS * BLOCK_BYTES}"),
    "bytes and a rest": Case(f"--kv-cache-memory-bytes={(BLOCKS + 1) * BLOCK_BYTES - 1}"),
}
# With the number of blocks given, the share of a device says nothing.
SHARES = [
    Case(f"--num-gpu-blocks-override=40 --gpu-memory-utilization={share}", "", "trn2") for share in ("0.9", "0.5")
]
# By default sizes, of which vLLM derives some from memory.
SEQUENCES = neuron(num_seqs_buckets=[256])
MACHINES = [Case(["--max-model-len=128", SEQUENCES], memory=gib << 30, sizes=()) for gib in (4, 64, 2048)]


class Plans:
    """Runs cases over one cache, in one parent process."""

    def __init__(self, folder: Path) -> None:
        self.model = make_tiny(folder / "model", weights=False)
        config = json.loads((self.model / "config.json").read_text())
        (self.model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
        self.tokenizer = make_tiny(folder / "tokenizer", weights=False)
        install(folder / "bin")
        self.env = {
            "VLLM_CACHE_ROOT": str(folder / "root"), "VLLM_NEURON_DISABLE_PARALLEL_TRACE": "1",
            "NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS": "1",
            "PATH": os.pathsep.join([str(folder / "bin"), os.environ["PATH"]]),
        }  # fmt: skip
        bases = [self.case(Case(target=target)) | {"compile": True} for target in ("cpu", "trn2")]
        for done in run_cases(bases, "compiled"):
            assert [graph["source"] for graph in done["graphs"].values()] == ["compiled", "compiled"]

    def case(self, case: Case) -> dict[str, Any]:
        words = [word.format(tokenizer=self.tokenizer) if "{tok" in word else word for word in case.words]
        return {
            "do": "plan",
            "argv": [str(self.model), *case.sizes, *words],
            "target": case.target,
            "env": {**self.env, **case.env},
            "changes": {"memory": case.memory} if case.memory else {},
        }

    def run(self, cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
        return dict(zip(cases, run_cases([self.case(case) for case in cases.values()], "compiled"), strict=True))


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Plans:
    return Plans(tmp_path_factory.mktemp("plans"))


@pytest.fixture(scope="module")
def results(plans: Plans) -> dict[str, dict[str, Any]]:
    together = Case(" ".join(NEUTRAL.values()))
    machines = {f"machine {n}": case for n, case in enumerate(MACHINES)}
    shares = {f"share {n}": case for n, case in enumerate(SHARES)}
    return plans.run({**CHANGES, **SAME_BLOCKS, **shares, **machines, "all that is neutral": together})


@pytest.fixture(scope="module")
def more_results(plans: Plans) -> dict[str, dict[str, Any]]:
    return plans.run({**MORE_CHANGES, **{name: Case(words) for name, words in NEUTRAL.items()}})


def misses_name(result: dict[str, Any], case: Case) -> bool:
    """Whether there are misses, and each says what the case changed."""
    assert result["exit"] == 0, result["log"][-3000:]
    missing = [graph for graph in result["graphs"].values() if graph["source"] == "missing"]
    assert all(case.says in graph["differences"] for graph in missing), missing
    return bool(missing)


def all_found(result: dict[str, Any]) -> bool:
    assert result["exit"] == 0, result["log"][-3000:]
    assert list(result["graphs"]) == GRAPHS
    return {graph["source"] for graph in result["graphs"].values()} == {"local"}


def keys(result: dict[str, Any]) -> dict[str, str]:
    assert result["exit"] == 0, result["log"][-3000:]
    return {name: graph["key"] for name, graph in result["graphs"].items()}


@pytest.mark.parametrize("name", CHANGES)
def test_an_option_that_matters_changes_a_key_and_is_named(name: str, results: dict[str, Any]) -> None:
    assert misses_name(results[name], CHANGES[name])


def test_options_that_do_not_matter_change_no_key(results: dict[str, Any]) -> None:
    assert all_found(results["all that is neutral"])


@pytest.mark.parametrize("name", SAME_BLOCKS)
def test_equal_numbers_of_blocks_give_equal_keys(name: str, results: dict[str, Any]) -> None:
    assert all_found(results[name])


@pytest.mark.parametrize(("kind", "count"), [("share", len(SHARES)), ("machine", len(MACHINES))])
def test_memory_says_nothing_where_the_number_of_blocks_is_the_same(
    kind: str, count: int, results: dict[str, Any]
) -> None:
    assert len(keys(results[f"{kind} 0"])) == len(GRAPHS)
    assert all(keys(results[f"{kind} {n}"]) == keys(results[f"{kind} 0"]) for n in range(count))


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_CHANGES)
def test_another_option_that_matters_is_named(name: str, more_results: dict[str, Any]) -> None:
    assert misses_name(more_results[name], MORE_CHANGES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", NEUTRAL)
def test_an_option_that_does_not_matter_changes_no_key(name: str, more_results: dict[str, Any]) -> None:
    assert all_found(more_results[name])
