"""vLLM's platform: what vLLM asks about the machine, and where its configuration is checked and completed."""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm.platforms.interface import Platform, PlatformEnum

from vllm_neuron import envs, logs, metrics
from vllm_neuron.errors import ConfigError, UnsupportedError
from vllm_neuron.execute.start_report import note_process_start
from vllm_neuron.model.patches import configuration
from vllm_neuron.model.patches.inspection import shorten_inspection_errors
from vllm_neuron.model.patches.torchvision import stand_in_for_torchvision
from vllm_neuron.serve import checks, command_line, lifetime
from vllm_neuron.targets import compile_target

WORKER = "vllm_neuron.serve.worker.NeuronWorker"
COMPILE_ONLY_WORKER = "vllm_neuron.serve.compile_worker.CompileOnlyWorker"

configuration.set_vllm_variables()
# vLLM imports this module before anything of Prometheus.
metrics.share()
note_process_start()
logs.set_level()
stand_in_for_torchvision()
shorten_inspection_errors()


class NeuronPlatform(Platform):
    """An out-of-tree platform whose tensors live in host memory. The graphs' target is another matter."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    simple_compile_backend = "eager"
    device_control_env_var = "NEURON_RT_VISIBLE_CORES"

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def import_kernels(cls) -> None:
        """There are none."""

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return compile_target().name

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """vLLM derives default sizes from it, and those shape graphs: the target's memory, never this host's."""
        return compile_target().memory_bytes or 0

    @classmethod
    def inference_mode(cls) -> AbstractContextManager[Any]:
        # Inference tensors can't be saved in some of torch's transformations.
        return torch.no_grad()

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """There is one."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """torch.manual_seed covers host memory."""

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def opaque_attention_op(cls) -> bool:
        return False

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        return False

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return False

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        for kind in ("mla", "sparse", "mm_prefix", "non_causal", "rswa"):
            if getattr(attn_selector_config, f"use_{kind}", False):
                raise UnsupportedError(f"Attention of the kind {kind} is not supported on the Neuron platform")
        if attn_selector_config.has_sink:
            raise UnsupportedError("Attention with sinks is not supported on the Neuron platform")
        return "vllm_neuron.model.attention.NeuronAttentionBackend"

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        with command_line.refusing():
            checks.refuse_quantization(quant)

    @classmethod
    def validate_environ(cls, hard_fail: bool) -> None:
        """vLLM's check for names that it doesn't know. Ours start as its do, and are checked by :mod:`envs`."""
        from vllm.envs import environment_variables

        ours = {name for variable in envs.VARIABLES for name in (variable.name, *variable.old_names)}
        for name in os.environ:
            if not name.startswith("VLLM_") or name in environment_variables or name in ours:
                continue
            if hard_fail:
                raise ConfigError(f"Unknown environment variable {name}: correct its name, or unset it")
            if not name.startswith("VLLM_NEURON_"):
                logging.getLogger("vllm.neuron").warning("Unknown vLLM environment variable detected: %s", name)

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        """vLLM hands over its parser, and calls without one as it begins to make a configuration."""
        if parser is not None:
            command_line.prepare(parser)
            return
        with command_line.refusing():
            envs.check_environment()
        configuration.extend_configurations()

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        """Raises ``RuntimeError`` in compile-only mode, which has nothing to run."""
        if envs.CPU_COMPILE.get():
            raise RuntimeError(_COMPILE_ONLY)

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        """vLLM's own compiler stays off."""
        from vllm.config import CompilationMode

        checks.warn_about_ignored(vllm_config)
        vllm_config.compilation_config.mode = CompilationMode.NONE

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Refuse what can't be served, and choose the worker."""
        logs.set_level()  # vLLM has set up its handlers by now.
        parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
        with command_line.refusing():
            checks.check(vllm_config)
        if parallel.worker_cls == "auto":
            parallel.worker_cls = COMPILE_ONLY_WORKER if envs.CPU_COMPILE.get() else WORKER
        parallel.disable_custom_all_reduce = True
        scheduler.async_scheduling = False
        if not envs.CPU_COMPILE.get():
            _prepare_serving()
        lifetime.mind_the_server()


_COMPILE_ONLY = (
    f"{envs.CPU_COMPILE.name}=1 only compiles: every graph is in the cache, and nothing can be generated in this mode. "
    "Unset the variable to serve from the cache"
)


def _prepare_serving() -> None:
    # Imports most of vLLM's engine, which a process that makes no requests can do without.
    from vllm_neuron.serve.patches import show_the_process
    from vllm_neuron.serve.token_ids import check_requests

    check_requests()
    show_the_process()
