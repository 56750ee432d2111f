"""Pools: of maxima, with their places; and averages with another divisor than the window's size, or in part windows.

A window is looked at one dimension after the other, last dimension first, so that there are as many steps as the sides
of the window add up to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

_aten = torch.ops.aten


@dataclass(frozen=True)
class Axis:
    """The windows along one dimension, as PyTorch counts them."""

    size: int
    kernel: int
    stride: int
    padding: int
    dilation: int
    ceil_mode: bool

    @property
    def count(self) -> int:
        """How many windows there are: none begins beyond the input and its padding on the left."""
        span = self.size + 2 * self.padding - self.dilation * (self.kernel - 1) - 1
        windows = (-(-span // self.stride) if self.ceil_mode else span // self.stride) + 1
        if self.ceil_mode and (windows - 1) * self.stride >= self.size + self.padding:
            windows -= 1
        return windows

    @property
    def right(self) -> int:
        """How much to add on the right for the input to end where its last window does; negative to cut off."""
        return (self.count - 1) * self.stride + self.dilation * (self.kernel - 1) + 1 - self.size - self.padding

    def steps(self, padded: Tensor, dim: int) -> list[Tensor]:
        """For each position in a window, what all windows have there."""
        reach = (self.count - 1) * self.stride + 1
        starts = range(0, self.kernel * self.dilation, self.dilation)
        return [_aten.slice.Tensor(padded, dim, start, start + reach, self.stride) for start in starts]


def axes(
    x: Tensor, dims: int, kernel: Any, stride: Any, padding: Any, dilation: Any = 1, ceil_mode: bool = False
) -> list[Axis]:
    """The windows along each of the last ``dims`` dimensions of ``x``."""
    kernels, strides, paddings, dilations = (
        _each(value, dims) for value in (kernel, stride or kernel, padding, dilation)
    )
    each = zip(x.shape[-dims:], kernels, strides, paddings, dilations, strict=True)
    return [
        Axis(size, kernel, stride, padding, dilation, ceil_mode) for size, kernel, stride, padding, dilation in each
    ]


def _each(value: Any, dims: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


def pad(x: Tensor, windows: Sequence[Axis], value: float) -> Tensor:
    """``x`` so that it ends where its last window does."""
    around = [number for axis in reversed(windows) for number in (axis.padding, axis.right)]
    return _aten.constant_pad_nd.default(x, around, value) if any(around) else x


def maxima(
    dims: int,
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """Each window's maximum, and its place in the input's last ``dims`` dimensions."""
    windows = axes(x, dims, kernel_size, stride, padding, dilation, ceil_mode)
    least = float("-inf") if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    padded = pad(x, windows, least)
    # Apart from the places, which nobody may ask for.
    return _folded(torch.maximum, padded, windows), _places(x, padded, windows)


def _places(x: Tensor, best: Tensor, windows: Sequence[Axis]) -> Tensor:
    """The place of the first maximum, or of the last NaN."""
    shape = x.shape[-len(windows) :]
    places = torch.arange(shape.numel(), dtype=torch.int32, device=x.device).view(shape).expand(x.shape)
    place = pad(places, windows, -1)
    for dim in range(x.dim() - len(windows), x.dim())[::-1]:
        axis = windows[dim - x.dim()]
        (best, place), *others = zip(axis.steps(best, dim), axis.steps(place, dim), strict=True)
        for value, there in others:
            better = (value > best) | value.isnan() if x.dtype.is_floating_point else value > best
            # What is beyond the input has no place.
            better = (better | (place < 0)) & (there >= 0)
            best, place = torch.where(better, value, best), torch.where(better, there, place)
    return place.to(torch.int64)


def average(op: OpOverload, dims: int, x: Tensor, *arguments: Any, **options: Any) -> Any:
    """An average over windows that are not whole, or that is divided by something else than their size."""
    names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
    given = dict(zip(names, arguments, strict=False)) | options
    kernel, padding, ceil_mode = given["kernel_size"], given.get("padding", 0), given.get("ceil_mode", False)
    counts_padding, divisor = given.get("count_include_pad", True), given.get("divisor_override")
    windows = axes(x, dims, kernel, given.get("stride"), padding, 1, ceil_mode)
    if divisor is None and (counts_padding or not any(axis.padding for axis in windows)) and not ceil_mode:
        return NotImplemented
    total = _folded(torch.add, pad(x, windows, 0), windows)
    return total / (divisor if divisor is not None else _elements(x, windows, counts_padding))


def _folded(function: Callable[[Tensor, Tensor], Tensor], padded: Tensor, windows: Sequence[Axis]) -> Tensor:
    for dim in range(padded.dim() - len(windows), padded.dim())[::-1]:
        padded = functools.reduce(function, windows[dim - padded.dim()].steps(padded, dim))
    return padded


def _elements(x: Tensor, windows: Sequence[Axis], counts_padding: bool) -> Tensor:
    """How many elements each window has: of the input, and of its padding where that counts."""
    sizes = [axis.size + 2 * axis.padding if counts_padding else axis.size for axis in windows]
    ones = torch.ones(sizes, dtype=x.dtype, device=x.device)
    beside = [(0 if counts_padding else axis.padding) for axis in windows]
    around = [
        number
        for axis, left in reversed(list(zip(windows, beside, strict=True)))
        for number in (left, axis.right - (axis.padding if counts_padding else 0))
    ]
    return _folded(torch.add, _aten.constant_pad_nd.default(ones, around, 0), windows)
