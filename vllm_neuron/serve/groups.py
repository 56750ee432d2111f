"""vLLM's process groups, for a worker on host memory."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from vllm.distributed import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
    set_custom_all_reduce,
)


def init_groups(vllm_config: Any, rank: int, method: str, local_rank: int) -> None:
    """Create the groups that vLLM's layers ask for their rank, over gloo.

    vLLM's own function for this lies in the module of its GPU worker, which takes a second to import.
    """
    parallel = vllm_config.parallel_config
    seconds = parallel.distributed_timeout_seconds
    timeout = None if seconds is None else timedelta(seconds=seconds)
    set_custom_all_reduce(False)
    init_distributed_environment(parallel.world_size, rank, method, local_rank, "gloo", timeout)
    ensure_model_parallel_initialized(
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.prefill_context_parallel_size,
        parallel.decode_context_parallel_size,
    )
