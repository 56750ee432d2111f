"""Orders of many elements, by a network of comparisons: IREE 3.13 sorts in quadratic time, on a small stack.

A bitonic network (Batcher, 1968) compares whole halves of blocks with each other, in log2(n)**2 / 2 steps. What it
orders are 64-bit integers: the key in the upper half, the position in the lower one. So it is stable, and one minimum
and one maximum are all there is to a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten

# Up to so many elements IREE's own sort is as fast, and quicker to compile.
_FEW = 256
_LAST = torch.iinfo(torch.int64).max
_KEYED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
_INFINITY = {torch.float32: 0x7F800000, torch.float64: 0x7FF0000000000000}


def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """``aten.topk``: values and positions, in order also where none is asked for."""
    if x.dim() == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    if _is_long(x, dim):
        return _first(x, dim, largest, k)
    values, indices = _aten.sort.default(x, dim, largest)
    return values.narrow(dim, 0, k).contiguous(), indices.narrow(dim, 0, k).contiguous()


def sort(x: Tensor, dim: int = -1, descending: bool = False) -> Any:
    """``aten.sort``. Few elements are left to the compiler."""
    return _first(x, dim, descending, x.shape[dim]) if _is_long(x, dim) else NotImplemented


def sort_stable(
    x: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Tensor, Tensor]:
    """``aten.sort.stable``: every sort is stable, here and when it is lowered."""
    result: tuple[Tensor, Tensor] = _aten.sort.default(x, dim, descending)
    return result


def _is_long(x: Tensor, dim: int) -> bool:
    return x.dim() > 0 and x.shape[dim] > _FEW


def _first(x: Tensor, dim: int, descending: bool, count: int) -> tuple[Tensor, Tensor]:
    """The first ``count`` values in order, and their positions."""
    rows = x.movedim(dim, -1)
    shape = rows.shape[:-1]
    places = _places(rows.reshape(-1, x.shape[dim]), descending, count)
    places = places.view(*shape, count).movedim(-1, dim)
    return x.gather(dim, places), places


def _places(rows: Tensor, descending: bool, count: int) -> Tensor:
    """Positions in each row of its first ``count`` elements in order."""
    keys = _keys(rows)
    keys = ~keys if descending else keys
    if keys.dtype != torch.int64:
        return _ordered(keys, count)
    # Stably by the lower halves, then by the upper ones. The lower ones compare as signed numbers when they are moved.
    lower = _ordered((keys & 0xFFFFFFFF) - 2**31, keys.shape[-1])
    return lower.gather(-1, _ordered((keys >> 32).gather(-1, lower), count))


def _keys(x: Tensor) -> Tensor:
    """Integers, of 32 bits or 64, in the order that torch gives to the elements: NaN last, both zeros alike."""
    if not x.dtype.is_floating_point:
        return x if x.dtype == torch.int64 else x.to(torch.int32)
    x = x.to(_KEYED_IN.get(x.dtype, x.dtype))
    bits = x.view(_BITS[x.dtype])
    size = bits & torch.iinfo(bits.dtype).max
    keys = torch.where(bits < 0, -size, size)
    return torch.where(size > _INFINITY[x.dtype], torch.iinfo(bits.dtype).max, keys)


def _ordered(keys: Tensor, count: int) -> Tensor:
    """Positions of the ``count`` least ``keys`` of each row, in their order. Keys have at most 32 bits."""
    rows, size = keys.shape
    places = torch.arange(size, dtype=torch.int64, device=keys.device)
    packed = keys.to(torch.int64) * 2**32 + places
    blocks = 1 << (size - 1).bit_length()
    packed = torch.cat([packed, packed.new_full((rows, blocks - size), _LAST)], 1)
    width = 1
    while blocks > 1:
        blocks //= 2
        pairs = packed.view(rows, blocks, 2, width)
        left, right = pairs.select(2, 0), pairs.select(2, 1).flip(-1)
        least = torch.minimum(left, right)
        # Of blocks that are wide enough only the lesser half can be among the first.
        halves = [least] if width >= count else [least, torch.maximum(left, right)]
        packed = _merged(torch.stack(halves, 2).view(-1, width)).view(rows, -1)
        width *= len(halves)
    return packed[:, :count] & 0xFFFFFFFF


def _merged(packed: Tensor) -> Tensor:
    """Rows that rise and fall, or fall and rise, in order. Their length is a power of two."""
    shape, step = packed.shape, packed.shape[-1] // 2
    while step:
        pairs = packed.reshape(-1, 2, step)
        left, right = pairs.select(1, 0), pairs.select(1, 1)
        packed = torch.stack([torch.minimum(left, right), torch.maximum(left, right)], 1)
        step //= 2
    return packed.reshape(shape)
