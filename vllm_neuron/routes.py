"""The compilation route: which it is, what lowers its graphs, and its default optimization level.

The variable is read once, in the first process. Its multiprocessing children are handed the result by environment, so
that they agree with it whatever has become of the variable since.
"""

from __future__ import annotations

import enum
import functools
import importlib
import logging
import multiprocessing
import os
from typing import TYPE_CHECKING, Any

from vllm_neuron import envs

if TYPE_CHECKING:
    from vllm_neuron.lowering.canonical import CanonicalGraph
    from vllm_neuron.lowering.module import LoweredModule

logger = logging.getLogger("vllm.neuron.routes")

_HANDED_DOWN = "_VLLM_NEURON_ROUTE"


class Route(enum.Enum):
    """Each value is the name of the route's Dynamo backend."""

    NATIVE = "neuron_native"
    XLA = "vllm_neuron"


ACCEPTED = (Route.NATIVE.value, "neuron", Route.XLA.value)
"""What the variable can say. Anything else is warned about, and runs the native route."""

# What lowers a route's graphs. Nothing else names the deprecated route's folder.
_LOWERINGS = {
    Route.NATIVE: "vllm_neuron.lowering.native.lower",
    Route.XLA: "vllm_neuron.lowering.xla",
}


def check_available(route: Route) -> None:
    """Raises ``ConfigError`` that says what to install where ``route`` can't lower anything in this Python."""
    if route is Route.XLA:
        _lowering(route).check_available()


def lower(graph: CanonicalGraph, route: Route | None = None) -> LoweredModule:
    """Lower ``graph`` by ``route``, by default the one in force. Raises as that route's own ``lower`` does."""
    module: LoweredModule = _lowering(route or current_route()).lower(graph)
    return module


def to_stablehlo(module: LoweredModule) -> LoweredModule:
    """An HLO module as StableHLO, for the compiler that takes nothing else."""
    converted: LoweredModule = _lowering(Route.XLA).to_stablehlo(module)
    return converted


def _lowering(route: Route) -> Any:
    return importlib.import_module(_LOWERINGS[route])


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
        warn_of_deprecation()
        return Route.XLA
    if value is not None and value not in ACCEPTED:
        logger.warning("%s='%s' is not a valid route. The native route runs now.", envs.BACKEND.name, value)
    return Route.NATIVE


@functools.cache
def warn_of_deprecation() -> None:
    """Say once that the XLA route is going to go."""
    logger.warning(
        "The XLA route (%s=%s) is deprecated. Unset the variable to run the native route.",
        envs.BACKEND.name,
        Route.XLA.value,
    )


def default_level(route: Route) -> int:
    """The optimization level where neither a user nor vLLM gives one: vLLM's default, lowered on the XLA route."""
    return 1 if route is Route.XLA else 2
