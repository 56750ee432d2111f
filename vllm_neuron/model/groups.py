"""vLLM's process groups, for a worker on host memory."""

from __future__ import annotations

import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

from vllm.distributed import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
    set_custom_all_reduce,
)

from vllm_neuron import envs


def init_groups_alone(vllm_config: Any) -> None:
    """As :func:`init_groups`, for the only rank there is. Leaves no file behind, whoever is killed later."""
    with tempfile.TemporaryDirectory(prefix="vllm_neuron_") as folder:
        init_groups(vllm_config, 0, f"file://{Path(folder, 'group')}", 0)


def init_groups(vllm_config: Any, rank: int, method: str, local_rank: int) -> None:
    """Create the groups that vLLM's layers ask for their rank, over gloo.

    Ranks wait for one another as long as vLLM's own option says, or else our variable: then they fail, here or later.
    vLLM's own function for this lies in the module of its GPU worker, which takes a second to import.
    """
    parallel = vllm_config.parallel_config
    seconds = parallel.distributed_timeout_seconds or envs.BARRIER_TIMEOUT.get()
    set_custom_all_reduce(False)
    init_distributed_environment(parallel.world_size, rank, method, local_rank, "gloo", timedelta(seconds=seconds))
    ensure_model_parallel_initialized(
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.prefill_context_parallel_size,
        parallel.decode_context_parallel_size,
    )
