"""The optimization level of a configuration: what the user chose or the route's default, settled as it is made.

vLLM notes nowhere whether a level was chosen: its default is a level too, and a finished configuration holds a member
of ``OptimizationLevel`` whichever it was. The last place that can tell is the constructor of ``VllmConfig``, which is
given that member itself for the default, and what the user gave otherwise: a number in ``LLM(...)``, text on a command
line. So the level is settled there, before it is validated; see ``patches.configuration``. From then on it is a plain
value of the configuration, which goes to vLLM's other processes with it.

Looked up in vLLM 0.32 and 0.33. This can go when a configuration says what of it was given.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
from typing import Any

from vllm_neuron.routes import Route, current_route, default_level

logger = logging.getLogger("vllm.neuron.routes")


def chosen_level(given: Any) -> int | None:
    """The level that the user chose, from what vLLM's arguments hold; None for the default and for what is none."""
    from vllm.config.vllm import OptimizationLevel, VllmConfig

    if given is VllmConfig.optimization_level:
        return None
    try:
        return int(OptimizationLevel(int(given)))
    except (TypeError, ValueError):
        return None  # vLLM refuses it.


def settle_level(arguments: dict[str, Any]) -> None:
    """Put the level that the route runs at into the ``arguments`` of a new ``VllmConfig``, and log which it is.

    vLLM makes a configuration anew to change a part of a finished one, which has an identity: its level stays.
    """
    from vllm.config.vllm import VllmConfig

    if arguments.get("instance_id"):
        return
    default = VllmConfig.optimization_level
    given, route = arguments.get("optimization_level", default), current_route()
    if (chosen := chosen_level(given)) is not None:
        _log_once(f"Explicit --optimization-level: keeping O{chosen}")
        arguments["optimization_level"] = chosen
    elif given is default and route is Route.XLA:
        level = arguments["optimization_level"] = default_level(route)
        _log_once(f"Defaulting optimization level to O{level} on the XLA route")
    elif given is default:
        _log_once(f"Using default optimization level O{int(default)} on the Neuron native route")


@functools.lru_cache(maxsize=256)
def _log_once(line: str) -> None:
    """Log a start-up line once, in the first process: vLLM makes its configuration again in others."""
    if multiprocessing.parent_process() is None:
        logger.info(line)
