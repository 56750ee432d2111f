"""What is compared: three ways to serve the same checkpoint with the same options."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = ["--max-model-len", "1024", "--max-num-seqs", "8", "--max-num-batched-tokens", "512"]


@dataclass(frozen=True)
class Engine:
    """A server to measure. ``variables`` are set for it; every other one that could steer it is removed."""

    name: str
    vllm: Path
    variables: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()

    def command(self, model: Path, dtype: str) -> list[str]:
        """The command line, without host and port."""
        common = [*OPTIONS, "--dtype", dtype, "--served-model-name", "bench"]
        return [str(self.vllm), "serve", str(model), *common, *self.options]

    def environment(self, cache: Path) -> dict[str, str]:
        """The environment: every cache that the engine has lies under ``cache``.

        Thread counts are the engine's own choice, because that is what a user gets.
        """
        steering = ("VLLM_", "NEURON_", "OMP_", "KMP_", "TORCH")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(steering)}
        common = {
            "VLLM_CACHE_ROOT": str(cache / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        return inherited | common | self.variables


_OWN = Path(sys.executable).with_name("vllm")
ENGINES = {
    engine.name: engine
    for engine in (
        Engine("ours", _OWN, {"VLLM_NEURON_BACKEND": "neuron_native"}),
        Engine("eager", _OWN, {"VLLM_NEURON_CPU_MODE": "1"}),
        # Stock takes nine tenths of the machine's memory by default, and the other servers are up beside it.
        Engine("stock", ROOT / ".venv-stock" / "bin" / "vllm", options=("--gpu-memory-utilization", "0.2")),
    )
}
