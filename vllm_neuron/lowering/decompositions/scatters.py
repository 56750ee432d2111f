"""Reductions into places that a tensor names, as decompositions.

StableHLO has scatters with any reduction, but torch-mlir makes none except sums. So an extreme or a product of what
goes to one place is a reduction over all sources, in which those for other places count for nothing: the work is
sources times places, and nothing of that size is stored.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def scatter_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """``aten.scatter_reduce.two``. ``reduce`` is ``sum``, ``prod``, ``mean``, ``amax`` or ``amin``."""
    if not x.dim():
        one = scatter_reduce(x.view(1), 0, index.view(1), source.view(1), reduce, include_self=include_self)
        return one.view(())
    source = source[tuple(slice(size) for size in index.shape)]
    if reduce in ("sum", "mean"):
        return _mean_or_sum(x, dim, index, source, reduce, include_self)
    hits, spread = _spread(x, dim, index, source)
    nothing = _nothing(x.dtype, reduce)
    spread = torch.where(hits, spread, nothing)
    reduced = spread.prod(-1).to(x.dtype) if reduce == "prod" else getattr(spread, reduce)(-1)
    reduced = reduced.movedim(-1, dim)
    if not include_self:
        return torch.where(hits.any(-1).movedim(-1, dim), reduced, x)
    return {"prod": torch.mul, "amax": torch.maximum, "amin": torch.minimum}[reduce](x, reduced)


def index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """``aten.index_reduce``: one place for each slice of ``source`` along ``dim``."""
    along = [1] * source.dim()
    along[dim] = -1
    index = index.reshape(along).expand(source.shape)
    return scatter_reduce(x, dim, index, source, reduce, include_self=include_self)


def scatter(x: Tensor, dim: int, index: Tensor, source: Tensor | float, *, reduce: str) -> Tensor:
    """``aten.scatter.reduce`` and ``value_reduce``, with their older names: ``add`` and ``multiply``."""
    if not isinstance(source, Tensor):
        source = torch.full_like(index, source, dtype=x.dtype)
    return scatter_reduce(x, dim, index, source, {"add": "sum", "multiply": "prod"}[reduce])


def put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """``aten.put``: writes at places of the flattened tensor."""
    flat = x.reshape(-1).index_put((index.reshape(-1),), source.reshape(-1), accumulate)
    return flat.view(x.shape)


def _mean_or_sum(x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, include_self: bool) -> Tensor:
    count = torch.zeros_like(x, dtype=torch.int32).scatter_add(dim, index, torch.ones_like(index, dtype=torch.int32))
    base = x if include_self else torch.where(count > 0, 0, x)
    total = base.scatter_add(dim, index, source)
    if reduce == "sum":
        return total
    count = (count + 1 if include_self else count.clamp(min=1)).to(x.dtype)
    return total / count if x.dtype.is_floating_point else torch.div(total, count, rounding_mode="floor")


def _spread(x: Tensor, dim: int, index: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """For each place of ``x``, with ``dim`` moved to the end, and each source: whether it goes there, and its value."""
    size = x.shape[dim]
    index = torch.where(index < 0, index + size, index).clamp(0, size - 1)
    # Where there are fewer indices than places in the other dimensions, the rest goes nowhere.
    short = [0 if axis == dim % x.dim() else x.shape[axis] - index.shape[axis] for axis in range(x.dim())]
    around = [number for missing in reversed(short) for number in (0, missing)]
    index = _aten.constant_pad_nd.default(index, around, -1)
    source = _aten.constant_pad_nd.default(source, around, 0)
    places = torch.arange(size, dtype=index.dtype, device=x.device)
    return index.movedim(dim, -1).unsqueeze(-2) == places[:, None], source.movedim(dim, -1).unsqueeze(-2)


def _nothing(dtype: torch.dtype, reduce: str) -> Any:
    """What changes no result."""
    if reduce == "prod":
        return 1
    least = -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min
    most = math.inf if dtype.is_floating_point else torch.iinfo(dtype).max
    return least if reduce == "amax" else most


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``aten._embedding_bag``: rows of ``weight``, summed (mode 0), averaged (1) or their maxima (2) by bag.

    The other three results are of use to a backward pass only.
    """
    bags = offsets.shape[0] - int(include_last_offset)
    places = torch.arange(indices.shape[0], dtype=offsets.dtype, device=indices.device)
    bag = (places[:, None] >= offsets[None, :]).sum(1) - 1
    member = bag[None, :] == torch.arange(bags, device=indices.device)[:, None]
    if padding_idx >= 0:
        member = member & (indices != padding_idx)[None, :]
    rows = weight[indices]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    count = member.sum(1)
    if mode == 2:
        result = torch.where(member[:, :, None], rows, -math.inf).amax(1)
        result = torch.where(count[:, None] > 0, result, 0)
    else:
        result = torch.where(member[:, :, None], rows, 0).sum(1)
        result = result / count.clamp(min=1)[:, None].to(result.dtype) if mode == 1 else result
    return result.to(weight.dtype), bag, count, count
