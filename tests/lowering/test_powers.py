"""Powers, roots and logarithms: exact where eager PyTorch is, over every exponent; else to the last bit but one."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

BACKENDS = ("neuron_native", "vllm_neuron")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# In the fast suite 32 bits on both routes, which share all that is computed.
FLOATS = [
    pytest.param(backend, dtype, id=f"{backend}-{dtype}", marks=[pytest.mark.slow] if slow else [])
    for backend in BACKENDS
    for dtype in DTYPES
    for slow in [dtype != torch.float32]
]
INF, NAN = math.inf, math.nan

Function = Callable[[Tensor], Tensor]


def compiled(functions: dict[str, Function], inputs: list[Tensor], backend: str) -> list[Tensor]:
    """One compiled function of all ``functions``, each on its own input."""
    torch._dynamo.reset()

    def run(inputs: list[Tensor]) -> list[Tensor]:
        return [function(x) for function, x in zip(functions.values(), inputs, strict=True)]

    with torch.no_grad():
        results: list[Tensor] = torch.compile(run, backend=backend, fullgraph=True, dynamic=False)(inputs)
    return results


def check(cases: dict[str, tuple[Function, Tensor]], backend: str, ulps: int = 0) -> None:
    """Equal to eager PyTorch bit by bit, NaN for NaN, but for ``ulps`` places of the last bit."""
    results = compiled(
        {name: function for name, (function, _) in cases.items()}, [x for _, x in cases.values()], backend
    )
    for (name, (function, x)), result in zip(cases.items(), results, strict=True):
        expected = function(x)
        assert result.dtype == expected.dtype, name
        wrong = (ordered(result) - ordered(expected)).abs() > ulps
        wrong &= ~(result.isnan() & expected.isnan())
        found, right = (value[wrong][:4].tolist() for value in (result, expected))
        assert not wrong.any(), f"{name}: {int(wrong.sum())} of {wrong.numel()} are wrong: {found}, expected {right}"


def ordered(x: Tensor) -> Tensor:
    """Whole numbers in the order of ``x``, one for each value; the two zeros are one apart."""
    if not x.dtype.is_floating_point:
        return x.long()
    bits = x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]).long()
    return torch.where(bits < 0, -1 - (bits & torch.iinfo(torch.int64).max >> 64 - 8 * x.element_size()), bits)


def exponents(dtype: torch.dtype) -> Tensor:
    """Of every power of two that is a normal number, and of those that are denormal, in ``float64``."""
    info = torch.finfo(dtype)
    least = math.frexp(info.smallest_normal)[1] - 1 + math.frexp(info.eps)[1] - 1
    return torch.arange(least, math.frexp(info.max)[1], dtype=torch.float64)


def of_powers_of_two(dtype: torch.dtype) -> dict[str, tuple[Function, Tensor]]:
    k = exponents(dtype)
    twos = torch.ldexp(torch.ones((), dtype=torch.float64), k).to(dtype)
    k = k.to(dtype)
    normal = twos[twos >= torch.finfo(dtype).smallest_normal]
    fours = normal[normal.double().log2() % 2 == 0]
    squares = torch.arange(1, 65).square().to(dtype)
    return {
        "log2": (torch.log2, twos),
        "floor of log2": (lambda x: torch.floor(torch.log2(x)), twos),
        "exp2": (torch.exp2, k),
        "pow.Scalar": (lambda x: torch.pow(2.0, x), k),
        "pow.Tensor_Tensor": (lambda x: torch.pow(torch.full_like(x, 2), x), k),
        "quarter": (lambda x: torch.pow(torch.full_like(x, 0.25), -x * 0.5), k),
        "ldexp": (lambda x: torch.ldexp(torch.ones_like(x), x), k[-len(normal) :]),
        "significand of frexp": (lambda x: torch.frexp(x)[0], twos),
        "exponent of frexp": (lambda x: torch.frexp(x)[1], twos),
        "rsqrt": (torch.rsqrt, fours),
        "sqrt": (torch.sqrt, fours),
        "to the -0.5": (lambda x: x**-0.5, fours),
        "to the 1.5": (lambda x: x**1.5, fours[len(fours) // 6 :]),
        "squares to the 1.5": (lambda x: x**1.5, squares),
    }


def of_powers_of_ten(dtype: torch.dtype) -> dict[str, tuple[Function, Tensor]]:
    """``10**k`` is exact as far as ``5**k`` has the bits of a significand."""
    info = torch.finfo(dtype)
    exact = torch.arange(int(math.log(2 / info.eps, 5)) + 1)
    exact = exact[10.0 ** exact.double() <= info.max]
    lowest, highest = -math.floor(-math.log10(info.smallest_normal)), math.floor(math.log10(info.max))
    tens = torch.tensor([float(f"1e{k}") for k in range(lowest, highest + 1)], dtype=torch.float64)
    return {"log10": (torch.log10, tens.to(dtype)), "to the k": (lambda x: 10.0**x, exact.to(dtype))}


def of_whole_exponents(dtype: torch.dtype) -> dict[str, tuple[Function, Tensor]]:
    """Of numbers whose powers ``dtype`` has: up to the fifth, of up to three bits."""
    small = torch.arange(-3.0, 4).to(dtype)
    cases: dict[str, tuple[Function, Tensor]] = {
        str(count): (lambda x, count=count: x**count, small if count > 2 else small * 5) for count in (0, 1, 2, 3, 4, 5)
    }
    halves = torch.tensor([-4, -2, -0.5, 0.25, 8]).to(dtype)
    return {
        **cases,
        **{str(count): (lambda x, count=count: x**count, halves) for count in (-1, -2, -3, -4)},
        "6.0": (lambda x: x**6.0, halves),
        "of a tensor": (lambda x: torch.pow(x, torch.full_like(x, 5)), small),
        "float_power": (lambda x: torch.float_power(x, 5), small),
    }


@pytest.mark.parametrize(("backend", "dtype"), FLOATS)
def test_exact_numbers_are_exact(backend: str, dtype: torch.dtype) -> None:
    groups = (of_powers_of_two, of_powers_of_ten, of_whole_exponents)
    check({f"{group.__name__}, {name}": case for group in groups for name, case in group(dtype).items()}, backend)


@pytest.mark.parametrize(("backend", "dtype"), FLOATS)
def test_random_numbers_are_right_to_the_last_bit_but_one(backend: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(14)
    normal = torch.randn(2, 2048, generator=generator, dtype=torch.float64)
    spread = (normal[0] * (2 if dtype == torch.float16 else 20)).exp().to(dtype)
    x, y = normal[0].to(dtype), (normal[1] * 3).to(dtype)
    near_one = 1 + x * 2**-6
    exponent = y * (1 if dtype == torch.float16 else 8)
    functions: dict[str, tuple[Function, Tensor]] = {
        "log2": (torch.log2, spread),
        "log2 near one": (torch.log2, near_one),
        "log10": (torch.log10, spread),
        "exp2": (torch.exp2, exponent),
        "ten": (lambda x: 10.0**x, y),
        "tensors": (lambda x: torch.pow(x[0], x[1]), torch.stack([spread, y])),
        "near one": (lambda x: torch.pow(x[0], x[1] * 64), torch.stack([near_one, y])),
        "rsqrt": (torch.rsqrt, spread),
        **{f"to the {power}": (lambda x, power=power: x**power, x) for power in (2, 3, 4, 5, 7, -1, -2, -3, 31)},
        **{f"size to the {power}": (lambda x, power=power: x**power, spread) for power in (0.5, -0.5, 1.5, 1.1, -2.7)},
    }
    check(functions, backend, ulps=1)


SPECIAL = [0.0, -0.0, 1, -1, INF, -INF, NAN, 0.5, -0.5, 2, -2, 3, -3, 2.5, -2.5, 60, -61, 1e4]


@pytest.mark.parametrize(("backend", "dtype"), FLOATS)
def test_special_values(backend: str, dtype: torch.dtype) -> None:
    """Zeros and their signs, infinities, NaN; negative numbers with whole, odd and other exponents; denormal ones."""
    tiny = torch.finfo(dtype).tiny
    x = torch.tensor([*SPECIAL, tiny / 2, -tiny / 4, tiny, torch.finfo(dtype).max], dtype=torch.float64).to(dtype)
    exponents = (0, 1, 2, 3, 4, 5, -1, -2, -3, -4, 0.5, -0.5, 1.5, -1.5, 300.0, INF, -INF, NAN)
    # IREE's own arithmetic takes a denormal number for zero.
    normal = x[:-4]
    bases = (0.0, -0.0, 1.0, -1.0, 2.0, -2.0, -0.5, INF, -INF, NAN)
    cases: dict[str, tuple[Function, Tensor]] = {
        "log2": (torch.log2, x),
        "log10": (torch.log10, x),
        "exp2": (torch.exp2, normal),
        "tensors": (lambda x: torch.pow(x[:, None], x), x if dtype == torch.float16 else normal),
        "denormal": (lambda x: torch.pow(x, torch.full_like(x, 0.25)), x[-4:]),
        **{f"to the {power}": (lambda x, power=power: x**power, normal) for power in exponents},
        **{f"powers of {base}": (lambda x, base=base: torch.pow(base, x), normal) for base in bases},
    }
    check(cases, backend, ulps=1)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_integers(backend: str, dtype: torch.dtype) -> None:
    x = torch.arange(-9, 10).to(dtype)
    limits = torch.tensor([torch.iinfo(dtype).min, torch.iinfo(dtype).max, -1, 0, 1, 2], dtype=dtype)
    positive = x.abs() if dtype.is_signed else x % 64
    cases: dict[str, tuple[Function, Tensor]] = {
        **{f"to the {power}": (lambda x, power=power: x**power, x) for power in (0, 1, 2, 3, 4, 5, 13)},
        "tensors": (lambda x: x[:, None] ** x, x),
        "limits": (lambda x: x[:, None] ** x, limits),
        "powers of two": (lambda x: 2**x, positive),
        "powers of -3": (lambda x: (-3) ** x, x.abs() if dtype.is_signed else positive),
        "float base": (lambda x: 2.0**x, x),
        "log2": (lambda x: torch.log2(x), positive),
    }
    check(cases, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_rests_on_them(backend: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(256, generator=generator)
    whole = torch.arange(-8.0, 9)
    scales = torch.ldexp(torch.ones(40), torch.arange(-20, 20))

    def kurtosis(x: Tensor) -> Tensor:
        return ((x - x.mean()) ** 4).mean() / ((x - x.mean()) ** 2).mean() ** 2

    def legendre(x: Tensor) -> Tensor:
        return (231 * x**6 - 315 * x**4 + 105 * x**2 - 5) / 16

    def position_bucket(distance: Tensor) -> Tensor:
        """Logarithmic buckets, in the manner of T5, whose limits are powers of two."""
        return 8 + (torch.log2(distance.float() / 8) / math.log2(128 / 8) * 8).long()

    def int8_scale(amax: Tensor) -> Tensor:
        return torch.exp2(torch.floor(torch.log2(amax)) - 6)

    exact: dict[str, tuple[Function, Tensor]] = {
        "legendre": (legendre, whole),
        "position bucket": (position_bucket, torch.arange(8, 512)),
        "int8 scale": (int8_scale, scales),
        "digits": (lambda x: torch.floor(torch.log10(x)) + 1, 10 ** torch.arange(10)),
        "float_power of negatives": (lambda x: torch.float_power(x, 3), whole),
        "norm of order 3": (lambda x: torch.linalg.vector_norm(x, 3, dim=1), torch.tensor([[3.0, -4, 5], [-1, 6, -8]])),
    }
    close: dict[str, tuple[Function, Tensor]] = {
        "kurtosis": (kurtosis, x),
        "logaddexp2": (lambda x: torch.logaddexp2(x, x.flip(0)), x.abs()),
        "norm of order 5": (lambda x: torch.linalg.vector_norm(x, 5), x),
        "norm of order -inf": (lambda x: torch.linalg.vector_norm(x, -INF), x),
    }
    check(exact, backend)
    check(close, backend, ulps=8)
