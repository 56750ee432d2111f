"""The unit that is captured, compiled and run: one forward pass of a model, from token ids to logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from vllm_neuron.abi import InputName, TensorSpec, dtype_name
from vllm_neuron.errors import UnsupportedError
from vllm_neuron.model.attention import PagedStep, StepHolder
from vllm_neuron.model.buckets import Bucket
from vllm_neuron.model.constants import name_constants
from vllm_neuron.model.mixtures import open_mixtures, unsupported_in_mixtures

STEP_INPUTS = ("input_ids", "positions", "slot_mapping", "block_tables", "logits_indices")


def step_inputs(bucket: Bucket, block_size: int) -> dict[str, TensorSpec]:
    """The step inputs of a bucket, in the order of ``StepModel.forward``. Padding is zeros: the null block."""
    total = bucket.tokens * bucket.seqs
    shapes = {
        "input_ids": (total,),
        "positions": (total,),
        "slot_mapping": (total,),
        "block_tables": (bucket.seqs, -(-bucket.context // block_size)),
        "logits_indices": (bucket.seqs,),
    }
    return {name: TensorSpec("int64", shape) for name, shape in shapes.items()}


class StepModel(nn.Module):
    """A vLLM model with everything that a step needs as arguments: no state, no forward context to prepare.

    ``layers`` are the attention layers by name, in the order of the caches. Run it inside :meth:`context`.
    Raises ``UnsupportedError`` as :func:`check_layers` does.
    """

    def __init__(self, model: nn.Module, vllm_config: Any) -> None:
        super().__init__()
        self.model = model
        check_layers(model, vllm_config)
        open_mixtures(model)
        name_constants(model)
        found: dict[str, Any] = vllm_config.compilation_config.static_forward_context
        self.layers = {name: layer for name, layer in found.items() if type(layer) is Attention}
        self.block_size: int = vllm_config.cache_config.block_size
        self.holder = StepHolder()
        self._compute_logits: Any = model.compute_logits
        self._forward_context = ForwardContext(found, cast(Any, self.holder), slot_mapping={})
        self.eval()

    @contextmanager
    def context(self) -> Iterator[None]:
        """vLLM's forward context for this model; capture and eager runs happen inside it.

        Functions that the model's code gives to ``torch.compile`` run as they are written.
        """
        with torch.compiler.set_stance("force_eager"), override_forward_context(self._forward_context):
            yield

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        block_tables: torch.Tensor,
        logits_indices: torch.Tensor,
        k_caches: Sequence[torch.Tensor],
        v_caches: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Logits [seqs, vocabulary] of the rows ``logits_indices``; the caches are written in place."""
        caches = {name: (k_caches[i], v_caches[i]) for i, name in enumerate(self.layers)}
        self.holder.step = PagedStep(slot_mapping, positions, block_tables, caches, self.block_size)
        # As vLLM's own runners call it: some models have no defaults for what is None.
        hidden = self.model(input_ids=input_ids, positions=positions, intermediate_tensors=None, inputs_embeds=None)
        self.holder.step = None
        logits: torch.Tensor = self._compute_logits(hidden.index_select(0, logits_indices))
        return logits

    def kv_specs(self, num_blocks: int) -> list[tuple[TensorSpec, TensorSpec]]:
        """K and V cache of each attention layer, in order: [num_blocks * kv heads * block_size, head dim]."""
        specs = []
        for layer in self.layers.values():
            dtype, rows = dtype_name(layer.kv_cache_torch_dtype), num_blocks * layer.num_kv_heads * self.block_size
            specs.append((TensorSpec(dtype, (rows, layer.head_size)), TensorSpec(dtype, (rows, layer.head_size_v))))
        return specs

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters, then buffers, by the model's own names. A tied tensor has its first name only."""
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()


def model_inputs(
    step_model: StepModel, k_caches: Sequence[torch.Tensor], v_caches: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Weights and caches by the names that they have as inputs of a graph: all that stays bound between steps."""
    inputs: dict[str, torch.Tensor] = {InputName.weight(name): each for name, each in step_model.named_weights()}
    for layer, (k_cache, v_cache) in enumerate(zip(k_caches, v_caches, strict=True)):
        inputs |= {InputName.kv(layer, "k"): k_cache, InputName.kv(layer, "v"): v_cache}
    return inputs


def check_layers(model: nn.Module, vllm_config: Any) -> None:
    """Raises ``UnsupportedError`` that names all that a step of this model needs and can't have. Reads no weight.

    That are layers of another kind that keep state, or attend by other rules, and mixtures of other kinds.
    """
    layers: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    others = {
        type(layer).__name__: None
        for layer in layers.values()
        if isinstance(layer, AttentionLayerBase) and type(layer) is not Attention
    }
    unsupported = [*(f"layers of type {name}" for name in others), *unsupported_in_mixtures(model)]
    name = vllm_config.model_config.model
    if unsupported:
        raise UnsupportedError(
            f"The model {name} can't be served on the Neuron platform: {', '.join(unsupported)}, not supported. "
            "Serve another model"
        )
    if not any(type(layer) is Attention for layer in layers.values()):
        raise UnsupportedError(f"The model {name} has no attention layers, and can't be served")
