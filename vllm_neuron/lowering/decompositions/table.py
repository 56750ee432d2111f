"""The operators that capture replaces by simpler ones: torch-mlir's table, and what it leaves out or gets wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from vllm_neuron.lowering.decompositions import recurrent, scatters, sorting
from vllm_neuron.lowering.decompositions.arithmetic import division, special
from vllm_neuron.lowering.decompositions.arithmetic.doubles import doubles
from vllm_neuron.lowering.decompositions.arithmetic.powers import powers
from vllm_neuron.lowering.decompositions.arithmetic.reciprocal import reciprocal
from vllm_neuron.lowering.decompositions.attention import fused_attention
from vllm_neuron.lowering.decompositions.clamps import clamps
from vllm_neuron.lowering.decompositions.edges import edges
from vllm_neuron.lowering.decompositions.reductions import reductions
from vllm_neuron.lowering.decompositions.several_steps import several_steps

_aten = torch.ops.aten

# What is scanned in another dtype: 8 bits end torch-mlir's process, truth values it adds as bits, and torch itself
# keeps 32 bits between the steps of 16-bit floats.
_SCANNED_IN = {
    torch.bool: torch.int32, torch.int8: torch.int32, torch.uint8: torch.int32,
    torch.bfloat16: torch.float32, torch.float16: torch.float32,
}  # fmt: skip

# Forms with a scalar that torch-mlir lacks.
_BITWISE = {
    _aten.__and__.Scalar: _aten.bitwise_and.Tensor,
    _aten.__or__.Scalar: _aten.bitwise_or.Tensor,
    _aten.__xor__.Scalar: _aten.bitwise_xor.Tensor,
    _aten.__lshift__.Scalar: _aten.bitwise_left_shift.Tensor,
    _aten.__rshift__.Scalar: _aten.bitwise_right_shift.Tensor,
    _aten.bitwise_and.Scalar: _aten.bitwise_and.Tensor,
    _aten.bitwise_or.Scalar: _aten.bitwise_or.Tensor,
    _aten.bitwise_xor.Scalar: _aten.bitwise_xor.Tensor,
    _aten.bitwise_left_shift.Tensor_Scalar: _aten.bitwise_left_shift.Tensor,
    _aten.bitwise_right_shift.Tensor_Scalar: _aten.bitwise_right_shift.Tensor,
}


def decomposition_table() -> dict[OpOverload, Callable[..., Any]]:
    """A fresh copy of the table to trace with (``aot_autograd(decompositions=...)``, ``make_fx``).

    Imports torch-mlir.
    """
    return dict(_table())


@functools.cache
def _table() -> dict[OpOverload, Callable[..., Any]]:
    from torch_mlir.extras.fx_decomp_util import get_decomposition_table

    table = get_decomposition_table()
    table |= reductions(table)
    return {
        **table,
        **fused_attention(),
        **powers(table),
        **several_steps(table),
        **clamps(),
        **edges(),
        _aten.topk.default: sorting.topk,
        _aten.sort.default: sorting.sort,
        _aten.sort.stable: sorting.sort_stable,
        _aten.scatter_reduce.two: scatters.scatter_reduce,
        _aten.scatter.reduce: scatters.scatter,
        _aten.scatter.value_reduce: scatters.scatter,
        _aten.index_reduce.default: scatters.index_reduce,
        _aten.put.default: scatters.put,
        _aten._embedding_bag.default: scatters.embedding_bag,
        _aten._embedding_bag_forward_only.default: scatters.embedding_bag,
        _aten.mkldnn_rnn_layer.default: recurrent.lstm_layer,
        _aten.erfc.default: special.erfc,
        _aten.lgamma.default: special.lgamma,
        _aten.hypot.default: special.hypot,
        _aten._cdist_forward.default: special.cdist,
        _aten._euclidean_dist.default: special.euclidean,
        _aten.cumprod.default: _cumprod,
        _aten.cumsum.default: _cumsum,
        _aten.searchsorted.Tensor: _searchsorted,
        _aten.bucketize.Tensor: _bucketize,
        _aten.isfinite.default: _isfinite,
        **doubles(),
        **dict.fromkeys((_aten.div.Tensor_mode, _aten.div.Scalar_mode), division.divide),
        **dict.fromkeys((_aten.floor_divide.default, _aten.floor_divide.Scalar), division.floor_divide),
        **dict.fromkeys(
            (_aten.remainder.Scalar, _aten.remainder.Tensor, _aten.remainder.Scalar_Tensor), division.remainder
        ),
        **dict.fromkeys((_aten.fmod.Scalar, _aten.fmod.Tensor), division.fmod),
        _aten.reciprocal.default: reciprocal,
        _aten.abs.default: _abs,
        _aten.trunc.default: _trunc,
        _aten.roll.default: _roll,
        _aten.clamp.default: _clamp,
        _aten.diagonal.default: _diagonal,
        **{scalar: _with_tensor(tensor) for scalar, tensor in _BITWISE.items()},
    }


def _cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """A scan in log2(n) steps, each of which multiplies in the product of the previous ``step`` elements."""
    if dtype is None:
        dtype = x.dtype if x.dtype.is_floating_point else torch.int64
    x = x.to(dtype)
    if x.dim() == 0:
        return x
    x = x.to(_SCANNED_IN.get(dtype, dtype))
    size, step = x.shape[dim], 1
    while step < size:
        ones = torch.ones_like(x.narrow(dim, 0, step))
        x = x * torch.cat([ones, x.narrow(dim, 0, size - step)], dim)
        step *= 2
    return x.to(dtype)


def _cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    dtype = dtype or (x.dtype if x.dtype.is_floating_point else torch.int64)
    if x.dim() == 0:
        return x.to(dtype)
    if dtype not in _SCANNED_IN:
        return NotImplemented  # It stays the operator that it is.
    wide = _SCANNED_IN[dtype]
    return _aten.cumsum.default(x.to(dtype).to(wide), dim, dtype=wide).to(dtype)


def _searchsorted(
    boundaries: Tensor,
    values: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """How many boundaries lie before each value."""
    if sorter is not None:
        boundaries = boundaries.gather(-1, sorter)
    if boundaries.dim() > 1:
        boundaries = boundaries.unsqueeze(-2)
    values = values.unsqueeze(-1)
    # Not-greater rather than less-or-equal, so that NaN sorts after everything, as torch has it.
    before = ~(boundaries > values) if right or side == "right" else ~(boundaries >= values)
    return before.sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


def _bucketize(values: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    return _searchsorted(boundaries, values, out_int32=out_int32, right=right)


def _isfinite(x: Tensor) -> Tensor:
    if not x.dtype.is_floating_point:
        return torch.ones_like(x, dtype=torch.bool)
    # Not by x == x, which torch-mlir takes for true.
    return x.abs() < float("inf")


def _abs(x: Tensor) -> Any:
    return x.clone() if x.dtype == torch.uint8 else NotImplemented


def _trunc(x: Tensor) -> Any:
    # torch-mlir's form of it loses the sign of a zero.
    return torch.where(x < 0, x.ceil(), x.floor()) if x.dtype.is_floating_point else NotImplemented


def _roll(x: Tensor, shifts: Any, dims: Any = ()) -> Any:
    return NotImplemented if dims else x.reshape(-1).roll(shifts, 0).view(x.shape)


def _clamp(x: Tensor, min: float | None = None, max: float | None = None) -> Any:
    """Of integers between floats, floats."""
    dtype = functools.reduce(torch.promote_types, [torch.result_type(x, b) for b in (min, max) if b is not None])
    return NotImplemented if dtype == x.dtype else x.to(dtype).clamp(min, max)


def _diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    rows, columns = x.shape[dim1], x.shape[dim2]
    length = max(0, min(rows + min(offset, 0), columns - max(offset, 0)))
    index = torch.arange(length, device=x.device)
    return x.movedim((dim1, dim2), (-2, -1))[..., index - min(offset, 0), index + max(offset, 0)]


def _with_tensor(op: OpOverload) -> Callable[[Tensor, int], Tensor]:
    def with_tensor(x: Tensor, scalar: int) -> Tensor:
        dtype = torch.result_type(x, scalar)
        # The number wraps around, as in torch.
        number = torch.full((), scalar, dtype=torch.int64, device=x.device).to(dtype)
        result: Tensor = op(x.to(dtype), number)
        return result

    return with_tensor
