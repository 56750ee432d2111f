"""Whether the model that a graph was captured from is the model that has been loaded, name by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_neuron.abi import TensorSpec

if TYPE_CHECKING:
    from vllm_neuron.model.step import StepModel


@dataclass(frozen=True)
class LoadedModel:
    """A model that has its values, and its weights and KV caches by the names that graphs use, as graphs take them."""

    step_model: StepModel
    inputs: Mapping[str, TensorSpec]


def difference(expected: Mapping[str, TensorSpec], where: str, loaded: Mapping[str, TensorSpec]) -> str | None:
    """The first weight or KV cache that is not the same in ``expected``, which is ``where`` says, and in the loaded
    model: absent from one of them, of another shape or dtype, or tied to another in one only. None if there is none.
    """
    for name in sorted(expected.keys() | loaded.keys()):
        if expected.get(name) != loaded.get(name):
            there, here = shown(expected.get(name)), shown(loaded.get(name))
            return f"{name} is {there} in {where}, and {here} in the loaded model"
    return None


def shown(spec: TensorSpec | None) -> str:
    """As messages name it."""
    return "absent" if spec is None else str(spec)
