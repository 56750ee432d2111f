"""How many KV cache blocks there are: a part of every graph's shape, so it follows from the options alone."""

from __future__ import annotations

from typing import Any

from vllm_neuron import envs
from vllm_neuron.errors import ConfigError, IncompatibleHostError
from vllm_neuron.host.cpu import available_memory_bytes
from vllm_neuron.model.step import StepModel
from vllm_neuron.targets import GiB, Target, compile_target

HOST_BUDGET = 2 * GiB


def kv_blocks(target: Target, vllm_config: Any, kv_bytes_per_block: int, weight_bytes: int) -> int:
    """The number of blocks, the null block included, whatever the machine that asks.

    ``kv_bytes_per_block`` and ``weight_bytes`` are those of one rank. Raises ``ConfigError`` where the blocks can't
    hold one sequence of ``max_model_len`` tokens, or the target's memory has no room for them.
    """
    cache, max_len = vllm_config.cache_config, vllm_config.model_config.max_model_len
    per_sequence = -(-max_len // cache.block_size)
    if cache.num_gpu_blocks_override is not None:
        blocks, source = cache.num_gpu_blocks_override, "--num-gpu-blocks-override"
    elif cache.kv_cache_memory_bytes is not None:
        blocks, source = cache.kv_cache_memory_bytes // kv_bytes_per_block, "--kv-cache-memory-bytes"
    elif target.memory_bytes is None:
        wanted = vllm_config.scheduler_config.max_num_seqs * per_sequence + 1
        blocks, source = min(wanted, HOST_BUDGET // kv_bytes_per_block), f"the {HOST_BUDGET // GiB} GiB for KV caches"
    else:
        budget = _device_budget(target, target.memory_bytes * cache.gpu_memory_utilization, weight_bytes)
        blocks, source = budget // kv_bytes_per_block, f"{target.name}'s memory"
    if blocks < per_sequence + 1:
        raise ConfigError(
            f"{source}: {blocks} KV cache blocks are too few for one sequence of max_model_len ({max_len}) tokens, "
            f"which takes {per_sequence + 1}. Lower --max-model-len, or set --kv-cache-memory-bytes to "
            f"{(per_sequence + 1) * kv_bytes_per_block} or more"
        )
    return int(blocks)


def kv_bytes_per_block(step_model: StepModel, vllm_config: Any) -> int:
    """Bytes that one block takes in the caches of all layers."""
    specs = (layer.get_kv_cache_spec(vllm_config) for layer in step_model.layers.values())
    return sum(spec.page_size_bytes for spec in specs if spec is not None)


def planned_blocks(step_model: StepModel, vllm_config: Any) -> int:
    """:func:`kv_blocks` of a model for the target in force. It may be a model without values: only shapes count."""
    weight_bytes = sum(weight.nbytes for _, weight in step_model.named_weights())
    return kv_blocks(compile_target(), vllm_config, kv_bytes_per_block(step_model, vllm_config), weight_bytes)


def check_host_memory(blocks: int, kv_bytes_per_block: int) -> None:
    """Raises ``IncompatibleHostError`` where this host can't hold the KV caches: they are never shrunk."""
    needed, available = blocks * kv_bytes_per_block, available_memory_bytes()
    if needed > available:
        raise IncompatibleHostError(
            f"The KV cache takes {needed / GiB:.2f} GiB ({blocks} blocks), and this host has {available / GiB:.2f} GiB "
            "available. Lower --max-num-seqs, --max-model-len or --kv-cache-memory-bytes, and compile for that"
        )


def _device_budget(target: Target, usable: float, weight_bytes: int) -> int:
    budget = min(usable * envs.KV_BUDGET_CAP_FRACTION.get(), usable - weight_bytes)
    least = envs.MIN_KV_BUDGET_GIB.get() * GiB
    if budget < least:
        raise ConfigError(
            f"{target.name} has {usable / GiB:.2f} GiB of usable memory, and the weights take {weight_bytes / GiB:.2f} "
            f"GiB of it: {max(budget, 0) / GiB:.2f} GiB are left for the KV cache, less than "
            f"{envs.MIN_KV_BUDGET_GIB.name} ({least / GiB:g}). Use a smaller model, or a target with more memory"
        )
    return int(budget)
