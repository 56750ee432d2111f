"""The number of KV cache blocks follows from target and options, and a host that can't hold them says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.engine import run_cases
from vllm_neuron.errors import ConfigError
from vllm_neuron.model.kv import kv_blocks
from vllm_neuron.targets import resolve_target

GiB = 1 << 30
MiB = 1 << 20


def configuration(seqs: int = 8, length: int = 1024, **cache: Any) -> Any:
    """The parts of vLLM's configuration that the number of blocks depends on."""
    defaults = {
        "block_size": 16,
        "gpu_memory_utilization": 0.9,
        "num_gpu_blocks_override": None,
        "kv_cache_memory_bytes": None,
    }
    return SimpleNamespace(
        cache_config=SimpleNamespace(**{**defaults, **cache}),
        scheduler_config=SimpleNamespace(max_num_seqs=seqs),
        model_config=SimpleNamespace(max_model_len=length),
    )


@pytest.mark.parametrize(
    ("target", "options", "per_block", "weights", "expected"),
    [
        ("cpu", {}, 1024, 0, 8 * 64 + 1),
        ("cpu", {"length": 1000}, 1024, 0, 8 * 63 + 1),
        ("cpu", {"block_size": 32}, 1024, 0, 8 * 32 + 1),
        ("cpu", {}, 16 * MiB, 0, 128),
        ("cpu", {"gpu_memory_utilization": 0.1}, 1024, 100 * GiB, 513),
        ("cpu:x86-64-v4", {}, 1024, 0, 513),
        ("cuda:sm_80", {}, 1024, 0, 513),
        ("cpu", {"num_gpu_blocks_override": 70}, 1024, 0, 70),
        ("cpu", {"kv_cache_memory_bytes": 100 * MiB + 5}, MiB, 0, 100),
        ("trn2", {"num_gpu_blocks_override": 70, "kv_cache_memory_bytes": GiB}, MiB, 0, 70),
        # 16 GiB of which 0.9 are used: at most 0.3 of that, and no more than the weights leave.
        ("trn1", {}, MiB, 2 * GiB, int(16 * 0.9 * 0.3 * 1024)),
        ("trn1", {}, MiB, 12 * GiB, int((16 * 0.9 - 12) * 1024)),
        # Two cores of 12 GiB in a logical one.
        ("trn2", {"gpu_memory_utilization": 0.5}, MiB, GiB, int(24 * 0.5 * 0.3 * 1024)),
    ],
)
def test_blocks(target: str, options: dict[str, Any], per_block: int, weights: int, expected: int) -> None:
    assert kv_blocks(resolve_target(target), configuration(**options), per_block, weights) == expected


@pytest.mark.parametrize(
    ("target", "options", "per_block", "weights", "message"),
    [
        (
            "cpu", {"length": 4096}, 16 * MiB, 0,
            "the 2 GiB for KV caches: 128 KV cache blocks are too few for one sequence of max_model_len (4096) tokens, "
            f"which takes 257. Lower --max-model-len, or set --kv-cache-memory-bytes to {257 * 16 * MiB} or more",
        ),
        ("cpu", {"num_gpu_blocks_override": 64}, 1024, 0, "--num-gpu-blocks-override: 64 KV cache blocks are too few"),
        ("cpu", {"kv_cache_memory_bytes": MiB}, 64 * 1024, 0, "--kv-cache-memory-bytes: 16 KV cache blocks are too"),
        ("trn1", {}, MiB, 14 * GiB, "trn1 has 14.40 GiB of usable memory, and the weights take 14.00 GiB of it: 0.40"),
        ("trn1", {}, MiB, 20 * GiB, "0.00 GiB are left for the KV cache"),
    ],
)  # fmt: skip
def test_too_few_blocks(target: str, options: dict[str, Any], per_block: int, weights: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kv_blocks(resolve_target(target), configuration(**options), per_block, weights)
    assert message in str(caught.value)


def test_the_share_of_a_device_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION", "0.5")
    assert kv_blocks(resolve_target("trn1"), configuration(), MiB, GiB) == int(16 * 0.9 * 0.5 * 1024)
    monkeypatch.setenv("VLLM_NEURON_MIN_KV_BUDGET_GIB", "8")
    with pytest.raises(ConfigError, match="less than VLLM_NEURON_MIN_KV_BUDGET_GIB"):
        kv_blocks(resolve_target("trn1"), configuration(), MiB, GiB)


def test_a_host_with_too_little_memory_is_told_before_it_allocates(tiny: Callable[[str], Path]) -> None:
    args = {"model": str(tiny("llama")), "dtype": "float32", "max_model_len": 64, "max_num_seqs": 1}
    (result,) = run_cases([{"do": "generate", "args": {**args, "kv_cache_memory_bytes": 1 << 50}, "calls": []}])
    assert "IncompatibleHostError" in result["kinds"]
    assert result["error"].startswith("The KV cache takes 1048576.00 GiB (")
    assert "Lower --max-num-seqs, --max-model-len or --kv-cache-memory-bytes" in result["error"]
