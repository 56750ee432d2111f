"""Inputs of the kinds that compilers were found to fail on, and the operators that lower in parts of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from op_cases import Case, X, below, f32, ints
from torch import Tensor

BYTES = below(255, 4, 4).to(torch.uint8)
SIGNED = (below(255, 1, 2, 4, 6, 6) - 127).to(torch.int8)
FLOATS_OF_8_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
REDUCTIONS = ("amax", "amin", "sum", "prod", "mean")


def module(kind: str, *sizes: int, **options: bool | int) -> torch.nn.Module:
    torch.manual_seed(0)
    made: torch.nn.Module = getattr(torch.nn, kind)(*sizes, **options)
    return made.eval().requires_grad_(False)


NARROW: dict[str, Case] = {
    "pools of signed bytes": (
        lambda x: (
            F.max_pool2d(x[0], 2),
            F.max_pool2d(x[0], 3, 2, 1),
            F.max_pool3d(x, 2),
            F.max_pool2d(x[0].short(), 2),
        ),
        (SIGNED,),
    ),
    "clamp of 16 bits by integers": (
        lambda x: [
            (y.clamp(0, 1), y.clamp(min=0), y.clamp(max=1), y.clamp(0, 0.5), y + 3)
            for y in (x.bfloat16(), x.half(), x.double())
        ],
        (X,),
    ),
    "reversed bytes": (lambda x: (x.flip(0), (x + 1).flip(0, 1), x.flip(1) > 100), (BYTES,)),
    "constants of several types": (
        lambda x: (
            [x + torch.tensor([1.0, 2.0], dtype=d) for d in (torch.float16, torch.bfloat16, torch.float32)]
            + [x + torch.tensor([1, 2], dtype=d) for d in (torch.int8, torch.int32, torch.int64, torch.uint8)]
        ),
        (f32(4, 2),),
    ),
    "no elements": (
        lambda x, y: (x + 1, x.float(), y[:0].to(torch.uint8), torch.zeros(0, 3, dtype=torch.uint8), y[:0].bool()),
        (BYTES[:0], X),
    ),
    "sums of products": (
        lambda a, b, w: (
            torch.einsum("ijk,jkl->ijkl", a, b).sum(),
            (a * w).sum(),
            (a[:, :, :, None] * b).sum((0, 1, 2)),
            (a.double() * w.double()).sum(),
            (a.bfloat16() * w.bfloat16()).sum(),
        ),
        (f32(2, 3, 4), f32(3, 4, 5), f32(4)),
    ),
    "floats of 8 bits out": (lambda x: [x.to(dtype) for dtype in FLOATS_OF_8_BITS], (X,)),
    "floats of 8 bits in": (
        lambda x, y: (x.float(), y.float() + 1, x.view(torch.uint8), x[1:]),
        tuple(X.to(dtype) for dtype in FLOATS_OF_8_BITS),
    ),
    "floats of 8 bits written": (lambda x, y: x.copy_(y).float(), (X.to(torch.float8_e4m3fn), X.flip(0))),
}

ZEROS: dict[str, Case] = {
    "comparisons with zero": (
        lambda x: [
            (y == 0, y != 0, y > 0, y <= 0, y.bool(), torch.where(y == 0, 1.0, y), y.sign())
            for y in (x, x.double(), x.bfloat16(), x.half())
        ],
        (torch.tensor([0.0, 3.0, -0.0, -2.0, 5.0]),),
    ),
}

SORTS: dict[str, Case] = {
    "argsort alone": (lambda x: torch.argsort(x, -1), (torch.randperm(9000).float(),)),
    "places of topk alone": (lambda x: torch.topk(x, 5)[1], (torch.randperm(10000).float().view(1, -1),)),
    "sort of many": (lambda x: (torch.sort(x, 1, descending=True), torch.sort(x, 0)), (f32(300, 300),)),
    "sort of many in 64 bits": (
        lambda x: torch.sort(x, stable=True),
        (torch.cat([below(2**62, 300) - 2**61, ints(-(2**63), 2**63 - 1, 0, 0)]),),
    ),
    "sort of many with ties": (
        lambda x: (torch.sort(x[:300].to(torch.int8), stable=True), torch.sort(x.bfloat16(), stable=True)),
        (torch.cat([below(5, 300).float(), torch.tensor([float("nan"), float("inf"), -0.0, -float("inf"), 0.0])]),),
    ),
}

PLACES: dict[str, Case] = {
    "scatter_reduce": (
        lambda x, i, s: [
            x.scatter_reduce(1, i, s, reduce, include_self=include)
            for reduce in REDUCTIONS
            for include in (True, False)
        ],
        (f32(4, 8), below(8, 3, 6), f32(4, 6)),
    ),
    "scatter_reduce of integers": (
        lambda x, i, s: [x.scatter_reduce(0, i, s, reduce) for reduce in REDUCTIONS],
        (below(9, 4, 8), below(4, 4, 6), below(9, 4, 6)),
    ),
    "scatter_reduce nan": (
        lambda x, i, s: [x.scatter_reduce(0, i, s, reduce) for reduce in ("amax", "amin")],
        (torch.tensor([1.0, 2.0, 3.0]), ints(0, 0, 2), torch.tensor([float("nan"), 1.0, -float("inf")])),
    ),
    "scatter with reduce": (
        lambda x, i, s: (x.scatter(1, i, s, reduce="add"), x.scatter(1, i, 2.0, reduce="multiply")),
        (f32(4, 8), below(8, 4, 6), f32(4, 6)),
    ),
    "index_reduce": (
        lambda x, i, s: [
            x.index_reduce(1, i, s, reduce, include_self=include)
            for reduce in ("amax", "amin", "prod", "mean")
            for include in (True, False)
        ],
        (f32(3, 8, 2), ints(1, 6, 1), f32(3, 3, 2)),
    ),
    "put": (lambda x, i, s: (x.put(i, s), x.put(i, s, accumulate=True)), (f32(4, 8), ints(1, -1, 9), f32(3))),
    "embedding_bag": (
        lambda w, i, o, p: [
            *(F.embedding_bag(i, w, o, mode=mode) for mode in ("sum", "mean", "max")),
            F.embedding_bag(i, w, o, mode="sum", per_sample_weights=p),
            F.embedding_bag(i, w, o, mode="mean", padding_idx=2),
            F.embedding_bag(i.view(3, 3), w),
        ],
        (f32(10, 4), below(10, 9), ints(0, 4, 4), f32(9)),
    ),
}

RECURRENT = (
    module("LSTM", 6, 5, batch_first=True),
    module("LSTM", 6, 5, num_layers=2, bidirectional=True, bias=False),
    module("GRU", 6, 5),
    module("RNN", 6, 5),
)

SPECIAL: dict[str, Case] = {
    "erfc": (
        lambda x, y: (torch.erfc(x), torch.erfc(y.double()), torch.erfc(y.bfloat16()), torch.erfc(x) * 1e30),
        (torch.cat([torch.linspace(-6, 10, 40), torch.tensor([float("inf"), -float("inf"), float("nan")])]), X),
    ),
    "lgamma": (
        lambda x, y: (torch.lgamma(x), torch.lgamma(y * 5)),
        (torch.tensor([0.0, 1.0, 2.0, -1.0, -2.5, 100.0, 1e10, 1e-10, -1e-5, float("inf"), float("nan")]), X),
    ),
    "hypot": (
        torch.hypot,
        (torch.tensor([1e30, float("inf"), float("nan"), 0.0, 3.0]), torch.tensor([1e30, float("nan"), 1.0, 0.0, 4.0])),
    ),
    "cdist": (
        lambda a, b: [torch.cdist(a, b, p) for p in (2.0, 1.0, float("inf"), 0.0)],
        (f32(2, 5, 3), f32(2, 4, 3)),
    ),
    "recurrent layers": (
        lambda x: [layer(x) for layer in RECURRENT],
        (f32(2, 3, 6),),
    ),
}


def rotary(x: Tensor, positions: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    angles = torch.outer(positions.float(), 1 / 10000 ** (torch.arange(0, 8, 2).float() / 8))
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None, :]
    return torch.view_as_real(turned).flatten(-2).type_as(x)


def arithmetic(x: Tensor, y: Tensor) -> list[Tensor]:
    results = (
        x + y, x - y, x * y, x / y, -x, x * 2.0, x * 1j, x.exp(), x.sum(0), x.reshape(-1), x.t(), x[1:],
        torch.cat([x, y]), x @ y.t(), x.mean(0), x.conj() * y, 1 / y,
    )  # fmt: skip
    return [*results, x.real, x.imag, x.abs(), x.angle()]


def transforms(x: Tensor) -> list[Tensor]:
    half = torch.fft.rfft(x)
    return [
        half.abs(), half, torch.fft.irfft(half), torch.fft.irfft(torch.fft.rfft(x[:, :15]), n=15),
        torch.fft.fft2(x).real, torch.fft.ifft(torch.fft.fft(x)),
        torch.fft.rfft(x, norm="ortho"),
        torch.fft.irfft(torch.fft.rfft(x, n=32) * torch.fft.rfft(x.flip(0), n=32), n=32),
    ]  # fmt: skip


COMPLEX: dict[str, Case] = {
    "rotary": (lambda x, p: (rotary(x, p), rotary(x.bfloat16(), p)), (f32(3, 2, 8), ints(0, 1, 2))),
    "rotary with given angles": (
        lambda x, a: torch.view_as_real(torch.view_as_complex(x) * a),
        (f32(3, 4, 2), torch.polar(torch.ones(3, 4), f32(3, 4))),
    ),
    "arithmetic": (arithmetic, tuple(torch.complex(f32(3, 4), f32(3, 4)) for _ in range(2))),
    "write to an input": (lambda x: x.mul_(1j).real, (torch.complex(f32(3), f32(3)),)),
    "transforms": (transforms, (X,)),
}

KINDS = {
    "narrow types and few elements": NARROW | ZEROS,
    "sorts": SORTS,
    "places": PLACES,
    "special": SPECIAL,
    "complex": COMPLEX,
}
