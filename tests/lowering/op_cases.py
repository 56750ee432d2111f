"""The operators that models are made of, in the forms they come in: a function of tensors and its inputs, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_generator = torch.Generator().manual_seed(0)


def f32(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_generator)


def below(limit: int, *shape: int) -> Tensor:
    return torch.randint(0, limit, shape, generator=_generator)


def ints(*values: int) -> Tensor:
    return torch.tensor(values)


def put(cache: Tensor, *arguments: Any) -> Tensor:
    """A cache write as attention layers do it, on a copy."""
    *indices, values = arguments
    return cache.clone().index_put_(tuple(indices), values)


def setitem(x: Tensor, index: Any, value: Any) -> Tensor:
    x = x.clone()
    x[index] = value
    return x


X = f32(4, 16)
SPECIAL = torch.tensor([0.0, -0.0, 1.5, float("nan"), float("inf"), -float("inf"), -2.5, 1.0])
TIES = torch.tensor([3.0, 1.0, 3.0, 2.0, 1.0, 3.0, 1.0, 2.0])

Case = tuple[Callable[..., Any], tuple[Any, ...]]

INDEXING: dict[str, Case] = {
    "embedding": (lambda w, i: F.embedding(i, w), (f32(32, 8), below(32, 2, 3))),
    "embedding padding_idx": (lambda w, i: F.embedding(i, w, padding_idx=0), (f32(32, 8), below(32, 2, 3))),
    "index_put 1d": (put, (f32(32, 2, 4), ints(3, 9, 1), f32(3, 2, 4))),
    "index_put int32": (put, (f32(32, 2, 4), ints(3, 9, 1).int(), f32(3, 2, 4))),
    "index_put 2d": (put, (f32(8, 4, 2, 4), ints(3, 7, 1), ints(0, 3, 2), f32(3, 2, 4))),
    "index_put broadcast": (put, (f32(8, 4, 2, 4), ints(3, 7)[:, None], ints(0, 3, 2)[None], f32(2, 3, 2, 4))),
    "index_put accumulate": (
        lambda c, s, k: c.index_put((s,), k, accumulate=True),
        (f32(32, 2), ints(3, 3, 1), f32(3, 2)),
    ),
    "index_put negative": (put, (f32(32, 2, 4), ints(3, -1, -32), f32(3, 2, 4))),
    "index_put scalar": (lambda c, s: setitem(c, s, 2.0), (f32(32, 2), ints(3, -1))),
    "index_put second dim": (lambda c, s, k: setitem(c, (slice(None), s), k), (f32(4, 32), ints(3, -1), f32(4, 2))),
    "index_put mask": (lambda x: setitem(x, x > 0, 0.5), (X,)),
    "index_put row mask": (lambda x, v: setitem(x, x[:, 0] > 0, v), (X, f32(16))),
    "index_copy": (lambda c, s, k: c.index_copy(0, s, k), (f32(32, 2, 4), ints(3, 9, 1), f32(3, 2, 4))),
    "index_copy dim 1": (lambda c, s, k: c.index_copy(1, s, k), (f32(2, 32, 4), ints(3, 9, 1), f32(2, 3, 4))),
    "index_add": (lambda c, s, k: c.index_add(0, s, k), (f32(32, 2), ints(3, 3, 1), f32(3, 2))),
    "index_fill": (lambda c, s: c.index_fill(0, s, 1.0), (f32(8, 2), ints(3, 1))),
    "scatter": (lambda c, i, k: c.scatter(1, i, k), (f32(4, 8), below(8, 4, 1), f32(4, 1))),
    "scatter value": (lambda c, i: c.scatter(1, i, 2.0), (f32(4, 8), below(8, 4, 1))),
    "scatter_add": (lambda c, i, k: c.scatter_add(1, i, k), (f32(4, 8), below(8, 4, 2), f32(4, 2))),
    "slice_scatter": (lambda a, b: torch.slice_scatter(a, b, 1, 2, 6), (f32(4, 8), f32(4, 4))),
    "slice_scatter step": (lambda a, b: torch.slice_scatter(a, b, 1, 1, 8, 2), (f32(4, 8), f32(4, 4))),
    "slice_scatter open": (
        lambda a, b: (
            torch.slice_scatter(a, b, 1, step=2),
            torch.slice_scatter(a, b[:, :3], 1, -7, -1, 2),
            torch.slice_scatter(a, b, 1, -4, 99),
            torch.slice_scatter(a, b[:, :0], 1, 6, 2),
        ),
        (f32(4, 8), f32(4, 4)),
    ),
    "select_scatter": (lambda a, b: torch.select_scatter(a, b, 1, 2), (f32(4, 8), f32(4))),
    "gather": (lambda a, i: torch.gather(a, 1, i), (f32(4, 8), below(8, 4, 3))),
    "take_along_dim": (lambda a, i: torch.take_along_dim(a, i, 1), (f32(4, 8), below(8, 4, 3))),
    "take": (lambda a, i: torch.take(a, i), (f32(4, 8), ints(3, -1, 31, -32))),
    "index_select": (lambda a, i: torch.index_select(a, 1, i), (f32(4, 8), below(8, 3))),
    "index": (lambda a, i: a[i], (f32(16, 4, 2), below(16, 2, 3))),
    "index two": (lambda a, i, j: a[i, j], (f32(16, 4, 2), below(16, 3), below(4, 3))),
    "index second dim": (lambda a, i: a[:, i], (f32(5, 16, 2), below(16, 3))),
    "index a column": (
        lambda a, i: (a[:, -1].flip(0), (a[:, -1] * 1.0)[i], a[:, 1:3].flip(0)),
        (f32(16, 4), below(16, 3)),
    ),
    "index apart": (lambda a, i, j: a[i, :, j], (f32(16, 4, 8), below(16, 3), below(8, 3))),
    "index int32": (lambda a, i: a[i], (f32(16, 4, 2), below(16, 2, 3).int())),
    "index negative": (lambda a, i, j: (a[i], a[:, j]), (f32(16, 4), ints(-1, 3, -16), ints(-4, -1))),
    "index empty": (
        lambda a, i, v: (a[i], a[:, i], setitem(a, i, v), setitem(a, i, 1.0), a.scatter(1, i.view(4, 0), 2.0)),
        (f32(4, 16), below(4, 0), f32(0, 16)),
    ),
    "constant mask": (
        lambda a: torch.where(torch.tensor([True, False, True]), a, -a),
        (f32(4, 3),),
    ),
    "as_strided": (lambda a: (a.as_strided((2, 8), (16, 2)), a.as_strided((3, 4), (5, 1), 2)), (X,)),
    "unfold": (lambda a: a.unfold(1, 4, 2), (X,)),
    "masked_scatter-free where": (lambda a: torch.where(a > 0, a, 0.0), (X,)),
    "isin by search": (
        lambda a, v: (torch.searchsorted(a, v), torch.searchsorted(a, v, right=True)),
        (torch.sort(f32(16))[0], torch.cat([f32(3), torch.tensor([float("nan")])])),
    ),
    "searchsorted rows": (lambda a, v: torch.searchsorted(a, v), (torch.sort(f32(3, 16))[0], f32(3, 5))),
    "bucketize": (
        lambda v, a: (torch.bucketize(v, a), torch.bucketize(v, a, right=True, out_int32=True)),
        (f32(3), torch.sort(f32(16))[0]),
    ),
    "one_hot": (lambda i: F.one_hot(i, 8), (below(8, 4),)),
}

ATTENTION: dict[str, Case] = {
    "sdpa": (F.scaled_dot_product_attention, (f32(2, 4, 3, 8), f32(2, 4, 5, 8), f32(2, 4, 5, 8))),
    "sdpa bool mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        (f32(2, 4, 3, 8), f32(2, 4, 5, 8), f32(2, 4, 5, 8), f32(2, 1, 3, 5) > -1.0),
    ),
    "sdpa float mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        (f32(2, 4, 3, 8), f32(2, 4, 5, 8), f32(2, 4, 5, 8), f32(2, 1, 3, 5)),
    ),
    "sdpa causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        (f32(2, 4, 5, 8), f32(2, 4, 5, 8), f32(2, 4, 5, 8)),
    ),
    "sdpa grouped": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        (f32(2, 4, 3, 8), f32(2, 2, 5, 8), f32(2, 2, 5, 8)),
    ),
    "softmax": (lambda a: a.softmax(-1), (X,)),
    "softmax masked": (lambda a: a.masked_fill(a > 0, float("-inf")).softmax(-1), (X,)),
    "log_softmax": (lambda a: a.log_softmax(-1), (X,)),
    "logsumexp": (lambda a: a.logsumexp(-1), (X,)),
    "masked_fill": (lambda a: a.masked_fill(a > 0, float("-inf")), (X,)),
    "rotary": (
        lambda x, c, s: torch.cat([x[..., :4] * c - x[..., 4:] * s, x[..., 4:] * c + x[..., :4] * s], -1),
        (f32(3, 2, 8), f32(3, 1, 4), f32(3, 1, 4)),
    ),
    "causal mask": (
        lambda p: torch.arange(8)[None] <= p[:, None],
        (ints(0, 3, 7),),
    ),
    "tril": (lambda a: (torch.tril(a), torch.triu(a, 1)), (f32(5, 5),)),
    "rms_norm": (lambda a, w: F.rms_norm(a, (16,), w, 1e-5), (X, f32(16))),
    "layer_norm": (lambda a, w, b: F.layer_norm(a, (16,), w, b), (X, f32(16), f32(16))),
    "group_norm": (lambda a, w, b: F.group_norm(a, 2, w, b), (f32(2, 4, 6), f32(4), f32(4))),
    "silu": (F.silu, (X,)),
    "gelu": (F.gelu, (X,)),
    "gelu tanh": (lambda a: F.gelu(a, approximate="tanh"), (X,)),
    "relu squared": (lambda a: F.relu(a).square(), (X,)),
    "softcap": (lambda a: 30.0 * torch.tanh(a / 30.0), (X,)),
    "glu": (lambda a: F.glu(a, -1), (X,)),
    "einsum": (lambda a, b: torch.einsum("bhd,bkd->bhk", a, b), (f32(2, 3, 4), f32(2, 5, 4))),
    "linear": (F.linear, (X, f32(8, 16), f32(8))),
    "matmul batched": (torch.matmul, (f32(2, 3, 4, 5), f32(5, 6))),
    "matmul vector": (torch.matmul, (f32(3, 4), f32(4))),
    "baddbmm": (torch.baddbmm, (f32(2, 3, 5), f32(2, 3, 4), f32(2, 4, 5))),
    "addmm alpha": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2.0), (f32(3, 5), f32(3, 4), f32(4, 5))),
    "outer": (torch.outer, (f32(3), f32(4))),
    "truth matmul": (
        lambda a, m: (
            m.float() @ a,
            a.t() @ (m.t() > 0).double().float(),
            m.long() @ m.t().long(),
            m.bfloat16() @ m.t().bfloat16(),
        ),
        (f32(8, 3), f32(4, 8) > 0),
    ),
    "unsigned matmul": (
        lambda a, b: (a.float() @ b.float(), a.int() @ b.int(), a.float() @ b.float()[:, 1], a @ b),
        (below(255, 4, 8).to(torch.uint8), below(255, 8, 3).to(torch.uint8)),
    ),
    "unsigned convolution": (
        lambda a, w: F.conv1d((a > 128).float(), w) + F.conv1d(a.float(), w),
        (below(255, 1, 4, 8).to(torch.uint8), torch.ones(6, 4, 3)),
    ),
    "integer matmul": (lambda a, b: torch.matmul(a.int(), b.int()), (below(9, 4, 8) - 4, below(9, 8, 3) - 4)),
    "int8 weights": (lambda q, s: q.float() * s, ((below(255, 4, 16) - 127).to(torch.int8), f32(16))),
    "conv1d": (lambda a, w: F.conv1d(a, w, padding=1), (f32(1, 4, 8), f32(6, 4, 3))),
    "conv2d": (lambda a, w: F.conv2d(a, w, stride=2), (f32(1, 3, 8, 8), f32(6, 3, 2, 2))),
    "max_pool2d": (lambda a: F.max_pool2d(a, 2), (f32(1, 2, 4, 4),)),
    "avg_pool1d": (lambda a: F.avg_pool1d(a, 2), (f32(1, 2, 8),)),
    "dropout in eval": (lambda a: F.dropout(a, 0.5, False), (X,)),
    "gumbel": (lambda a, u: (a - (-u.log()).log()).argmax(-1), (X, f32(4, 16).sigmoid())),
    "experts": (
        lambda x, r: torch.topk(r.softmax(-1), 2, dim=-1)[0].sum(-1, keepdim=True) * x,
        (X, f32(4, 6)),
    ),
}

REDUCTION_AND_ORDER: dict[str, Case] = {
    "topk": (lambda a: torch.topk(a, 3), (X,)),
    "topk smallest": (lambda a: torch.topk(a, 3, largest=False), (X,)),
    "topk dim 0": (lambda a: torch.topk(a, 2, dim=0), (X,)),
    "topk ties": (lambda a: torch.topk(a, 8)[0], (TIES,)),
    "sort": (lambda a: torch.sort(a, -1, descending=True), (X,)),
    "sort ints": (lambda a: torch.sort(a, 0), (torch.randperm(9, generator=_generator),)),
    "sort special": (lambda a: (torch.sort(a, stable=True), torch.sort(a, descending=True, stable=True)), (SPECIAL,)),
    "sort stable": (
        lambda a: (torch.sort(a, stable=True, dim=0), torch.sort(a, stable=True, dim=0, descending=True)),
        (TIES,),
    ),
    "argsort": (lambda a: torch.argsort(a, -1), (X,)),
    "sort bool": (lambda a: torch.sort(a, stable=True), (TIES > 1.5,)),
    "argmax": (lambda a: (a.argmax(-1), a.argmax(), a.argmin(-1), a.argmax(0, keepdim=True)), (X,)),
    "argmax ties": (lambda a: (a.argmax(0), a.argmin(0)), (TIES,)),
    "max": (lambda a: (a.max(-1), a.min(0), a.max(), a.amax(-1), a.amin((0, 1))), (X,)),
    "max nan": (lambda a: (a.max(), a.amax(0), a.min()), (SPECIAL,)),
    "max nan in place": (
        lambda a: (a.max(-1), a.max(0), a.min(0, keepdim=True), a.argmax(1), a.argmin(), a.argmax(keepdim=True)),
        (torch.tensor([[1.0, math.nan, 3.0, math.nan], [1.0, 5.0, 2.0, 5.0]]),),
    ),
    "max ints": (lambda a: (a.max(-1), a.min(0)), (below(100, 4, 5),)),
    "cumsum": (lambda a: (a.cumsum(-1), a.cumsum(0)), (X,)),
    "cumsum ints": (lambda a: (a.cumsum(0), a.int().cumsum(0)), (below(9, 4, 3),)),
    "cumsum in 8 and 16 bits": (
        lambda a: [a.cumsum(0, dtype=d) for d in (torch.int8, torch.uint8, torch.bfloat16)],
        (below(99, 5, 3),),
    ),
    "cumprod": (lambda a: (a.cumprod(-1), a.cumprod(0)), (X,)),
    "cumprod ints": (lambda a: a.int().cumprod(0), (below(4, 4, 3) + 1,)),
    "sum": (lambda a: (a.sum(), a.sum(0), a.sum((0, 1), keepdim=True), a.mean(-1), a.prod(0)), (X,)),
    "var": (lambda a: (a.var(-1), a.std(0), a.var(-1, correction=0)), (X,)),
    "var of nothing": (lambda a: (a[:0].var(), a[:0].std(0), a[:0].var(0, keepdim=True), torch.var_mean(a[:0])), (X,)),
    "norm": (lambda a: (a.norm(), a.norm(dim=-1), torch.linalg.vector_norm(a, 1, dim=0)), (X,)),
    "sum bool": (lambda a: ((a > 0).sum(-1), (a > 0).any(-1), (a > 0).all(), (a > 0).float().mean()), (X,)),
    "sum 16 bits": (lambda a: (a.bfloat16().sum(-1), a.half().mean(0)), (X,)),
    "median by sort": (lambda a: torch.sort(a)[0][..., 7], (X,)),
    "flip": (lambda a: (a.flip(0), a.flip((0, 1)), a.roll(1, 0), a.roll((1, -2), (0, 1))), (X,)),
    "roll all": (lambda a, b: (a.roll(3), b.roll(-1), b.roll(1, 0)), (X, below(200, 8).to(torch.uint8))),
    "cat": (lambda a: (torch.cat([a, a + 1], -1), torch.stack([a, a + 1], 0), torch.cat([a, a[:0]])), (X,)),
    "split": (lambda a: torch.cat(a.chunk(2, -1)[::-1], -1), (X,)),
    "expand": (lambda a: a[:, None].expand(4, 3, 16) * 2, (X,)),
    "repeat": (lambda a: (a.repeat(2, 3), a.repeat_interleave(2, 1), a.tile(2)), (X,)),
    "pad": (lambda a: (F.pad(a, (1, 2)), F.pad(a, (0, 0, 1, 1), value=2.0)), (X,)),
    "permute": (
        lambda a: (a.permute(2, 0, 1) + 1, a.transpose(0, 2).reshape(4, -1), a.movedim(0, 1) * 1.0),
        (f32(2, 3, 4),),
    ),
    "views": (lambda a: (a.view(8, 8)[::2, 1:-1] + 0.0, a.reshape(-1)[3:9] * 2, a[..., None, :].squeeze(-2)), (X,)),
    "meshgrid": (lambda a: torch.meshgrid(a, a, indexing="ij"), (f32(3),)),
    "diagonal": (lambda a: (a.diagonal() * 2, torch.diag(a[0])), (f32(4, 4),)),
    "triangle by compare": (lambda a: a * (torch.arange(4)[:, None] >= torch.arange(16)), (X,)),
    "histogram by one_hot": (lambda i: F.one_hot(i, 8).sum(0), (below(8, 20),)),
}

ELEMENTWISE: dict[str, Case] = {
    "arange": (
        lambda a: (a + torch.arange(16), a + torch.arange(0, 8, 0.5), a + torch.arange(16, dtype=torch.int32)),
        (X,),
    ),
    "fills": (lambda a: a + torch.full((4, 16), 2.0) + torch.zeros_like(a) + torch.ones(16) + torch.eye(4, 16), (X,)),
    "constants alone": (
        lambda: (torch.full((3,), 2.0) + -3, torch.zeros(3) > 2, torch.zeros(3).sign(), torch.ones(3) == torch.ones(3)),
        (),
    ),
    "random numbers that nobody uses": (lambda a: (a + torch.rand_like(a), a + 1)[1], (X,)),
    "where": (lambda a: (torch.where(a > 0, a, -a), torch.where(a > 0, 1.0, 0.0), torch.where(a > 0, 1, 0)), (X,)),
    "arithmetic": (lambda a, b: (a + b, a - b, a * b, a / b, torch.sub(a, b, alpha=2), 1 - a, 2 / b), (X, f32(4, 16))),
    "exp and log": (lambda a: ((a.abs() + 1).log().exp(), a.expm1(), a.abs().log1p(), a.exp2(), a.abs().log2()), (X,)),
    "trigonometry": (lambda a: (a.sin() + a.cos(), (a * 0.2).tan(), a.atan(), torch.atan2(a, a + 1)), (X,)),
    "hyperbolic": (lambda a: (a.tanh(), a.sinh(), a.sigmoid(), a.erf(), F.softplus(a), F.mish(a), F.elu(a)), (X,)),
    "powers": (lambda a: (a.abs().rsqrt(), a.abs().sqrt(), a.abs() ** 1.5, a**2, 2.0**a, a.reciprocal()), (X,)),
    "pow tensor": (lambda a, b: torch.pow(a.abs() + 0.1, b), (X, f32(4, 16))),
    "pow of negatives": (
        lambda a, b: (torch.pow(a[:, None], b), (-2.0) ** b, (-0.5) ** b, 0.0**b, 2.0**b),
        (
            torch.tensor([-2.0, -1.0, -0.5, -0.0, 0.0, 1.0, 3.0, -math.inf, math.inf, math.nan]),
            torch.tensor([0.0, 1.0, 2.0, 3.0, -1.0, -2.0, 0.5, -0.5, math.inf, -math.inf, math.nan]),
        ),
    ),
    "rounding": (lambda a: ((a * 3).round(), (a * 3).floor(), (a * 3).ceil(), (a * 3).trunc(), a.frac()), (X,)),
    "round half": (lambda a: (a.round(), a.floor(), a.ceil()), (torch.tensor([0.5, 1.5, -0.5, -1.5, 2.5]),)),
    "clamp": (
        lambda a: (a.clamp(-1, 1), a.clamp(min=0), a.clamp(max=0.5), torch.maximum(a, -a), torch.minimum(a, -a)),
        (X,),
    ),
    "clamp nan": (lambda a: (a.clamp(-1, 1), torch.maximum(a, a.flip(0)), torch.minimum(a, a.flip(0))), (SPECIAL,)),
    "sign": (lambda a: (a.sign(), a.abs(), -a, a.signbit()), (SPECIAL[[0, 1, 2, 4, 5, 6]],)),
    "nonfinite": (lambda a: (a.isnan() | a.isinf(), a.isfinite(), a.nan_to_num()), (SPECIAL,)),
    "compare": (lambda a, b: (a < b, a <= b, a > b, a >= b, a == b, a != b), (SPECIAL, SPECIAL.flip(0))),
    "logic": (lambda a, b: (a & b, a | b, a ^ b, ~a, a + b, a * b, a.logical_and(b), a.logical_xor(b)), (X > 0, X > 1)),
    "casts": (
        lambda a: (
            (a.to(torch.bfloat16) * 2).float(),
            (a.half() * 2).float(),
            a.double() / 3,
            (a * 10).to(torch.int32),
        ),
        (X,),
    ),
    "casts of ints": (
        lambda a: ((a.int() + 1).long(), a.float() / 3, a.bool(), a.to(torch.int8), a.bfloat16()),
        (below(99, 4, 3),),
    ),
    "casts of 8 bits": (
        lambda a, b: (a.bfloat16(), a.half(), b.bfloat16(), b.half(), (b > 128).bfloat16(), (b > 128).half()),
        ((below(255, 9) - 127).to(torch.int8), below(255, 9).to(torch.uint8)),
    ),
    "cast to bool": (lambda a: (a.bool(), a.bool().int(), a.bool().float()), (SPECIAL,)),
    "fp8": (lambda a: a.to(torch.float8_e4m3fn).float(), (X,)),
    "floor division": (
        lambda a: (a // 16, a % 16, (a - 50) // 16, (a - 50) % 16, torch.div(a - 50, 16, rounding_mode="trunc")),
        (below(99, 4, 3),),
    ),
    "long division": (
        lambda a, b: [
            (a // d, a % d, a.fmod(d), torch.div(a, d, rounding_mode="floor"), torch.div(a, d, rounding_mode="trunc"))
            for d in (b, 7, -7)
        ],
        (ints(2**62, -(2**62), 2**53 + 1, -(2**53) - 1, 9, -9), ints(7, -7, 3, 5, -4, 4)),
    ),
    "division of a number": (lambda a: (7 // a, 7 % a, -7 % a, 7.5 % a), (ints(3, -4, 9).int(),)),
    "infinite division": (
        lambda a, b: (a // b, a % b, a.fmod(b), a // 0.1, a // 2, torch.div(a, b, rounding_mode="trunc")),
        (
            torch.tensor([math.inf, -math.inf, 5.0, -5.0, 5.0, 0.0, math.nan, 1.0, -1.0, 7.5]),
            torch.tensor([2.0, 2.0, math.inf, math.inf, -math.inf, 0.0, 1.0, 0.0, 0.0, -2.0]),
        ),
    ),
    "float remainder of many": (
        lambda a: (a % 6.2831853, a.fmod(0.1), a // 0.3),
        (torch.tensor([1e6, -1e10, 12345.678]),),
    ),
    "float remainder": (lambda a: (a % 0.7, torch.fmod(a, 0.7), a // 0.7), (X,)),
    "bits": (lambda a: ((a >> 2) & 3, a << 3, a | 5, a ^ 5, ~a, a.bitwise_and(a.flip(0))), (below(99, 4, 3),)),
    "bits of negatives": (lambda a: (a >> 2, a & 255, a << 1), (below(99, 4, 3) - 50,)),
    "clamp ints by floats": (lambda a: (a.clamp(min=2.5), a.clamp(max=2.5), a.clamp(1, 2.5)), (below(5, 9),)),
    "uint8 constant": (lambda a: a + torch.tensor([1, 200, 3], dtype=torch.uint8), (below(9, 3),)),
    "uint8": (lambda a: (a + 200, a // 3, a % 7, a >> 1, a.float(), a.abs()), (below(200, 8).to(torch.uint8),)),
    "int8": (lambda a: (a + 100, a * 3, a.int() * 300, a >> 1), ((below(255, 8) - 127).to(torch.int8),)),
    "int overflow": (lambda a: a * 1_000_003 * 65_537, (below(99, 8).int(),)),
    "scalar tensor": (lambda a, s: (a * s, s + 1, a + s.long()), (X, torch.tensor(2.0))),
    "promotion": (lambda a, i: (a + i, i / 2, i * 2.5, a.half() + a, a.bfloat16() * 2), (X, below(9, 4, 16))),
    "lerp": (
        lambda a, b: (torch.lerp(a, b, 0.3), torch.addcmul(a, a, b, value=2.0), torch.addcdiv(a, a, b)),
        (X, f32(4, 16)),
    ),
    "cosine similarity": (lambda a, b: F.cosine_similarity(a, b), (X, f32(4, 16))),
    "cross entropy": (lambda a, t: F.cross_entropy(a, t), (X, below(16, 4))),
    "normalize": (lambda a: F.normalize(a, dim=-1), (X,)),
    "bfloat16 product": (lambda a, w: a @ w.t(), (f32(4, 256).bfloat16(), f32(8, 256).bfloat16())),
    "float16 product": (lambda a, w: a @ w.t(), (f32(4, 64).half(), f32(8, 64).half())),
    "float64": (lambda a, b: (a @ b, a.exp(), a / 3, a.sum(), 0.1 * a), (f32(5, 5).double(), f32(5, 5).double())),
}

TRUTHS = torch.tensor([[True, False, False], [True, True, False]])
BYTES = torch.tensor([[1, 2, 3], [200, 201, 250]], dtype=torch.uint8)
ONES = torch.ones(600, 4)
FEW_DIMENSIONS = torch.tensor(3.0)


def extremes(x: Tensor) -> list[Any]:
    return [
        x.amax(0), x.amin(-1), x.amax(), x.amin(), x.max(), x.min(), x.max(0), x.min(-1, keepdim=True), x.any(),
        x.all(), x.any(0), x.all(-1), *torch.aminmax(x),
    ]  # fmt: skip


def accumulated(x: Tensor) -> list[Tensor]:
    """Of hundreds of small numbers: in 16 bits the sum stops growing at 256 or at 2048."""
    return [
        x.sum(), x.sum(0), x.mean(), x.mean(0), x.norm(dim=0), x.var(0), x.std(0), F.avg_pool1d(x.t(), 600),
        F.l1_loss(x, x * 0), F.nll_loss(-x, torch.zeros(600, dtype=torch.long)),
        (x[:1] * 0).scatter_add(0, torch.zeros(600, 4, dtype=torch.long), x), x.t().softmax(-1) * 600,
        x.sum(0, dtype=torch.float32),
    ]  # fmt: skip


def pools(x: Tensor, y: Tensor) -> list[Tensor]:
    return [
        F.max_pool2d(x, 2, 2, ceil_mode=True), F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
        F.max_pool2d(x, 2, (2, 3), ceil_mode=True), F.max_pool2d(x.int(), 2, 2, ceil_mode=True),
        F.max_pool1d(y, 2, 2, ceil_mode=True), F.max_pool1d(y, 3, 5, 1, ceil_mode=True),
    ]  # fmt: skip


def rare_pools(x: Tensor) -> list[Tensor]:
    return [
        F.max_pool2d(x, 2, (2, 3), dilation=2, ceil_mode=True), F.max_pool2d(x, 2, 1, dilation=2),
        F.max_pool3d(x[:, None], 2, 2, ceil_mode=True), F.max_pool3d(x[:, None], 2),
    ]  # fmt: skip


NARROW: dict[str, Case] = {
    "extremes of truths": (extremes, (TRUTHS,)),
    "extremes of no truths": (extremes, (TRUTHS & False,)),
    "extremes of bytes": (lambda x: [*extremes(x), x.argmax(), x.argmin(0), x.argmax(-1)], (BYTES,)),
    "extremes of a mask": (lambda x: [(x > 2).amax(-1), (x > -9).amin(0)], (X,)),
    "any and all of bytes": (lambda x: [x.any(), x.all(), x.any(0), x.all(1)], (BYTES * (BYTES > 1),)),
    "bfloat16 accumulated": (accumulated, (ONES.bfloat16(),)),
    "float16 accumulated": (accumulated, (ONES.half(),)),
    "bytes of different sign": (
        lambda x, y: [x < y, x > y, x <= y, x >= y, x == y, x != y, torch.maximum(x, y), torch.minimum(x, y), x + y],
        (BYTES[1], torch.tensor([0, 127, -6], dtype=torch.int8)),
    ),
    "max_pool2d of bytes": (lambda x: F.max_pool2d(x, 2), (below(255, 1, 2, 6, 6).to(torch.uint8),)),
    "max_pool with ceil_mode": (pools, (-f32(1, 3, 5, 7).abs() * 9 - 1, f32(2, 3, 9))),
    "integers to 16 bits": (
        lambda *values: [one.to(dtype) for one in values for dtype in (torch.bfloat16, torch.float16)],
        tuple(ints(0, 1, -1, 255, 257, 258, 259, -259, 511, 513, 515, 32767).to(d) for d in (torch.int16, torch.int32)),
    ),
    "int64 to bfloat16": (lambda a: a.bfloat16(), (ints(0, 257, 259, -259, 2**40 + 2**32, 2**62, 16777217),)),
    "no dimensions": (
        lambda a: [
            a.softmax(0),
            a.log_softmax(-1),
            a.logsumexp(0),
            a.max(0),
            a.min(0),
            a.amax(0),
            a.argmax(),
            a.argmin(0),
            a.cumsum(0),
            a.sum(0),
            a.mean(),
            a.bfloat16().softmax(-1),
            a.bool().amax(),
            a.sort(0)[0],
        ],
        (FEW_DIMENSIONS,),
    ),
    "large angles": (
        lambda a: [a.sin(), a.cos(), a[:4].bfloat16().sin()],
        (torch.tensor([1.0, 100.0, -4096.0, 9984.0, 1e5, 131071.0, -3.9e5, 0.0, float("inf"), float("nan")]),),
    ),
}

GROUPS = {
    "indexing": INDEXING,
    "attention": ATTENTION,
    "reduction and order": REDUCTION_AND_ORDER,
    "elementwise": ELEMENTWISE,
    "narrow types": NARROW,
}

# The XLA route lacks these.
NATIVE_ONLY: dict[str, Case] = {"rare pools": (rare_pools, (f32(1, 3, 5, 7) - 9,))}

UNSUPPORTED: dict[str, Case] = {
    "complex logarithm": (lambda a: torch.view_as_real(torch.view_as_complex(a).log()), (f32(4, 8, 2),)),
    "rand_like": (lambda a: a + torch.rand_like(a), (X,)),
    "sine in 64 bits": (lambda a: a.double().sin(), (X,)),
    "dropout in training": (lambda a: F.dropout(a, 0.5, True), (X,)),
    "long fft": (lambda a: torch.fft.rfft(a).abs(), (f32(4096),)),
    "mode": (lambda a: a.mode(-1), (X,)),
    "median": (lambda a: a.median(-1), (X,)),
    "write through a mask, element by element": (lambda x, v: setitem(x, x > 0, v[x > 0]), (X, X)),
    "svd": (torch.linalg.svdvals, (f32(4, 4),)),
    "bessel": (torch.special.bessel_j0, (X,)),
}
