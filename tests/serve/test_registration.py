"""The plugin takes a machine over only where it is asked to, or where nobody else would have it."""

from __future__ import annotations

import pytest

from vllm_neuron import envs
from vllm_neuron.serve import PLATFORM, register

KNOWN_HOST = {"VLLM_TARGET_DEVICE": "cpu"}  # what makes vLLM's own CPU platform available


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, PLATFORM),
        (KNOWN_HOST, None),
        ({**KNOWN_HOST, "VLLM_NEURON_CPU_MODE": "1"}, PLATFORM),
        ({**KNOWN_HOST, "VLLM_NEURON_CPU_MODE": "0"}, None),
        ({**KNOWN_HOST, "VLLM_NEURON_CPU_MODE": ""}, None),
        ({**KNOWN_HOST, "VLLM_NEURON_CPU_MODE": "perhaps"}, PLATFORM),
        ({**KNOWN_HOST, "VLLM_NEURON_CPU_COMPILE": "yes"}, PLATFORM),
        ({**KNOWN_HOST, "VLLM_NEURON_BACKEND": "neuron"}, PLATFORM),
        ({**KNOWN_HOST, "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}, PLATFORM),
        # Settings that don't choose a mode don't ask for the platform.
        ({**KNOWN_HOST, "VLLM_CACHE_ROOT": "/somewhere", "VLLM_NEURON_LOG_LEVEL": "DEBUG"}, None),
    ],
)
def test_activation(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str | None) -> None:
    for variable in envs.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert register() == expected
