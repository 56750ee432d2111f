"""The XLA route: the same canonical graph, lowered a second time and in another way, by tracing it through JAX.

Deprecated, and complete in this folder: nothing but the table in :mod:`vllm_neuron.routes` knows of it. JAX is an
optional extra, and is imported only when something is lowered.
"""

from __future__ import annotations

import importlib.util

from vllm_neuron.errors import ConfigError
from vllm_neuron.lowering.canonical import CanonicalGraph
from vllm_neuron.lowering.module import LoweredModule


def check_available() -> None:
    """Raises ``ConfigError`` where JAX is not installed."""
    missing = [name for name in ("jax", "jaxlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the XLA route needs {' and '.join(missing)}, which this Python does not have. Install the extra 'xla' of "
            "this package (pip install 'vllm-neuron[xla]'), or unset VLLM_NEURON_BACKEND to run the native route"
        )


def lower(graph: CanonicalGraph) -> LoweredModule:
    """A serialized ``HloModuleProto`` for ``graph``, with an input-output alias for each input that is written.

    The same graph gives the same bytes in every process, under every hash seed and in every folder. Raises
    :class:`UnsupportedOpError`, naming the operator and its shapes, for what the route lacks, and
    :class:`ConfigError` where JAX is not installed.
    """
    check_available()
    from vllm_neuron.lowering.xla.trace import lower_to_hlo

    return LoweredModule("hlo", lower_to_hlo(graph), graph.abi)


def to_stablehlo(module: LoweredModule) -> LoweredModule:
    """An HLO module as StableHLO that is safe for IREE, for the same calling convention.

    Raises :class:`ConfigError` where JAX is not installed.
    """
    check_available()
    from vllm_neuron.lowering.xla.conversion import hlo_to_stablehlo

    return LoweredModule("stablehlo", hlo_to_stablehlo(module), module.abi)
