"""Where torch's own rules decide what a result is: dtypes, quotients, zeros, places. On both routes, against eager."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_cases import Case
from test_ops import BACKENDS, compiled
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils._pytree import tree_flatten

from vllm_neuron.errors import UnsupportedOpError

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
# Functions in the last place; everything else is equal.
TOLERANCE = {F64: 1e-14, F32: 1e-6, F16: 1e-3, BF16: 8e-3}
NAN, INF = math.nan, math.inf


def floats(*values: float, dtype: torch.dtype = F32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def single(value: float, dtype: torch.dtype) -> Tensor:
    return torch.tensor(value, dtype=dtype)


def compared(x: Tensor, y: Tensor) -> list[Tensor]:
    return [x <= y, x < y, x == y, x != y, x > y, x >= y]


def computed(x: Tensor, y: Tensor) -> list[Tensor]:
    return [*compared(x, y), x + y, x - y, y - x, x * y, y * x, x / y, y / x, torch.maximum(x, y), x // y, x % y]


PROMOTION: dict[str, Case] = {
    "f32 and f64": (computed, (floats(0.1, 0.2), single(0.1, F64))),
    "bf16 and f64": (computed, (floats(0.1, 0.2, 3.3, dtype=BF16), single(0.1, F64))),
    "bf16 and f32": (computed, (floats(0.1, 0.2, 3.3, dtype=BF16), single(0.1, F32))),
    "bf16 and f16": (computed, (floats(0.1, 0.2, 3.3, dtype=BF16), single(0.1, F16))),
    "f16 and f64": (computed, (floats(0.1, 0.2, 3.3, dtype=F16), single(0.1, F64))),
    "f64 and bf16": (computed, (floats(0.1, 0.2, dtype=F64), single(0.1, BF16))),
    "tensors of bf16 and f16": (computed, (floats(0.1, 0.2, dtype=BF16), floats(0.1, 0.3, dtype=F16))),
    "int64 and int32": (computed, (torch.tensor([5, 2**31 + 3]), torch.tensor(5, dtype=torch.int32))),
    "int32 and int64": (compared, (torch.tensor([5, 3], dtype=torch.int32), torch.tensor(2**32 + 5))),
    "uint8 and int8": (compared, (torch.tensor([1, 200], dtype=torch.uint8), torch.tensor(-1, dtype=torch.int8))),
    "integers and f32": (computed, (torch.tensor([1, 2**30 + 1]), single(1.5, F32))),
    "truth values and f64": (lambda x, y: [x * y, x + y, x <= y], (torch.tensor([True, False]), single(0.1, F64))),
    "truth values and bits": (lambda x: [x & 5, x | 5, x ^ 5, 5 & x, x & True], (torch.tensor([True, False]),)),
    "bytes and bits": (lambda x: [x & 300, x | 3, x << 1], (torch.tensor([1, -7], dtype=torch.int8),)),
    "shifts": (
        lambda x, y: [x << y, x >> y],
        (torch.tensor([5, 2**31 + 3]), torch.tensor(2, dtype=torch.int32)),
    ),
    "choices": (
        lambda c, x, y: [torch.where(c, x, y), torch.where(c, y, x), x.masked_fill(c, y)],
        (torch.tensor([True, False]), floats(0.1, 0.2), single(0.1, F64)),
    ),
}


def divided(x: Tensor, y: Any) -> list[Tensor]:
    return [x // y, torch.div(x, y, rounding_mode="trunc"), x % y, torch.fmod(x, y)]


def dividends(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(300, generator=generator, dtype=F64) * 100, torch.arange(-50, 50) / 10])
    y = torch.cat([torch.randn(300, generator=generator, dtype=F64), torch.full((100,), 0.1)])
    special = torch.tensor([[0.0, -0.0, INF, -INF, NAN, 5.0, -5.0, 7.0, -1.0], [1.0, 1, 2, 2, 2, INF, INF, 0, 0.5]])
    return torch.cat([x, special[0]]).to(dtype), torch.cat([y, special[1]]).to(dtype)


def by_all(x: Tensor, y: Tensor) -> list[Tensor]:
    quotients = [divided(x, one) for one in (y, 0.1, -0.3, 7, y[300])]
    return [result for results in quotients for result in results] + [7 // y, 7 % y]


DIVISION: dict[str, Case] = {str(dtype): (by_all, dividends(dtype)) for dtype in (F64, F32, F16, BF16)}

LEAST = floats(1e-40, -1e-40, 1.4e-45, 6e-39, 0.0, -0.0, 1e-38, NAN)


def sides(x: Tensor) -> list[Tensor]:
    return [
        x.sign(), x.sgn(), x.ceil(), x.floor(), x.reciprocal(), x > 0, x < 0, x >= 0, x <= 0, x == 0,
        x != 0, x > 0, x.bool(), x.logical_not(), torch.where(x > 0, 1.0, 2.0), x.any(), x.all(),
    ]  # fmt: skip


ZEROS: dict[str, Case] = {
    "denormals": (sides, (LEAST,)),
    "denormals in 64 bits": (sides, (floats(1e-310, 5e-324, -1e-310, 0.0, -0.0, 1e-300, dtype=F64),)),
    "denormals in bf16": (sides, (LEAST.bfloat16(),)),
    "denormals in f16": (sides, (floats(1e-7, -1e-7, 5e-6, 0.0, -0.0, dtype=F16),)),
    "negative zero": (
        lambda x: [
            torch.copysign(x, torch.tensor([0.0, -0.0])),
            torch.copysign(x, torch.tensor(-0.0)),
            torch.tensor([-0.0, -0.0]) * x,
            torch.full((2,), -0.0),
            torch.where(x > 0, -0.0, 1.0),
            (x - x) * -1.0,
        ],
        (floats(1.0, 2.0),),
    ),
    "full of truths": (lambda x: [torch.full((2,), 2, dtype=torch.bool), x + 0], (torch.tensor([True, False]),)),
}

WINDOWS = torch.tensor([1, NAN, 3, 4, 5, 6, 7, 8, NAN, 2, 3, 4, -INF, -INF, -INF, NAN, -INF, -INF, 1, 1, 2, 2, 0, NAN])


def maxima(x: Tensor) -> list[Any]:
    return [
        F.max_pool2d(x, 2), F.max_pool2d(x, 2, return_indices=True), F.max_pool2d(x, 3, 1, 1, return_indices=True),
        F.max_pool2d(x, (3, 2), (2, 1), (1, 0), ceil_mode=True, return_indices=True),
        F.max_pool1d(x[0], 2, return_indices=True),
    ]  # fmt: skip


def averages(x: Tensor) -> list[Tensor]:
    return [
        F.avg_pool2d(x, 2, divisor_override=3), F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), F.avg_pool2d(x, 3, 2, ceil_mode=True, count_include_pad=False),
    ]  # fmt: skip


def averages_of_volumes(x: Tensor) -> list[Tensor]:
    return [
        F.avg_pool3d(x, 2, divisor_override=3), F.avg_pool3d(x, (1, 2, 2), 1, divisor_override=1),
        F.avg_pool3d(x, 3, 2, 1, ceil_mode=True), F.avg_pool3d(x, 3, 2, 1, count_include_pad=False),
    ]  # fmt: skip


VOLUME = torch.arange(5 * 4 * 6).remainder(17).float().view(1, 1, 5, 4, 6)
POOLS: dict[str, Case] = {
    "maxima and NaN": (maxima, (WINDOWS.view(1, 4, 6),)),
    "maxima of nothing": (maxima, (torch.full((1, 4, 6), -INF),)),
    "maxima of integers": (maxima, (WINDOWS.nan_to_num(9, 9, 0).int().view(1, 4, 6),)),
    "maxima of a volume": (lambda x: F.max_pool3d(x, 2, 2, return_indices=True)[1], (VOLUME[..., :4, :4, :4],)),
    "averages": (averages, (VOLUME[0],)),
    "averages in f16": (averages, (VOLUME[0].half(),)),
    "averages in bf16": (averages, (VOLUME[0].bfloat16(),)),
    "averages of volumes": (averages_of_volumes, (VOLUME,)),
    "windows of many elements": (
        lambda x: [F.max_pool2d(x, 40, 3, return_indices=True), F.avg_pool2d(x, 40, 3, divisor_override=7)],
        (torch.arange(2500).remainder(257).float().view(1, 50, 50),),
    ),
}

NEAR_ONE = (torch.arange(4099) % 7 - 3) * 1e-3 + 1
TWO_TRUTHS = (torch.zeros(3, dtype=torch.bool), torch.tensor([0, 0, 1]), torch.ones(3, dtype=torch.bool))


def scans(x: Tensor) -> list[Tensor]:
    return [x.cumsum(0), x.cumprod(0), x.float().cumsum(0, dtype=x.dtype)]


ACCUMULATION: dict[str, Case] = {
    "scan of ones": (lambda x: x.cumsum(0), (torch.ones(4096, dtype=F16),)),
    "product of truths": (lambda x: x.cumprod(0), (torch.tensor([True, True, False]),)),
    "truths at places": (
        lambda x, i, v: [x.index_add(0, i, v), x.scatter_add(0, i, v), x.index_put((i,), v, accumulate=True)],
        TWO_TRUTHS,
    ),
    "truths written to places": (lambda x, i, v: x.index_put((i,), v), TWO_TRUTHS),
    "sums to a truth": (
        lambda x: [x.sum(dtype=torch.bool), x.sum(1, dtype=torch.bool), (x * 0.5).sum(0, True, dtype=torch.bool)],
        (torch.tensor([[1.0, 1.0], [0.0, 0.0]]),),
    ),
}

SMALL = [1e-10, 1e-20, -1e-10, 0.3, -0.3, 1e-300, 0.0, -0.0, NAN]
# And scans, which another order of the steps rounds otherwise.
FUNCTIONS: dict[str, Case] = {
    "scans in f16": (scans, (NEAR_ONE.half(),)),
    "scans in bf16": (scans, (NEAR_ONE.bfloat16(),)),
    "logarithms of denormals": (lambda x: x.abs().log(), (LEAST,)),
    "small angles": (
        lambda x: [x.sin(), x.tan(), x.cos()],
        (floats(-1e-7, 1e-7, -1e-4, -0.3, -3.0, 3.0, 0.0, -0.0, -1e3, -4e4, 1e3),),
    ),
    "near zero in 64 bits": (
        lambda x: [x.log1p(), x.expm1(), x.sinh(), x.asinh(), x.atanh(), F.softplus(x - 40), F.elu(x)],
        (torch.tensor(SMALL, dtype=F64),),
    ),
    "far from zero in 64 bits": (
        lambda x: [x.log1p(), x.expm1(), x.sinh(), x.asinh()],
        (floats(-1, -2, INF, -INF, 10, 1.5, 30, -50, 700, 710.2, -710.2, 720, 1e300, dtype=F64),),
    ),
    "beside one in 64 bits": (lambda x: x.acosh(), (floats(1 + 1e-10, 1, 2, 1e10, INF, dtype=F64),)),
}

EIGHT_BITS = floats(440, 448, 450, 463.9, 464, 465, 480, -450, -465, 1e9, INF, -INF, NAN, 1e-3, 2**-10, 0, -0.0, 17, 19)
EIGHTS: dict[str, Case] = {
    str(dtype): (lambda x: x.to(torch.float8_e4m3fn).float(), (EIGHT_BITS.to(dtype),))
    for dtype in (F64, F32, F16, BF16)
} | {"integers": (lambda x: x.to(torch.float8_e4m3fn).float(), (torch.tensor([440, 463, 465, -480, 1000, 17]),))}

GROUPS = {
    "promotion": PROMOTION, "division": DIVISION, "zeros": ZEROS, "pools": POOLS, "accumulation": ACCUMULATION,
    "functions": FUNCTIONS, "floats of 8 bits": EIGHTS,
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("group", GROUPS)
def test_is_as_in_eager(group: str, backend: str) -> None:
    cases, wrong = GROUPS[group], []
    exact = group != "functions"
    for name, actual, expected in zip(cases, *compiled(cases, backend), strict=True):
        pairs = zip(tree_flatten(actual)[0], tree_flatten(expected)[0], strict=True)
        wrong += [
            f"{name}, result {index}: {result} for {eager}"
            for index, (result, eager) in enumerate(pairs)
            if not _same(result, eager, 0 if exact else TOLERANCE[eager.dtype])
        ]
    assert not wrong, "\n".join(wrong)


def _same(result: Tensor, eager: Tensor, tolerance: float) -> bool:
    if (result.dtype, result.shape) != (eager.dtype, eager.shape):
        return False
    if not eager.dtype.is_floating_point:
        return torch.equal(result, eager)
    near = torch.isclose(result, eager, rtol=tolerance, atol=0, equal_nan=True)
    return bool((near & (eager.isnan() | (result.signbit() == eager.signbit()))).all())


BYTES, HALVES, FIRST = torch.tensor([1, 2], dtype=torch.int8), floats(1, 2, dtype=F16), torch.tensor([0])
MISFITS: dict[str, Callable[[], Any]] = {
    "full": lambda: torch.full((2,), 300, dtype=torch.int8),
    "full of a float": lambda: torch.full((2,), 1e40),
    "full of no number": lambda: torch.full((2,), NAN, dtype=torch.int32),
    "full_like": lambda: torch.full_like(BYTES, 300),
    "fill": lambda: BYTES.clone().fill_(300),
    "masked_fill": lambda: BYTES.masked_fill(BYTES > 1, 300),
    "where": lambda: torch.where(BYTES > 1, BYTES, 300),
    "clamp": lambda: BYTES.clamp(max=300),
    "clamp of f16": lambda: HALVES.clamp(max=1e6),
    "pad": lambda: F.pad(BYTES, (1, 1), value=300),
    "scatter": lambda: BYTES.scatter(0, FIRST, 300),
    "index_fill": lambda: BYTES.index_fill(0, FIRST, 300),
    "power": lambda: BYTES**300,
    "multiple": lambda: torch.add(BYTES, BYTES, alpha=300),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MISFITS)
def test_a_number_that_does_not_fit_is_refused_as_in_eager(name: str, backend: str) -> None:
    with pytest.raises(RuntimeError, match=r"cannot be converted to type .* without overflow") as eager:
        MISFITS[name]()
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(BackendCompilerFailed) as caught:
        torch.compile(MISFITS[name], backend=backend, fullgraph=True, dynamic=False)()
    assert isinstance(caught.value.inner_exception, UnsupportedOpError)
    assert str(eager.value) in str(caught.value.inner_exception)


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_that_eager_wraps_are_wrapped(backend: str) -> None:
    def wrapped(x: Tensor) -> list[Tensor]:
        return [x + 300, x * 300, 300 - x, x // 300, x % 300, x & 300, x < 300, torch.full((2,), -1, dtype=torch.uint8)]

    cases: dict[str, Case] = {"wrapped": (wrapped, (BYTES,))}
    (actual,), (expected,) = compiled(cases, backend)
    for result, eager in zip(actual, expected, strict=True):  # type: ignore[call-overload]
        assert torch.equal(result, eager) and result.dtype == eager.dtype
