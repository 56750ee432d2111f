"""What a loaded artifact is to the rest, and the check of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from vllm_neuron.abi import Abi, TensorSpec


class BoundCall(Protocol):
    """An executable with its inputs fixed in memory."""

    def __call__(self) -> list[torch.Tensor]:
        """Runs once on what the inputs hold now. The results, without the mutated inputs, each in fresh storage."""


class Executable(Protocol):
    """A loaded artifact. For one caller at a time."""

    abi: Abi

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs once. Mutated inputs are changed in place; the results come in fresh storage.

        Any alignment and any strides will do: what the artifact can't take as it is, is copied in, and back out.
        Raises ``TypeError`` or ``ValueError`` that names the input for one that does not fit :attr:`abi`.
        """

    def bind(self, inputs: Sequence[torch.Tensor]) -> BoundCall:
        """Fixes the inputs in memory, for many calls: their contents may change, their storage may not.

        Raises as a call does, and ``ValueError`` for an input that would have to be copied.
        """


def check_inputs(abi: Abi, inputs: Sequence[torch.Tensor]) -> None:
    """Raises ``TypeError`` or ``ValueError`` that says which input does not fit, what it is, and what is expected."""
    if len(inputs) != len(abi.inputs):
        raise TypeError(f"the graph takes {len(abi.inputs)} inputs, and {len(inputs)} were given")
    for index, (tensor, spec) in enumerate(zip(inputs, abi.inputs, strict=True)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"input {index} is a {type(tensor).__name__}; expected a tensor {spec}")
        if tensor.shape != spec.shape or tensor.dtype != spec.torch_dtype:
            raise ValueError(f"input {index} is {TensorSpec.of(tensor)}; expected {spec}")
        if tensor.device.type != "cpu":
            raise ValueError(f"input {index} is on {tensor.device}; expected a tensor {spec} on the CPU")
