"""The worker of ``LLM(...)`` in compile-only mode: a model without values, and the job in place of graphs."""

from __future__ import annotations

from typing import Any

from torch import nn
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from vllm_neuron.errors import CompileError
from vllm_neuron.graphs.model_capture import ModelCapture
from vllm_neuron.jobs.compile_only import compile_model
from vllm_neuron.model.kv import kv_bytes_per_block, planned_blocks
from vllm_neuron.model.step import StepModel
from vllm_neuron.serve.lifetime import end_with_parent, ends_engine


class CompileOnlyWorker(WorkerBase):
    """Answers what vLLM asks until it is ready, from shapes; reads no weights, allocates no caches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._step_model: StepModel | None = None

    @ends_engine
    def init_device(self) -> None:
        """Compile everything, before vLLM asks for more. Raises :class:`CompileError` where a graph is not there."""
        end_with_parent()
        report = compile_model(self.vllm_config)
        if report.exit_code:
            errors = (f"{line.graph}: {line.error}" for line in report.graphs if line.error)
            raise CompileError("\n".join([report.summary(), *errors]))

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """The model's shapes."""
        self._step_model = ModelCapture(self.vllm_config).step_model

    def get_model(self) -> nn.Module:
        """vLLM's model, without values."""
        return self._shapes().model

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """What vLLM plans the KV cache from, by layer name."""
        specs = {name: layer.get_kv_cache_spec(self.vllm_config) for name, layer in self._shapes().layers.items()}
        return {name: spec for name, spec in specs.items() if spec is not None}

    def determine_available_memory(self) -> int:
        """Bytes for exactly the blocks that the graphs are compiled for."""
        step_model = self._shapes()
        return planned_blocks(step_model, self.vllm_config) * kv_bytes_per_block(step_model, self.vllm_config)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Nothing is allocated."""

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Everything was compiled when the device was asked for."""
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What would be served."""
        return ("generate",)

    def _shapes(self) -> StepModel:
        assert self._step_model is not None, "the model before anything else"
        return self._step_model
