"""Operators that are taken apart before they are lowered, and sums of more tensors than one call may read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_cases import Case, below, f32
from test_ops import check
from torch import Tensor, nn

MASKS: dict[int | None, Tensor | None] = {
    None: None,
    0: torch.ones(5, 5, dtype=torch.bool).triu(1),
    1: torch.tensor([[False] * 5, [True] * 5]),
    2: f32(2, 4, 5, 5) > 0.5,
}


def encoder(**options: Any) -> Callable[..., Any]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, **options)
    whole = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval().requires_grad_(False)

    def run(x: Tensor, padding: Tensor, causal: Tensor) -> Any:
        return whole(x), whole(x, src_key_padding_mask=padding), whole(x, mask=causal, is_causal=True)

    return run


def fused_attention(x: Tensor, *weights: Tensor) -> list[Tensor]:
    return [
        result
        for kind, mask in MASKS.items()
        for average in (True, False)
        for result in torch._native_multi_head_attention(
            x, x, x, 16, 4, *weights, mask, average_attn_weights=average, mask_type=kind
        )
    ]


def sums(*tensors: Tensor) -> list[Tensor]:
    pairs = list(zip(tensors[::2], tensors[1::2], strict=True))
    return [
        sum(tensors, torch.zeros(())),
        sum((x[0] for x in tensors), torch.zeros(())) + sum((x[0, 0] for x in tensors), torch.zeros(())),
        sum((x.abs() for x in tensors), torch.zeros(())).amax(0),
        torch.stack([torch.where(x > y, x, y) for x, y in pairs]).sum(0),
    ]


ENCODER_INPUTS = (
    f32(2, 5, 16),
    torch.tensor([[False] * 5, [False] * 3 + [True] * 2]),
    nn.Transformer.generate_square_subsequent_mask(5),
)
W = f32(6, 4, 1, 1).bfloat16()
NAN = torch.tensor([1.0, -2.0, math.nan, 3.0])
POINTS = torch.tensor([0.0, -0.0, 1.0, -2.0, math.inf, -math.inf, math.nan])

CASES: dict[str, Case] = {
    "encoder": (encoder(), ENCODER_INPUTS),
    "encoder, norm first": (encoder(norm_first=True, activation="gelu"), ENCODER_INPUTS),
    "fully padded": (encoder(), (ENCODER_INPUTS[0], torch.tensor([[False] * 5, [True] * 5]), ENCODER_INPUTS[2])),
    "fused attention": (fused_attention, (f32(2, 5, 16), f32(48, 16) / 4, f32(48), f32(16, 16) / 4, f32(16))),
    "sum of seventy": (sums, tuple(below(9, 4, 4).float() for _ in range(70))),
    "clamp between tensors": (
        lambda x, i, d, row: (
            x.clamp(i, d), x.clamp(min=row), x.clamp(max=d), i.clamp(row, d), x.half().clamp(i, row),
            x.clamp(torch.tensor(0), torch.tensor(2)),
        ),
        (f32(4, 5), below(2, 4, 5) - 1, torch.rand(5, dtype=torch.float64), f32(1, 5)),
    ),
    "clamp of truths": (
        lambda a, b: (a.clamp(min=b), a.clamp(max=b), torch.maximum(a, b), torch.minimum(a, b)),
        (f32(8) > 0, f32(8) > 0),
    ),
    "clamp to NaN": (lambda x: (x.clamp(min=math.nan), x.clamp(0.0, math.nan)), (NAN,)),
    "clamp to NaN in 16 bits": (
        lambda x, y: (x.clamp(min=math.nan), x.clamp(0.0, math.nan), y.clamp(max=math.nan)),
        (NAN.bfloat16(), NAN.half()),
    ),
    "gelu in 64 bits": (
        lambda x: (F.gelu(x, approximate="tanh"), F.gelu(x)), (torch.linspace(-9, 9, 41, dtype=torch.float64),)
    ),
    "gelu in 16 bits": (
        lambda x: (F.gelu(x, approximate="tanh"), F.gelu(x), F.gelu(x.half())), (f32(40).bfloat16(),)
    ),
    "several steps in 16 bits": (
        lambda x, y, z: (
            torch.addcdiv(x, y, z, value=0.3), torch.addcmul(x, y, z, value=0.3), torch.lerp(x, y, 0.3),
            F.selu(x), F.mish(x), F.softplus(x), torch.logaddexp(x, y), F.logsigmoid(x),
        ),
        (f32(40).half(), f32(40).half(), f32(40).half().abs() + 1),
    ),
    "truth of floats": (
        lambda x: (x.bool(), x > 0, x <= 0, x.masked_fill((x * 0).bool(), 7.0)),
        (torch.tensor([0.0, -0.0, 1e-45, -1.0, 3.0]),),
    ),
    "points without an angle": (
        lambda y, x: torch.atan2(y[:, None], x), (POINTS, POINTS)
    ),
    "shifts of stretched tensors": (
        lambda x, y: (x << y, x >> y, (x << 1) >> y), (below(9, 5, 1), below(4, 5))
    ),
    "take and unfold without dimensions": (
        lambda x, i: (x.take(i), x[0].take(torch.tensor(0)), x[0].unfold(0, 1, 1)), (f32(8), torch.tensor(-3))
    ),
    "least of sizes": (lambda x: (torch.linalg.vector_norm(x, -math.inf), x.norm(math.inf, 0)), (f32(4, 5),)),
    "convolutions that are products": (
        lambda x, w, y, v, z: (
            F.conv1d(x, w[..., 0]), F.conv2d(x[..., None], w), F.conv1d(y, v), F.conv1d(z.float(), v.float())
        ),
        (f32(1, 4, 8).bfloat16(), W, f32(2, 2, 4).half(), f32(2, 2, 3).half(), f32(2, 2, 4).half()),
    ),
    "product over nothing": (lambda x, y: (x[:, :0] @ y[:0], x[:0] @ y), (f32(4, 5), f32(5, 3))),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["neuron_native", pytest.param("vllm_neuron", marks=pytest.mark.slow)])
def test_equals_eager(backend: str) -> None:
    check(CASES, backend)
