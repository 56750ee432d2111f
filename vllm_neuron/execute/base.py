"""What the runner needs of whatever runs the graphs."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from vllm_neuron.abi import TensorSpec
from vllm_neuron.model.buckets import Bucket
from vllm_neuron.model.step import step_inputs

Inputs = dict[str, npt.NDArray[np.int64]]


class GraphExecutor(Protocol):
    """Runs the step of a bucket over weights and KV caches that it was given at construction."""

    def prepare(self) -> None:
        """Make every bucket ready to run, so that none is compiled while requests wait."""

    def run(self, bucket: Bucket, inputs: Inputs) -> torch.Tensor:
        """Logits [seqs, vocabulary] of the step; writes the KV caches.

        ``inputs`` are the arrays of ``step_inputs(bucket)`` by name. For a bucket they are the same arrays in every
        call, 64-byte aligned, so that they can be bound once. The result must not share storage with a later one.
        """


def staging(bucket: Bucket, block_size: int) -> Inputs:
    """Zeroed arrays for the step inputs of a bucket, 64-byte aligned."""
    return {name: allocate(spec).numpy() for name, spec in step_inputs(bucket, block_size).items()}


def allocate(spec: TensorSpec) -> torch.Tensor:
    """A zeroed tensor in a storage of its own, 64-byte aligned as torch's CPU allocations are."""
    tensor = torch.zeros(spec.shape, dtype=spec.torch_dtype)
    assert tensor.data_ptr() % 64 == 0, "torch allocated unaligned memory"
    return tensor
