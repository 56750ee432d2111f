"""Operators of complex numbers, as what they do to real and imaginary parts."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_aggregate

from vllm_neuron.errors import UnsupportedOpError

_aten = torch.ops.aten

# A transform is a product with a matrix of its size squared.
_LONGEST = 2048


@dataclass(frozen=True)
class Complex:
    """A complex tensor in two parts."""

    real: Tensor
    imag: Tensor


def _as_complex(value: Any) -> Complex:
    if isinstance(value, Complex):
        return value
    if isinstance(value, Tensor):
        return Complex(value, torch.zeros_like(value))
    return Complex(value.real, value.imag)


def _in_parts(target: Any) -> Callable[..., Complex | list[Complex]]:
    """An operator that does the same to both parts: it moves elements, or is linear."""

    def in_parts(*args: Any, **kwargs: Any) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if name not in ("dtype", "memory_format")}

        def of(part: str) -> Any:
            def take(value: Any) -> Any:
                return getattr(value, part) if isinstance(value, Complex) else value

            return target(*map_aggregate(args, take), **kwargs)

        real, imag = of("real"), of("imag")
        if isinstance(real, Tensor):
            return Complex(real, imag)
        return [Complex(*parts) for parts in zip(real, imag, strict=True)]

    return in_parts


def _add(x: Any, y: Any, *, alpha: float = 1) -> Complex:
    x, y = _as_complex(x), _as_complex(y)
    return Complex(x.real + alpha * y.real, x.imag + alpha * y.imag)


def _subtract(x: Any, y: Any, *, alpha: float = 1) -> Complex:
    return _add(x, y, alpha=-alpha)


def _multiply(x: Any, y: Any) -> Complex:
    if not isinstance(x, Complex):
        x, y = y, x
    if not isinstance(y, Complex | complex):
        return Complex(x.real * y, x.imag * y)
    y = _as_complex(y)
    return Complex(x.real * y.real - x.imag * y.imag, x.real * y.imag + x.imag * y.real)


def _divide(x: Any, y: Any) -> Complex:
    if not isinstance(y, Complex | complex):
        return Complex(x.real / y, x.imag / y)
    y = _as_complex(y)
    size = y.real * y.real + y.imag * y.imag
    product = _multiply(_as_complex(x), Complex(y.real, -y.imag))
    return Complex(product.real / size, product.imag / size)


def _exponential(x: Complex) -> Complex:
    return _polar(x.real.exp(), x.imag)


def _polar(size: Tensor, angle: Tensor) -> Complex:
    return Complex(size * angle.cos(), size * angle.sin())


def _matmul(x: Any, y: Any) -> Complex:
    x, y = _as_complex(x), _as_complex(y)
    return Complex(x.real @ y.real - x.imag @ y.imag, x.real @ y.imag + x.imag @ y.real)


def _converted(x: Any, dtype: torch.dtype | None = None, **options: Any) -> Any:
    if dtype is None:
        return x
    if not dtype.is_complex:
        return x.real.to(dtype)
    x = _as_complex(x)
    return Complex(x.real.to(dtype.to_real()), x.imag.to(dtype.to_real()))


def _turned(x: Complex, size: int, dim: int, sign: int, count: int) -> Complex:
    """The first ``count`` of the discrete Fourier transform of ``size`` along ``dim``."""
    if size > _LONGEST:
        raise UnsupportedOpError(f"a Fourier transform of {size} elements: up to {_LONGEST} are supported")
    given, device = x.real.shape[dim], x.real.device
    turns = torch.arange(given, device=device)[:, None] * torch.arange(count, device=device) % size
    # Small angles have more digits.
    turns = torch.where(turns > size // 2, turns - size, turns).to(x.real.dtype)
    angle = turns * (sign * math.tau / size)
    cosine, sine = angle.cos(), angle.sin()
    moved = Complex(x.real.movedim(dim, -1), x.imag.movedim(dim, -1))
    product = _matmul(moved, Complex(cosine, sine))
    return Complex(product.real.movedim(-1, dim), product.imag.movedim(-1, dim))


def _scaled(x: Complex, sizes: Sequence[int], normalization: int) -> Complex:
    """By nothing (0), by one over the root of the number of elements (1), or by one over it (2)."""
    scale = math.prod(sizes) ** (0, -0.5, -1)[normalization]
    return Complex(x.real * scale, x.imag * scale)


def _fft(x: Any, dims: Sequence[int], normalization: int, forward: bool) -> Complex:
    x = _as_complex(x)
    sizes = [x.real.shape[dim] for dim in dims]
    for dim, size in zip(dims, sizes, strict=True):
        x = _turned(x, size, dim, -1 if forward else 1, size)
    return _scaled(x, sizes, normalization)


def _real_fft(x: Tensor, dims: Sequence[int], normalization: int, onesided: bool) -> Complex:
    size = x.shape[dims[-1]]
    turned = _turned(_as_complex(x), size, dims[-1], -1, size // 2 + 1 if onesided else size)
    return _scaled(_fft(turned, dims[:-1], 0, True), [x.shape[dim] for dim in dims], normalization)


def _inverse_real_fft(x: Complex, dims: Sequence[int], normalization: int, size: int) -> Tensor:
    """Of the half of a transform that is given; the other half is its conjugate."""
    sizes = [*(x.real.shape[dim] for dim in dims[:-1]), size]
    x = _fft(x, dims[:-1], 0, False)
    half = x.real.shape[dims[-1]]
    places = torch.arange(half, device=x.real.device)
    twice = torch.where((places == 0) | (2 * places == size), 1.0, 2.0).to(x.real.dtype)
    weights = twice.view(-1, *[1] * (x.real.dim() - 1 - dims[-1] % x.real.dim()))
    weighted = Complex(x.real * weights, x.imag * weights)
    return _scaled(_turned(weighted, size, dims[-1], 1, size), sizes, normalization).real


_IN_PARTS = (
    _aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten.permute.default,
    _aten.transpose.int, _aten.t.default, _aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim,
    _aten.squeeze.dims, _aten.expand.default, _aten.slice.Tensor, _aten.select.int, _aten.clone.default,
    _aten.alias.default, _aten.detach.default, _aten.lift_fresh_copy.default, _aten.cat.default, _aten.stack.default,
    _aten.split.Tensor, _aten.split_with_sizes.default, _aten.unbind.int, _aten.index.Tensor,
    _aten.index_select.default, _aten.gather.default, _aten.constant_pad_nd.default, _aten.roll.default,
    _aten.flip.default, _aten.repeat.default, _aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default,
    _aten.mean.dim, _aten.neg.default, _aten.where.self, _aten.zeros_like.default, operator.getitem,
)  # fmt: skip

RULES: dict[Any, Callable[..., Any]] = {
    **{target: _in_parts(target) for target in _IN_PARTS},
    operator.getitem: operator.getitem,
    _aten.view_as_complex.default: lambda x: Complex(x.select(-1, 0), x.select(-1, 1)),
    _aten.view_as_real.default: lambda z: torch.stack([z.real, z.imag], -1),
    _aten.complex.default: lambda real, imag: Complex(real, imag),
    _aten.polar.default: _polar,
    _aten.real.default: lambda z: z.real,
    _aten.imag.default: lambda z: z.imag,
    _aten.abs.default: lambda z: torch.hypot(z.real, z.imag),
    _aten.angle.default: lambda z: torch.atan2(z.imag, z.real),
    **dict.fromkeys(
        (_aten._conj.default, _aten._conj_physical.default, _aten.conj_physical.default),
        lambda z: Complex(z.real, -z.imag),
    ),
    **dict.fromkeys((_aten.resolve_conj.default, _aten.resolve_neg.default), lambda z: z),
    **dict.fromkeys((_aten.add.Tensor, _aten.add.Scalar), _add),
    **dict.fromkeys((_aten.sub.Tensor, _aten.sub.Scalar), _subtract),
    **dict.fromkeys((_aten.mul.Tensor, _aten.mul.Scalar), _multiply),
    **dict.fromkeys((_aten.div.Tensor, _aten.div.Scalar), _divide),
    _aten.reciprocal.default: lambda z: _divide(1, z),
    _aten.exp.default: _exponential,
    **dict.fromkeys((_aten.mm.default, _aten.bmm.default, _aten.mv.default), _matmul),
    **dict.fromkeys((_aten._to_copy.default, torch.ops.prims.convert_element_type.default), _converted),
    _aten._fft_c2c.default: _fft,
    _aten._fft_r2c.default: _real_fft,
    _aten._fft_c2r.default: _inverse_real_fft,
}
