"""The operators that capture replaces by simpler ones: torch-mlir's table, and what it leaves out or gets wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from vllm_neuron.lowering.attention import fused_attention
from vllm_neuron.lowering.clamps import clamps, greater_truth, lesser_truth
from vllm_neuron.lowering.edges import edges
from vllm_neuron.lowering.reductions import first_of, reductions
from vllm_neuron.lowering.several_steps import several_steps

_aten = torch.ops.aten

# What torch-mlir can't scan in: 8 bits end its process, and IREE lacks the conversion for the other.
_SCANNED_IN = {torch.int8: torch.int32, torch.uint8: torch.int32, torch.bfloat16: torch.float32}

_COMPARISONS = (
    _aten.lt.Tensor, _aten.le.Tensor, _aten.gt.Tensor, _aten.ge.Tensor, _aten.eq.Tensor, _aten.ne.Tensor,
    _aten.maximum.default, _aten.minimum.default,
)  # fmt: skip

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
    return {
        **table,
        **reductions(table),
        **fused_attention(),
        **several_steps(table),
        **clamps(),
        **edges(),
        _aten.topk.default: _topk,
        _aten.sort.stable: _sort_stable,
        _aten.cumprod.default: _cumprod,
        _aten.cumsum.default: _cumsum,
        _aten.searchsorted.Tensor: _searchsorted,
        _aten.bucketize.Tensor: _bucketize,
        _aten.isfinite.default: _isfinite,
        **dict.fromkeys((_aten.div.Tensor_mode, _aten.div.Scalar_mode), _divide),
        **dict.fromkeys((_aten.floor_divide.default, _aten.floor_divide.Scalar), _floor_divide),
        **dict.fromkeys((_aten.remainder.Scalar, _aten.remainder.Tensor, _aten.remainder.Scalar_Tensor), _remainder),
        _aten.fmod.Scalar: _fmod,
        _aten.fmod.Tensor: _fmod,
        _aten.abs.default: _abs,
        _aten.roll.default: _roll,
        _aten.clamp.default: _clamp,
        _aten.diagonal.default: _diagonal,
        **{scalar: _with_tensor(tensor) for scalar, tensor in _BITWISE.items()},
        **{compare: _of_different_sign(compare) for compare in _COMPARISONS},
        _aten.maximum.default: first_of(greater_truth, _of_different_sign(_aten.maximum.default)),
        _aten.minimum.default: first_of(lesser_truth, _of_different_sign(_aten.minimum.default)),
    }


def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    if x.dim() == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    values, indices = _aten.sort.default(x, dim, largest)
    return values.narrow(dim, 0, k).contiguous(), indices.narrow(dim, 0, k).contiguous()


def _sort_stable(
    x: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Tensor, Tensor]:
    # Every sort is made stable when it is lowered.
    result: tuple[Tensor, Tensor] = _aten.sort.default(x, dim, descending)
    return result


def _cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """A scan in log2(n) steps, each of which multiplies in the product of the previous ``step`` elements."""
    if dtype is None:
        dtype = x.dtype if x.dtype.is_floating_point else torch.int64
    x = x.to(dtype)
    if x.dim() == 0:
        return x
    size, step = x.shape[dim], 1
    while step < size:
        ones = torch.ones_like(x.narrow(dim, 0, step))
        x = x * torch.cat([ones, x.narrow(dim, 0, size - step)], dim)
        step *= 2
    return x


def _cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    dtype = dtype or (x.dtype if x.dtype.is_floating_point else torch.int64)
    if x.dim() == 0:
        return x.to(dtype)
    if dtype not in _SCANNED_IN:
        return NotImplemented  # It stays the operator that it is.
    wide = _SCANNED_IN[dtype]
    return _aten.cumsum.default(x.to(wide), dim, dtype=wide).to(dtype)


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


def _roll(x: Tensor, shifts: Any, dims: Any = ()) -> Any:
    return NotImplemented if dims else x.reshape(-1).roll(shifts, 0).view(x.shape)


def _clamp(x: Tensor, min: float | None = None, max: float | None = None) -> Any:
    """Of integers between floats, floats."""
    dtype = functools.reduce(torch.promote_types, [torch.result_type(x, b) for b in (min, max) if b is not None])
    return NotImplemented if dtype == x.dtype else x.to(dtype).clamp(min, max)


def _divide(x: Tensor, y: Tensor | float, *, rounding_mode: str | None = None) -> Any:
    return _floor_divide(x, y) if rounding_mode == "floor" else NotImplemented


def _floor_divide(x: Tensor, y: Tensor | float) -> Tensor:
    dtype, dividend, divisor = _division(x, y)
    if not dtype.is_floating_point:
        quotient = torch.div(dividend, divisor, rounding_mode="trunc")
        return quotient - _is_across(dividend - quotient * divisor, divisor).to(dtype)
    rest = _rest(dividend, divisor)
    floor = ((dividend - rest) / divisor).round() - _is_across(rest, divisor).to(dividend.dtype)
    return torch.where(divisor == 0, dividend / divisor, floor).to(dtype)


def _remainder(x: Tensor | float, y: Tensor | float) -> Tensor:
    """The sign is the divisor's."""
    dtype, dividend, divisor = _division(x, y)
    rest = _rest(dividend, divisor)
    return torch.where(_is_across(rest, divisor), rest + divisor, rest).to(dtype)


def _fmod(x: Tensor, y: Tensor | float) -> Tensor:
    """The sign is the dividend's."""
    dtype, dividend, divisor = _division(x, y)
    return _rest(dividend, divisor).to(dtype)


def _division(x: Tensor | float, y: Tensor | float) -> tuple[torch.dtype, Tensor, Tensor]:
    """The result's dtype; dividend and divisor, wide enough for the product of divisor and quotient to be exact."""
    dtype = torch.result_type(x, y)
    wide = torch.float64 if dtype.is_floating_point else dtype
    device = (x if isinstance(x, Tensor) else y).device  # type: ignore[union-attr]
    # A number is rounded to the dtype, as in torch. It becomes an operator's result, since capture admits no constant
    # that is a tensor.
    dividend, divisor = (
        (number if isinstance(number, Tensor) else torch.full((), number, dtype=dtype, device=device)).to(wide)
        for number in (x, y)
    )
    return dtype, dividend, divisor


def _rest(dividend: Tensor, divisor: Tensor) -> Tensor:
    """What is left of the dividend after a division that rounds towards zero."""
    quotient = torch.div(dividend, divisor, rounding_mode="trunc")
    # Infinity times zero is not a number.
    return torch.where(quotient == 0, dividend, dividend - quotient * divisor)


def _is_across(rest: Tensor, divisor: Tensor) -> Tensor:
    """Whether the signs differ, so that rounding towards minus infinity goes one step further."""
    return (rest != 0) & ((rest < 0) ^ (divisor < 0))


def _diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    rows, columns = x.shape[dim1], x.shape[dim2]
    length = max(0, min(rows + min(offset, 0), columns - max(offset, 0)))
    index = torch.arange(length, device=x.device)
    return x.movedim((dim1, dim2), (-2, -1))[..., index - min(offset, 0), index + max(offset, 0)]


def _of_different_sign(op: OpOverload) -> Callable[[Tensor, Tensor], Any]:
    """Of ``uint8`` and ``int8``, in 16 bits: torch-mlir compares the bits of the two, as if both had a sign."""

    def of_different_sign(x: Tensor, y: Tensor) -> Any:
        if {x.dtype, y.dtype} != {torch.uint8, torch.int8}:
            return NotImplemented
        return op(x.to(torch.int16), y.to(torch.int16))

    return of_different_sign


def _with_tensor(op: OpOverload) -> Callable[[Tensor, int], Tensor]:
    def with_tensor(x: Tensor, scalar: int) -> Tensor:
        result: Tensor = op(x, torch.full((), scalar, dtype=x.dtype, device=x.device))
        return result

    return with_tensor
