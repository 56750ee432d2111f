"""What a start pays for asking the cache."""

from __future__ import annotations

import subprocess
import sys


def test_cache_needs_neither_torch_nor_a_compiler() -> None:
    code = "import sys, vllm_neuron.cache.tiers, vllm_neuron.compile.save_cache; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "vllm_neuron" in loaded
    assert loaded.isdisjoint({"torch", "torch_mlir", "iree", "jax", "vllm", "numpy"})
