"""What this package changes of vLLM's engine and server in a process: each change, its reason, and when it can go.

As ``model/patches/`` is for what builds and configures a model. Looked up in vLLM 0.32.0.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from vllm_neuron.errors import UnsupportedError


@functools.cache
def check_requests(
    check_prompt: Callable[[Any, Any, str | None], None],
    check_params: Callable[[Any, Any], None],
    complete_params: Callable[[Any, Any], None],
) -> None:
    """Check what requests bring before an engine gets them.

    Each function is given vLLM's ``ModelConfig`` or ``VllmConfig`` first: ``check_prompt`` then token ids and the
    request's field that they are from, the others ``SamplingParams``, as the client gave them and as they are sent.

    vLLM has its platform look at a request without saying for which model. Its own check lets an id of the prompt pass
    that the tokenizer or the model has, is skipped without a tokenizer, and sees none that a generation configuration
    adds. The server asks for a generator before it sends a status, and takes from it after, which is too late for a
    400: hence the check where it asks. Can go when ``Platform.validate_request`` is given the configuration.
    """
    from vllm.renderers.base import BaseRenderer
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    process, generate = InputProcessor.process_inputs, AsyncLLM.generate

    def validate_token_ids(renderer: Any, token_ids: Any, *, parameter: str | None = None) -> None:
        check_prompt(renderer.model_config, token_ids, parameter)

    @functools.wraps(process)
    def check_and_process(self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        check_params(self.vllm_config, params)
        request = process(self, request_id, prompt, params, *args, **kwargs)
        if request.sampling_params is not None:
            complete_params(self.vllm_config, request.sampling_params)
        return request

    @functools.wraps(generate)
    def check_and_generate(llm: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        check_params(llm.vllm_config, sampling_params)
        if isinstance(prompt, dict):
            check_prompt(llm.model_config, prompt.get("prompt_token_ids") or (), None)
        return generate(llm, prompt, sampling_params, *args, **kwargs)

    setattr(BaseRenderer, "validate_token_ids", validate_token_ids)  # noqa: B010
    setattr(InputProcessor, "process_inputs", check_and_process)  # noqa: B010
    setattr(AsyncLLM, "generate", check_and_generate)  # noqa: B010


@functools.cache
def refuse_sleep() -> None:
    """Have the engine of this process refuse to sleep while it is still as it was.

    vLLM pauses its scheduler and clears its caches before it asks the worker, and leaves it so when that refuses. Can
    go when it asks first.
    """
    from vllm.v1.engine.core import EngineCore

    sleep = EngineCore.sleep

    def sleep_or_refuse(core: Any, level: int = 1, mode: Any = "abort") -> Any:
        if level >= 1:
            raise UnsupportedError("Sleep mode is not supported on the Neuron platform: weights are bound to graphs")
        return sleep(core, level, mode)

    def release_kv_cache_memory(core: Any) -> None:
        raise UnsupportedError("The KV caches can't be released on the Neuron platform: they are bound to its graphs")

    setattr(EngineCore, "sleep", sleep_or_refuse)  # noqa: B010
    setattr(EngineCore, "release_kv_cache_memory", release_kv_cache_memory)  # noqa: B010


@functools.cache
def show_the_process() -> None:
    """Add ``process_*`` and ``python_*`` of this process to what it shows of shared metrics.

    vLLM, and prometheus-fastapi-instrumentator 8 that it uses, collect the shared ones alone where
    ``PROMETHEUS_MULTIPROC_DIR`` is set, as it always is here. Can go when they collect both.
    """
    from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, multiprocess

    class WithTheProcess(multiprocess.MultiProcessCollector):
        def __init__(self, registry: CollectorRegistry, path: str | None = None) -> None:
            super().__init__(registry, path)  # type: ignore[no-untyped-call]
            for collector in (ProcessCollector, PlatformCollector, GCCollector):
                collector(registry=registry)

    setattr(multiprocess, "MultiProcessCollector", WithTheProcess)  # noqa: B010


@functools.cache
def fail_with_the_engine(module: str) -> None:
    """Have the server whose program is vLLM's ``module`` end with status 1 when its engine has died.

    vLLM takes it down and exits with status 0. Its function returns what is awaited last. Can go when it exits with
    another status.
    """
    program = sys.modules[module]
    build_and_serve = program.build_and_serve

    async def serve(engine: Any, *args: Any, **kwargs: Any) -> Any:
        shutdown, died = engine.shutdown, []

        def note_and_shut_down(*args: Any, **kwargs: Any) -> None:
            died.append(engine.errored)  # Once it is shut down, every engine counts as dead.
            shutdown(*args, **kwargs)

        engine.shutdown = note_and_shut_down
        ending = await build_and_serve(engine, *args, **kwargs)

        async def end() -> None:
            await ending
            if any(died[:1]):
                print("vllm-neuron: error: the engine died; its own error, if it had one, is above", file=sys.stderr)
                raise SystemExit(1)

        return end()

    setattr(program, "build_and_serve", serve)  # noqa: B010


@functools.cache
def drain_before_shutdown() -> None:
    """Have one of several API servers answer what it has begun, within the timeout, before it lets go of the engine.

    vLLM has the process that manages the engine drain it, which is not this one: its requests would wait without end.
    And it closes the connection to the engine before it stops the task that reads from it, which may then log that the
    engine is dead. Can go when each API server waits for its own, and stops that task first.
    """
    from vllm.utils.async_utils import cancel_task_threadsafe
    from vllm.v1.engine.async_llm import AsyncLLM

    shutdown = AsyncLLM.shutdown

    @functools.wraps(shutdown)
    def drain_and_shut_down(llm: Any, timeout: float | None = None) -> None:
        end = time.monotonic() + (timeout or 0)
        # In the main thread, where it is called once more, nothing can be answered in the meantime.
        while threading.current_thread() is not threading.main_thread() and time.monotonic() < end:
            if not llm.get_num_unfinished_requests():
                cancel_task_threadsafe(llm.output_handler)
                break
            time.sleep(0.05)
        shutdown(llm, timeout=timeout)

    setattr(AsyncLLM, "shutdown", drain_and_shut_down)  # noqa: B010
