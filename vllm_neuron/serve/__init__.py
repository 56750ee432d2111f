"""vLLM's platform for this package. Importing it imports neither vLLM nor torch."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from vllm_neuron import envs, targets
from vllm_neuron.errors import ConfigError

PLATFORM = "vllm_neuron.serve.platform.NeuronPlatform"
_GROUP = "vllm.platform_plugins"
_asking = False


def register() -> str | None:
    """vLLM's plugin entry point: the name of the platform class, or None to leave the machine alone.

    The platform is used where there is a Neuron device, where one of our mode variables asks for it, and where vLLM
    would otherwise have no platform. On a host that vLLM knows a platform for, it waits to be asked.
    """
    if _asked_for() or targets.has_neuron_device():
        return PLATFORM
    return None if _another_platform() else PLATFORM


def _asked_for() -> bool:
    return envs.BACKEND.is_set() or envs.TARGET_OVERRIDE.is_set() or _on(envs.CPU_COMPILE) or _on(envs.CPU_MODE)


def _on(variable: envs.Variable[bool]) -> bool:
    try:
        return variable.get()
    except ConfigError:
        # vLLM swallows errors of a plugin that it looks for. The platform reports it when it starts.
        return True


def _another_platform() -> bool:
    """True if vLLM, or another plugin, has a platform for this host."""
    global _asking
    if _asking:  # Another plugin asks the same question of us: one of the two has to answer first.
        return False
    from vllm import platforms

    others = [entry.load for entry in entry_points(group=_GROUP) if not _is_ours(entry)]
    _asking = True
    try:
        return any(probe() for probe in platforms.builtin_platform_plugins.values()) or any(load()() for load in others)
    finally:
        _asking = False


def _is_ours(entry: EntryPoint) -> bool:
    return entry.value.startswith("vllm_neuron.")
