"""vLLM's worker: weights, KV caches, executor and runner, in the order in which vLLM asks for them."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from vllm_neuron import envs, metrics
from vllm_neuron.errors import EngineFailedError, UnsupportedError
from vllm_neuron.execute.base import GraphExecutor, allocate
from vllm_neuron.execute.eager import EagerExecutor
from vllm_neuron.execute.start_report import StartClock, log_start
from vllm_neuron.host.cpu import usable_cores
from vllm_neuron.model.buckets import buckets_for
from vllm_neuron.model.groups import init_groups_alone
from vllm_neuron.model.kv import check_host_memory, kv_bytes_per_block, planned_blocks
from vllm_neuron.model.loading import load_model
from vllm_neuron.model.patches.building import without_accelerator
from vllm_neuron.model.step import StepModel, model_inputs
from vllm_neuron.serve.lifetime import end_with_parent, ends_engine, free_at_exit
from vllm_neuron.serve.patches import refuse_sleep
from vllm_neuron.serve.runner import NeuronRunner

if TYPE_CHECKING:
    from vllm_neuron.graphs.graph_set import GraphSet

logger = logging.getLogger("vllm.neuron.worker")


class NeuronWorker(WorkerBase):
    """One rank: a model, its caches, and what runs its graphs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse_sleep()
        self._started = time.monotonic()
        self._clock = StartClock()
        self._step_model: StepModel | None = None
        self._runner: NeuronRunner | None = None
        self._executor: GraphExecutor | None = None
        self._graphs: GraphSet | None = None
        self._failure: str | None = None

    @ends_engine
    def init_device(self) -> None:
        """The process's threads, seed and process group."""
        without_accelerator()
        if not os.environ.get("OMP_NUM_THREADS"):
            torch.set_num_threads(usable_cores())
        self.device = torch.device("cpu")
        if not envs.CPU_MODE.get():
            # CPU mode loads nothing of the compiler.
            from vllm_neuron.graphs.graph_set import GraphSet
            from vllm_neuron.graphs.prepare import Policy

            # Capture workers are forked here: before gloo and IREE have threads.
            with self._clock.phase("recall"):
                self._graphs = GraphSet(self.vllm_config, Policy.serving())
        end_with_parent()
        init_groups_alone(self.vllm_config)
        set_random_seed(self.model_config.seed)

    @ends_engine
    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Build the model and read its weights."""
        started = time.monotonic()
        if load_dummy_weights:
            self.vllm_config.load_config.load_format = "dummy"
        # vLLM collects garbage twice while it loads a model. What has been imported stays, and need not be looked at.
        gc.freeze()
        free_at_exit()
        with self._clock.phase("weights"), set_current_vllm_config(self.vllm_config):
            model = load_model(self.vllm_config)
        self._step_model = StepModel(model, self.vllm_config)
        seconds = time.monotonic() - started
        metrics.set_model_load_time(seconds)
        logger.info("Loaded %.2f GiB of weights in %.1f s", self._weight_bytes() / 2**30, seconds)

    def get_model(self) -> nn.Module:
        """vLLM's model, without what this package puts around it."""
        return self._loaded().model

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """What vLLM plans the KV cache from, by layer name."""
        specs = {name: layer.get_kv_cache_spec(self.vllm_config) for name, layer in self._loaded().layers.items()}
        return {name: spec for name, spec in specs.items() if spec is not None}

    def determine_available_memory(self) -> int:
        """Bytes for exactly the blocks that the graphs are compiled for. Nothing on this host is measured."""
        return self._kv_blocks() * self._kv_bytes_per_block()

    @ends_engine
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV caches, and make the executor over them."""
        step_model, blocks, per_block = self._loaded(), kv_cache_config.num_blocks, self._kv_bytes_per_block()
        if len(kv_cache_config.kv_cache_groups) != 1 or blocks != self._kv_blocks():
            raise UnsupportedError("A model whose layers need KV caches of several kinds is not supported")
        check_host_memory(blocks, per_block)
        with self._clock.phase("kv_caches"):
            caches = [(allocate(k), allocate(v)) for k, v in step_model.kv_specs(blocks)]
        self._executor = self._make_executor([k for k, _ in caches], [v for _, v in caches])
        self._runner = NeuronRunner(self.vllm_config, buckets_for(self.vllm_config), self._executor)

    def update_max_model_len(self, max_model_len: int) -> None:
        """Only called where vLLM fits the length to the memory, which the configuration check refuses."""
        raise UnsupportedError("max_model_len can't change after the start: it is a part of every graph's shape")

    @ends_engine
    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Make every bucket ready."""
        assert self._executor is not None, "caches before graphs"
        started = time.monotonic()
        for bucket in buckets_for(self.vllm_config):
            metrics.count_execution(bucket.name, 0)
        metrics.count_padding(0, 0)
        with set_current_vllm_config(self.vllm_config):
            self._executor.prepare()
        # Neither loading nor preparing may change what is sampled.
        set_random_seed(self.model_config.seed)
        metrics.set_startup_time(time.monotonic() - self._started)
        self._log_start()
        return CompilationTimes(language_model=time.monotonic() - started, encoder=0.0)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run a step. None means that ``sample_tokens`` follows."""
        assert self._runner is not None, "caches before requests"
        with self._step():
            return self._runner.execute(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """The output of the step that was run last."""
        assert self._runner is not None, "caches before requests"
        with self._step():
            return self._runner.sample(grammar_output)

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Generation only."""
        return ("generate",)

    def synchronize_device(self) -> None:
        """A step has ended when its call returns."""

    def execute_dummy_batch(self) -> None:
        """Only for data parallelism, which is refused."""

    def reset_encoder_cache(self) -> None:
        """There is no encoder."""

    def take_draft_token_ids(self) -> None:
        """There is no speculative decoding."""

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        """vLLM's profiling endpoints."""
        raise UnsupportedError("Profiling through vLLM is not supported on the Neuron platform: use iree-profile")

    def sleep(self, level: int = 1) -> None:
        """Weights and caches are bound to the graphs for good."""
        raise UnsupportedError("Sleep mode is not supported on the Neuron platform")

    def wake_up(self, tags: list[str] | None = None) -> None:
        """See ``sleep``."""
        raise UnsupportedError("Sleep mode is not supported on the Neuron platform")

    def list_loras(self) -> set[int]:
        """LoRA is refused, so there are none."""
        return set()

    def shutdown(self) -> None:
        """Let go of everything; the process may live on."""
        self._runner = self._executor = self._step_model = None

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        """Raises :class:`EngineFailedError` in every step after one that failed.

        The scheduler takes what it scheduled for done. It would wait for that step's tokens without end where the
        engine lives in the caller's process, and serve others from blocks that were never written.
        """
        if self._failure is not None:
            raise EngineFailedError(
                f"an earlier step of this engine failed ({self._failure}), and it can't go on: make a new LLM"
            )
        try:
            yield
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise

    def _make_executor(self, k_caches: list[torch.Tensor], v_caches: list[torch.Tensor]) -> GraphExecutor:
        if self._graphs is None:
            return EagerExecutor(self._loaded(), k_caches, v_caches)
        from vllm_neuron.execute.compiled import CompiledExecutor

        model = self._loaded()
        return CompiledExecutor(self._graphs, model, model_inputs(model, k_caches, v_caches), self._clock)

    def _log_start(self) -> None:
        graphs = {} if self._graphs is None else self._graphs.facts()
        buckets = [bucket.name for bucket in buckets_for(self.vllm_config)]
        log_start(self._clock.facts(self.vllm_config, buckets, graphs))

    def _loaded(self) -> StepModel:
        assert self._step_model is not None, "the model before anything else"
        return self._step_model

    def _kv_bytes_per_block(self) -> int:
        return kv_bytes_per_block(self._loaded(), self.vllm_config)

    def _kv_blocks(self) -> int:
        return planned_blocks(self._loaded(), self.vllm_config)

    def _weight_bytes(self) -> int:
        return sum(weight.nbytes for _, weight in self._loaded().named_weights())
