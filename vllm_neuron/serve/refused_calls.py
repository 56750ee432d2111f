"""Calls of vLLM's API that this platform refuses before they have an effect."""

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.engine.core import EngineCore

from vllm_neuron.errors import UnsupportedError


@functools.cache
def refuse_before_an_effect() -> None:
    """Have the engine of this process refuse what its worker would, while it is still as it was.

    vLLM 0.32 pauses its scheduler and clears its caches before it asks the worker, and leaves it so when that refuses.
    """
    sleep = EngineCore.sleep

    def sleep_or_refuse(core: EngineCore, level: int = 1, mode: Any = "abort") -> Any:
        if level >= 1:
            raise UnsupportedError("Sleep mode is not supported on the Neuron platform: weights are bound to graphs")
        return sleep(core, level, mode)

    def release_kv_cache_memory(core: EngineCore) -> None:
        raise UnsupportedError("The KV caches can't be released on the Neuron platform: they are bound to its graphs")

    setattr(EngineCore, "sleep", sleep_or_refuse)  # noqa: B010
    setattr(EngineCore, "release_kv_cache_memory", release_kv_cache_memory)  # noqa: B010
