"""What is refused at start, in one line each, and what is ignored with a warning."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from vllm import envs as vllm_envs

from vllm_neuron import envs
from vllm_neuron.errors import ConfigError
from vllm_neuron.model.buckets import buckets_for, compiler_arguments
from vllm_neuron.routes import check_available, current_route
from vllm_neuron.targets import compile_target

logger = logging.getLogger("vllm.neuron.checks")

# A socket's path has 107 bytes, and vLLM names each by a UUID.
_LONGEST_SOCKET_FOLDER = 107 - len("/") - 36

Test = Callable[[Any], Any]

# What of a configuration is refused: the feature, whether it is asked for, and what to do instead.
REFUSED: tuple[tuple[str, Test, str], ...] = (
    ("LoRA", lambda c: c.lora_config, "Drop --enable-lora, or merge the adapter into the checkpoint"),
    ("Speculative decoding", lambda c: c.speculative_config, "Drop --speculative-config"),
    ("Pipeline parallelism", lambda c: c.parallel_config.pipeline_parallel_size > 1, "Drop --pipeline-parallel-size"),
    ("Tensor parallelism", lambda c: c.parallel_config.tensor_parallel_size > 1, "Drop --tensor-parallel-size"),
    ("Data parallelism", lambda c: c.parallel_config.data_parallel_size > 1, "Start one server per replica"),
    ("Context parallelism", lambda c: _context_parallel(c.parallel_config), "Drop the context parallel sizes"),
    ("A KV connector", lambda c: c.kv_transfer_config, "Drop --kv-transfer-config"),
    ("KV cache offloading", lambda c: getattr(c.cache_config, "kv_offloading_size", None), "Drop --kv-offloading-size"),
    (
        "A KV cache of another type than the model",
        lambda c: c.cache_config.cache_dtype != "auto",
        "Drop --kv-cache-dtype",
    ),
    ("Weight offloading", lambda c: _offloads(c), "Drop --cpu-offload-gb and its kin"),
    ("Eager mode", lambda c: c.model_config.enforce_eager and not envs.CPU_MODE.get(),
     f"Drop --enforce-eager, or set {envs.CPU_MODE.name}=1"),
    ("Fitting max_model_len to the memory", lambda c: c.model_config.original_max_model_len == -1,
     "Give --max-model-len a number: it is a part of every graph's shape"),
    ("A pooling model", lambda c: c.model_config.runner_type != "generate", "Serve a model that generates text"),
    ("An encoder-decoder model", lambda c: c.model_config.is_encoder_decoder, "Serve a decoder-only model"),
    ("A multimodal model", lambda c: c.model_config.is_multimodal_model, "Serve a model of text only"),
    ("A model with multi-head latent attention", lambda c: c.model_config.use_mla, "Serve another model"),
    ("A model with state-space layers", lambda c: c.model_config.is_hybrid or c.model_config.is_attention_free,
     "Serve a model with attention in every layer"),
    ("A model with chunked local attention", lambda c: c.model_config.attention_chunk_size, "Serve another model"),
    ("A model with ALiBi", lambda c: c.model_config.uses_alibi, "Serve another model"),
    ("A prompt of embeddings", lambda c: c.model_config.enable_prompt_embeds, "Drop --enable-prompt-embeds"),
)  # fmt: skip

# Options that have no effect here: their name, and whether they are set.
IGNORED: tuple[tuple[str, Test], ...] = (
    ("--compilation-config", lambda c: c.compilation_config.mode),
    ("--compilation-config with CUDA graph sizes", lambda c: c.compilation_config.cudagraph_capture_sizes),
    ("--attention-backend", lambda c: c.attention_config.backend is not None),
    ("--gpu-memory-utilization", lambda c: _sets_utilization(c.cache_config) and compile_target().memory_bytes is None),
)


def check(vllm_config: Any) -> None:
    """Raises ``ConfigError`` for all that can't be served of a model. A configuration without a model passes."""
    target = compile_target()
    if vllm_config.model_config is None:
        return
    if target.kind != "cpu" and not (envs.CPU_MODE.get() or envs.CPU_COMPILE.get()):
        raise ConfigError(
            f"this package runs artifacts for CPU targets only, not for {target.name}: set "
            f"{envs.CPU_COMPILE.name}=1 to compile for it, or {envs.TARGET_OVERRIDE.name}=cpu"
        )
    if compiler_arguments(vllm_config.additional_config) and target.compiler != "neuronx-cc":
        raise ConfigError(
            f"compiler_args are for neuronx-cc, and {target.name} is compiled by {target.compiler}: "
            "drop them from neuron_config"
        )
    refused = [_refusal(feature, advice) for feature, asked, advice in REFUSED if asked(vllm_config)]
    if refused:
        raise ConfigError(". ".join(refused))
    if not envs.CPU_COMPILE.get():
        check_socket_folder()
    if not envs.CPU_MODE.get():
        check_available(current_route())
    buckets_for(vllm_config)


def refuse_quantization(method: str) -> None:
    """Raises ``ConfigError``. vLLM asks early, before it reads the method's own settings and complains of those."""
    advice = "Serve the checkpoint in bfloat16, float16 or float32"
    raise ConfigError(_refusal(f"A quantized checkpoint ({method})", advice))


def check_socket_folder() -> None:
    """Raises ``ConfigError`` where vLLM's engine, in a process of its own, could make no socket for a long path."""
    folder = vllm_envs.VLLM_RPC_BASE_PATH
    if vllm_envs.VLLM_ENABLE_V1_MULTIPROCESSING and len(os.fsencode(folder)) > _LONGEST_SOCKET_FOLDER:
        variable = "VLLM_RPC_BASE_PATH" if os.environ.get("VLLM_RPC_BASE_PATH") else "TMPDIR"
        raise ConfigError(
            f"{variable}={folder} is too long for sockets in it: set it to a folder of at most "
            f"{_LONGEST_SOCKET_FOLDER} bytes"
        )


def _refusal(feature: str, advice: str) -> str:
    return f"{feature} is not supported on the Neuron platform. {advice}"


def warn_about_ignored(vllm_config: Any) -> None:
    """Say once what of the configuration has no effect."""
    for option, is_set in IGNORED:
        if is_set(vllm_config):
            _warn_once(f"{option} has no effect on the Neuron platform for the target {compile_target().name}")


@functools.lru_cache(maxsize=256)
def _warn_once(message: str) -> None:
    logger.warning(message)


def _sets_utilization(cache: Any) -> bool:
    return bool(cache.gpu_memory_utilization != type(cache).gpu_memory_utilization)


def _context_parallel(parallel: Any) -> bool:
    return bool(parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1)


def _offloads(config: Any) -> bool:
    offload = getattr(config, "offload_config", None)
    uva = getattr(offload, "uva", None)
    prefetch = getattr(offload, "prefetch", None)
    return bool(getattr(uva, "cpu_offload_gb", 0) or getattr(prefetch, "offload_group_size", 0))
