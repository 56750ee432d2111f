"""The key of a trace: all that shapes a captured graph, told without capturing it.

The parts are made by leaving out what is known not to matter, never by choosing what does: a setting that a later
release of vLLM adds is in the key until someone has looked at it. What matters without being a setting is there as
versions and digests of sources. The model's path is nowhere.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
import transformers
import vllm
import vllm.envs

from vllm_neuron import __version__, envs
from vllm_neuron.cache.key import TraceKey, sha256
from vllm_neuron.cache.manifests.manifest import MANIFEST_VERSION
from vllm_neuron.cache.source_trees import SourceDigests
from vllm_neuron.errors import UnsupportedError
from vllm_neuron.lowering import release
from vllm_neuron.model.buckets import OPTIONS, Bucket
from vllm_neuron.targets import compile_target

# Of vLLM's configurations: what says where things come from and go to, what is decided by other parts of the key, and
# what takes effect before token ids or after logits.
_LEFT_OUT: dict[str, frozenset[str]] = {
    "model_config": frozenset(
        {
            "model", "model_weights", "served_model_name", "tokenizer", "tokenizer_mode", "tokenizer_revision",
            "revision", "code_revision", "hf_token", "hf_config_path", "config_format", "hf_overrides", "hf_config",
            "hf_text_config", "generation_config", "override_generation_config", "seed", "max_logprobs",
            "logprobs_mode", "logits_processors", "io_processor_plugin", "allowed_local_media_path",
            "allowed_media_domains", "skip_tokenizer_init", "renderer_num_workers", "return_sampling_mask",
            "use_fp64_gumbel",
        }
    ),
    "cache_config": frozenset(
        {
            "gpu_memory_utilization", "num_gpu_blocks", "num_cpu_blocks", "enable_prefix_caching",
            "prefix_caching_hash_algo", "prefix_cache_retention_interval", "prefix_match_unit", "hash_block_size",
            "cache_hit_alignment_tokens", "kv_cache_size_tokens", "kv_cache_max_concurrency",
            "user_specified_block_size", "_block_size_resolved",
        }
    ),
    "compilation_config": frozenset(
        {
            "cache_dir", "local_cache_dir", "debug_dump_path", "compilation_time", "encoder_compilation_time",
            "static_forward_context", "static_all_moe_layers", "traced_files", "enabled_custom_ops",
            "disabled_custom_ops",
        }
    ),
    "kernel_config": frozenset({"enable_flashinfer_autotune", "enable_jit_warmup", "enable_cutedsl_warmup"}),
    "attention_config": frozenset(),
}  # fmt: skip

# Of what vLLM itself counts among the variables that shape graphs: waits, names of the host and of the build.
_VARIABLES_LEFT_OUT = frozenset(
    {
        "VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_USAGE_SOURCE", "VLLM_PROCESS_NAME_PREFIX", "VLLM_LOOPBACK_IP",
        "VLLM_IMAGE_TAG", "VLLM_BUILD_COMMIT", "VLLM_BUILD_PIPELINE", "VLLM_BUILD_URL", "VLLM_CONFIGURE_LOGGING",
        "MOONCAKE_REQUESTER_LOCAL_HOSTNAME",
    }
)  # fmt: skip

_VOLATILE = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})


class TraceKeys:
    """The trace keys of one configuration's buckets.

    ``digests`` remembers those of source trees. Raises ``UnsupportedError`` for a configuration whose code can't be
    known without running it.
    """

    def __init__(self, vllm_config: Any, digests: SourceDigests) -> None:
        self._common = {
            "format": str(MANIFEST_VERSION),
            "model": _json(stable(vllm_config.model_config.hf_config.to_dict())),
            "text_model": _text_model(vllm_config.model_config),
            "remote_code": _remote_code(vllm_config.model_config, digests),
            "model_sources": _model_sources(vllm_config.model_config, digests),
            "sizes": _json(_sizes(vllm_config)),
            "parallel": vllm_config.parallel_config.compute_hash(),
            "performance_mode": str(vllm_config.performance_mode),
            "additional": _json(_additional(vllm_config.additional_config)),
            "versions": _json(_versions()),
            "plugins": _json(_plugins()),
            "vllm_sources": digests.digest(Path(vllm.__path__[0])),
            "own_sources": digests.digest(Path(__file__).parents[1]),
            "environment": _json(_environment()),
        }
        for name, left_out in _LEFT_OUT.items():
            self._common[name] = _json(_settings(getattr(vllm_config, name), left_out))

    def key(self, bucket: Bucket) -> TraceKey:
        """The key of one bucket's graph."""
        return TraceKey.from_parts({**self._common, "bucket": _json(asdict(bucket))})


def _settings(config: Any, left_out: frozenset[str]) -> dict[str, Any]:
    return {field.name: getattr(config, field.name, None) for field in fields(config) if field.name not in left_out}


def _sizes(vllm_config: Any) -> dict[str, Any]:
    """What the shapes of step inputs and KV caches follow from, beside the model."""
    scheduler, target = vllm_config.scheduler_config, compile_target()
    sizes = {
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
    }
    if target.memory_bytes is None:
        return sizes
    return sizes | {
        "memory_bytes": target.memory_bytes,
        "gpu_memory_utilization": vllm_config.cache_config.gpu_memory_utilization,
        envs.KV_BUDGET_CAP_FRACTION.name: envs.KV_BUDGET_CAP_FRACTION.get(),
        envs.MIN_KV_BUDGET_GIB.name: envs.MIN_KV_BUDGET_GIB.get(),
    }


def _text_model(model_config: Any) -> str:
    """The part of a composite configuration that is the language model."""
    if model_config.hf_text_config is model_config.hf_config:
        return ""
    return _json(stable(model_config.hf_text_config.to_dict()))


def _remote_code(model_config: Any, digests: SourceDigests) -> str:
    if not model_config.trust_remote_code:
        return ""
    folder, text = Path(model_config.model), _json(getattr(model_config.hf_config, "auto_map", None))
    if "--" in text or not folder.is_dir():
        raise UnsupportedError("the model's code is not in its folder")
    return digests.digest(folder)


def _model_sources(model_config: Any, digests: SourceDigests) -> str:
    """Digests of packages outside vLLM that a model's class comes from."""
    from vllm.model_executor.models.registry import ModelRegistry

    found = {}
    for architecture in model_config.architectures:
        registered = ModelRegistry.models.get(architecture)
        model_class = getattr(registered, "model_cls", None)
        module = str(getattr(registered, "module_name", None) or getattr(model_class, "__module__", "vllm"))
        package = module.partition(".")[0]
        if package not in ("vllm", "vllm_neuron"):
            found[architecture] = _package_digest(package, digests)
    return _json(found)


def _package_digest(package: str, digests: SourceDigests) -> str:
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.submodule_search_locations:
        return _json([digests.digest(Path(place)) for place in spec.submodule_search_locations])
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise UnsupportedError(f"the source of the model's module {package} can't be found")
    return sha256(Path(spec.origin).read_bytes())


def _additional(additional_config: Any) -> Any:
    """The buckets' own sizes are in each key; which others there are doesn't matter to a graph."""
    if not isinstance(additional_config, dict):
        return additional_config
    neuron = {k: v for k, v in (additional_config.get("neuron_config") or {}).items() if k not in OPTIONS}
    others = {k: v for k, v in additional_config.items() if k != "neuron_config"}
    return others | ({"neuron_config": neuron} if neuron else {})


def _versions() -> dict[str, str]:
    return {
        "vllm-neuron": __version__,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        release.PACKAGE: release.version(),
    }


def _plugins() -> list[list[str]]:
    """Packages whose code vLLM runs before it builds a model, and which may register or change one."""
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    return sorted([point.name, point.value, point.dist.version if point.dist else ""] for point in points)


def _environment() -> dict[str, str]:
    """The variables that are set, of those that vLLM holds to be able to shape a graph."""
    names = vllm.envs.compile_factors().keys() - _VARIABLES_LEFT_OUT
    return {name: os.environ[name] for name in sorted(names) if name in os.environ}


def stable(value: Any) -> Any:
    """A configuration without what transformers notes about itself and about where it read it."""
    if isinstance(value, Mapping):
        return {str(key): stable(item) for key, item in value.items() if key not in _VOLATILE}
    if isinstance(value, list | tuple):
        return [stable(item) for item in value]
    return value


def _json(value: Any) -> str:
    """Canonical text of a part; NaN is let pass, and what is no JSON is told by vLLM's own rule."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)


def _plain(value: Any) -> Any:
    from vllm.config.utils import normalize_value

    try:
        return normalize_value(value)  # type: ignore[no-untyped-call]
    except TypeError:
        return repr(value)
