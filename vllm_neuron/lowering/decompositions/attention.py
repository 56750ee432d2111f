"""The fused operators that ``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention`` call in eval mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload

_aten = torch.ops.aten

# What a mask is of: queries and keys; the keys of each sequence; or the scores themselves.
_OF_POSITIONS, _OF_KEYS = 0, 1


def fused_attention() -> dict[OpOverload, Callable[..., Any]]:
    """Their decompositions."""
    return {
        _aten._transformer_encoder_layer_fwd.default: _encoder_layer,
        _aten._native_multi_head_attention.default: _attention,
        _aten._masked_softmax.default: _masked_softmax,
    }


def _encoder_layer(
    x: Tensor, embed_dim: int, num_heads: int,
    qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor, proj_bias: Tensor,
    use_gelu: bool, norm_first: bool, eps: float,
    norm_weight_1: Tensor, norm_bias_1: Tensor, norm_weight_2: Tensor, norm_bias_2: Tensor,
    ffn_weight_1: Tensor, ffn_bias_1: Tensor, ffn_weight_2: Tensor, ffn_bias_2: Tensor,
    mask: Tensor | None = None, mask_type: int | None = None,
) -> Tensor:  # fmt: skip
    def attend(x: Tensor) -> Tensor:
        weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        attended: Tensor = _attention(x, x, x, embed_dim, num_heads, *weights, mask, False, mask_type=mask_type)[0]
        return attended

    def feed(x: Tensor) -> Tensor:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    def norm_1(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = x + attend(norm_1(x))
        return x + feed(norm_2(x))
    x = norm_1(x + attend(x))
    return norm_2(x + feed(x))


def _attention(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_heads: int,
    qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor, proj_bias: Tensor,
    mask: Tensor | None = None, need_weights: bool = True, average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    parts = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
    q, k, v = (F.linear(x, w, b).view(*x.shape[:2], num_heads, -1).transpose(1, 2) for x, w, b in parts)
    scores = (q * (embed_dim // num_heads) ** -0.5) @ k.transpose(-2, -1)
    weights = scores.softmax(-1) if mask is None else _masked_softmax(scores, mask, -1, mask_type)
    result = F.linear((weights @ v).transpose(1, 2).flatten(-2), proj_weight, proj_bias)
    if not need_weights:
        return result, None
    return result, weights.mean(1) if average_attn_weights else weights


def _masked_softmax(scores: Tensor, mask: Tensor, dim: int | None = None, mask_type: int | None = None) -> Tensor:
    """True, and in a mask of numbers all but zero, is left out. What is left out of a whole row makes it NaN."""
    if mask_type == _OF_POSITIONS:
        mask = mask.view(1, 1, *mask.shape)
    elif mask_type == _OF_KEYS:
        mask = mask.view(mask.shape[0], 1, 1, mask.shape[1])
    return scores.masked_fill(mask.bool(), float("-inf")).softmax(-1 if dim is None else dim)
