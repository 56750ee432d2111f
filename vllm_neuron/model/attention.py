"""Paged attention in plain tensor operations: static shapes, and KV caches that are inputs of the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
)

from vllm_neuron.errors import UnsupportedError

# Finite, so that a row with nothing to attend to is an average and not NaN.
MASKED = -1e30


@dataclass
class PagedStep:
    """What attention needs to know of a step of B sequences with Q query tokens each.

    slot_mapping: int64 [B * Q], where each new token's key and value go; positions: int64 [B * Q];
    block_tables: int64 [B, blocks]; caches: per layer name, K and V as rows of [head dim]: block by block, in a block
    KV head by KV head, and of a head one row for each token. So a sequence's keys of one head are read in pieces of
    ``block_size`` rows, in the order in which attention wants them.
    """

    slot_mapping: torch.Tensor
    positions: torch.Tensor
    block_tables: torch.Tensor
    caches: dict[str, tuple[torch.Tensor, torch.Tensor]]
    block_size: int


class StepHolder(AttentionMetadata):
    """Hands a step to the attention layers through vLLM's forward context, whatever the step."""

    def __init__(self) -> None:
        self.step: PagedStep | None = None


class NeuronAttentionBackend(AttentionBackend):
    """The attention that vLLM's layers call on this platform."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[NeuronAttention]:
        return NeuronAttention

    @staticmethod
    def get_builder_cls() -> type[_NoMetadataBuilder]:
        return _NoMetadataBuilder


class _NoMetadataBuilder(AttentionMetadataBuilder[StepHolder]):
    """vLLM asks a backend for one; here the runner prepares every step itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def build(self, *args: Any, **kwargs: Any) -> StepHolder:
        raise NotImplementedError("attention metadata comes from the runner's step inputs")


class NeuronAttention(AttentionImpl[StepHolder]):
    """Causal grouped-query attention over a paged cache, with sliding window and soft cap."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **extra: Any,
    ) -> None:
        asked = {
            "ALiBi": alibi_slopes is not None,
            f"{attn_type} attention": attn_type != AttentionType.DECODER,
            "KV caches shared between layers": kv_sharing_target_layer_name is not None,
            f"--kv-cache-dtype {kv_cache_dtype}": kv_cache_dtype not in ("auto", "float16", "bfloat16", "float32"),
            **{f"attention with {name}": value is not None for name, value in extra.items()},
        }
        for feature, used in asked.items():
            if used:
                raise UnsupportedError(f"{feature} is not supported on the Neuron platform")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window
        self.logits_soft_cap = logits_soft_cap
        self.kv_cache_dtype = kv_cache_dtype

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: StepHolder,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes the step's keys and values to the cache, and the attention over the cache to ``output``.

        query, output: [B * Q, heads, head dim]; key, value: [B * Q, kv heads, head dim].
        """
        step = attn_metadata.step
        assert step is not None, "attention outside of a step"
        k_cache, v_cache = step.caches[layer.layer_name]
        rows = _rows(step.slot_mapping, self.num_kv_heads, step.block_size)
        k_cache.index_put_((rows,), key)
        v_cache.index_put_((rows,), value)
        keys = _context(k_cache, step.block_tables, self.num_kv_heads, step.block_size)
        values = _context(v_cache, step.block_tables, self.num_kv_heads, step.block_size)
        output.copy_(self._attend(query, keys, values, step.positions))
        return output

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """[B * Q, heads, head dim] from keys and values of [B, kv heads, S, head dim]."""
        seqs, kv_heads, context, _ = keys.shape
        tokens, group = query.shape[0] // seqs, self.num_heads // kv_heads
        # The heads that share keys become rows of one matrix, so that keys and values are never repeated.
        rows = query.view(seqs, tokens, kv_heads, group, self.head_size).permute(0, 2, 3, 1, 4)
        rows = rows.reshape(seqs * kv_heads, group * tokens, self.head_size)
        # One batch dimension: then the transposition of the keys is the product's own, and not a copy before it.
        scores = torch.bmm(rows.float(), keys.float().flatten(0, 1).transpose(1, 2)) * self.scale
        if self.logits_soft_cap:
            scores = self.logits_soft_cap * torch.tanh(scores / self.logits_soft_cap)
        seen = self._visible(positions.view(seqs, 1, 1, tokens, 1), context)
        scores = scores.view(seqs, kv_heads, group, tokens, context).masked_fill(~seen, MASKED)
        # Dividing after the second product touches head_dim values per row instead of the whole context.
        weights = torch.exp(scores - scores.amax(-1, keepdim=True)).view(seqs * kv_heads, group * tokens, context)
        mixed = torch.bmm(weights, values.float().flatten(0, 1)) / weights.sum(-1, keepdim=True)
        mixed = mixed.view(seqs, kv_heads, group, tokens, values.shape[-1]).permute(0, 3, 1, 2, 4)
        return mixed.reshape(seqs * tokens, self.num_heads, values.shape[-1]).to(query.dtype)

    def _visible(self, positions: torch.Tensor, context: int) -> torch.Tensor:
        """bool [B, 1, 1, Q, S]: which context positions each query token attends to."""
        places = torch.arange(context, device=positions.device).view(1, 1, 1, 1, context)
        seen = places <= positions
        if self.sliding_window is not None:
            seen = seen & (places > positions - self.sliding_window)
        return seen


def _rows(slots: torch.Tensor, heads: int, block_size: int) -> torch.Tensor:
    """int64 [tokens, heads]: the cache's row of each token and KV head. ``slots``: int64 [tokens]."""
    blocks = torch.div(slots, block_size, rounding_mode="floor")
    places = slots - blocks * block_size
    head = torch.arange(heads, device=slots.device)
    return (blocks.unsqueeze(1) * heads + head) * block_size + places.unsqueeze(1)


def _context(cache: torch.Tensor, block_tables: torch.Tensor, heads: int, block_size: int) -> torch.Tensor:
    """The sequences' rows of the cache in order of position: [B, heads, S, head dim]."""
    seqs, blocks = block_tables.shape
    dim = cache.shape[-1]
    head = torch.arange(heads, device=cache.device).view(1, heads, 1)
    pieces = block_tables.unsqueeze(1) * heads + head
    found = cache.view(-1, block_size * dim).index_select(0, pieces.view(-1))
    return found.view(seqs, heads, blocks * block_size, dim)
