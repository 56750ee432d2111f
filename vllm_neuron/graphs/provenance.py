"""What a graph was made from, in plain values: stored beside an entry to explain a miss, never part of a key."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
from typing import Any

from vllm_neuron import __version__, envs
from vllm_neuron.abi import dtype_name
from vllm_neuron.cache.remote.urls import open_remotes
from vllm_neuron.graphs.trace_key import stable
from vllm_neuron.model.buckets import Bucket
from vllm_neuron.routes import Route, current_route
from vllm_neuron.targets import Target

_PACKAGES = ("torch", "transformers", "vllm", "torch-mlir")


def provenance(vllm_config: Any, bucket: Bucket) -> dict[str, Any]:
    """Model, bucket, sizes and versions behind one graph."""
    model, scheduler, cache = vllm_config.model_config, vllm_config.scheduler_config, vllm_config.cache_config
    return {
        "graph": bucket.name,
        "model": model.model,
        "architecture": ", ".join(model.architectures),
        "dtype": dtype_name(model.dtype),
        "max_model_len": model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "block_size": cache.block_size,
        "num_gpu_blocks_override": cache.num_gpu_blocks_override,
        "kv_cache_memory_bytes": cache.kv_cache_memory_bytes,
        "gpu_memory_utilization": cache.gpu_memory_utilization,
        "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
        "route": current_route().value,
        "config": _config(model.hf_config),
        "versions": {"vllm-neuron": __version__, **{name: _version(name) for name in _PACKAGES}},
    }


def compile_command(vllm_config: Any, target: Target) -> str:
    """The command line that compiles every graph of this configuration, and publishes it where a remote tier is set."""
    model, scheduler, cache = vllm_config.model_config, vllm_config.scheduler_config, vllm_config.cache_config
    options: dict[str, Any] = {
        "--dtype": dtype_name(model.dtype),
        "--max-model-len": model.max_model_len,
        "--max-num-seqs": scheduler.max_num_seqs,
        "--max-num-batched-tokens": scheduler.max_num_batched_tokens,
        "--block-size": cache.block_size,
        "--optimization-level": int(vllm_config.optimization_level),
        "--target": target.name,
    }
    if target.memory_bytes is not None:
        options["--gpu-memory-utilization"] = cache.gpu_memory_utilization
    if isinstance(model.hf_overrides, dict) and model.hf_overrides:
        options["--hf-overrides"] = json.dumps(model.hf_overrides)
    if cache.num_gpu_blocks_override is not None:
        options["--num-gpu-blocks-override"] = cache.num_gpu_blocks_override
    if cache.kv_cache_memory_bytes is not None:
        options["--kv-cache-memory-bytes"] = cache.kv_cache_memory_bytes
    if neuron := (vllm_config.additional_config or {}).get("neuron_config"):
        options["--additional-config"] = json.dumps({"neuron_config": neuron})
    remote = envs.REMOTE_CACHE.get()
    unset: list[envs.Variable[Any]] = []
    if remote and all(tier.read_only for tier in open_remotes(remote)):
        unset.append(envs.REMOTE_CACHE)  # A job that can publish nothing is refused; without it, it fills this machine.
    elif remote:
        options["--remote"] = remote
    route = current_route()
    prefix = [] if route is Route.NATIVE else [f"{envs.BACKEND.name}={route.value}"]
    if envs.strict():
        # The shell that it is pasted into may well be the server's, and a strict job compiles nothing.
        unset += [envs.DISABLE_WARMUP_COMPILE, envs.ASSERT_CACHE_HIT]
    if names := [name for one in unset for name in (one.name, *one.old_names) if name in os.environ]:
        prefix = ["env", *(word for name in names for word in ("-u", name)), *prefix]
    words = [*prefix, "vllm-neuron", "compile", model.model]
    for option, value in options.items():
        words += [option, str(value)]
    return shlex.join(words)


def _config(hf_config: Any) -> Any:
    """The model's configuration as plain JSON, which has no infinity."""
    return json.loads(json.dumps(stable(hf_config.to_dict()), default=str), parse_constant=str)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
