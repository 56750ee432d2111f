"""The compilation route: which it is, which optimization level it runs at, and the lines that say so.

The variable is read once, in the first process. Its multiprocessing children are handed the result by environment, so
that they agree with it whatever has become of the variable since.
"""

from __future__ import annotations

import enum
import functools
import logging
import multiprocessing
import os

from vllm_neuron import envs

logger = logging.getLogger("vllm.neuron.routes")

_HANDED_DOWN = "_VLLM_NEURON_ROUTE"


class Route(enum.Enum):
    """Each value is the name of the route's Dynamo backend."""

    NATIVE = "neuron_native"
    XLA = "vllm_neuron"


@functools.cache
def current_route() -> Route:
    """The route in force in this process and its children. Warns of a bad value, and of the deprecated route, once."""
    handed = os.environ.get(_HANDED_DOWN)
    if handed and multiprocessing.parent_process() is not None:
        return Route(handed)
    route = _read()
    os.environ[_HANDED_DOWN] = route.value
    return route


def _read() -> Route:
    value = envs.BACKEND.get()
    if value == Route.XLA.value:
        logger.warning("The XLA route (%s=%s) is deprecated. Unset the variable to run the native route.",
                       envs.BACKEND.name, value)  # fmt: skip
        return Route.XLA
    if value not in (None, Route.NATIVE.value, "neuron"):
        logger.warning("%s='%s' is not a valid route. The native route runs now.", envs.BACKEND.name, value)
    return Route.NATIVE


def optimization_level(route: Route, level: int, explicit: bool) -> tuple[int, str]:
    """The level that ``route`` runs at, and the line for the start-up log.

    ``level`` is vLLM's; ``explicit`` says whether the user chose it. The XLA route lowers a default to 1.
    """
    if explicit:
        return level, f"Explicit --optimization-level: keeping O{level}"
    if route is Route.XLA:
        return 1, "Defaulting optimization level to O1 on the XLA route"
    return level, f"Using default optimization level O{level} on the Neuron native route"


@functools.cache
def log_once(line: str) -> None:
    """Log a start-up line once, in the first process: vLLM completes its configuration again in others."""
    if multiprocessing.parent_process() is None:
        logger.info(line)
