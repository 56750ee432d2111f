"""CPU mode: the step model run by plain PyTorch, in the same buckets as the compiled graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_neuron.execute.base import Inputs
from vllm_neuron.model.buckets import Bucket
from vllm_neuron.model.step import STEP_INPUTS, StepModel


class EagerExecutor:
    """A ``GraphExecutor`` without graphs: no compiler, no artifacts."""

    def __init__(
        self, step_model: StepModel, k_caches: Sequence[torch.Tensor], v_caches: Sequence[torch.Tensor]
    ) -> None:
        self._step_model = step_model
        self._k_caches, self._v_caches = list(k_caches), list(v_caches)

    def prepare(self) -> None:
        """Nothing to do."""

    def run(self, bucket: Bucket, inputs: Inputs) -> torch.Tensor:
        """Logits [seqs, vocabulary] of the step; writes the KV caches."""
        tensors = [torch.from_numpy(inputs[name]) for name in STEP_INPUTS]
        with torch.no_grad(), self._step_model.context():
            logits: torch.Tensor = self._step_model(*tensors, self._k_caches, self._v_caches)
        return logits
