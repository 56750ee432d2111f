"""What crosses the boundary of a graph in another dtype than its own: complex numbers, and 8-bit floats.

A complex tensor is carried as real and imaginary parts, ``[..., 2]``; an 8-bit float as the byte that it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_neuron.abi import TensorSpec, dtype_name


def needs_carrier(dtype: torch.dtype) -> bool:
    """Whether a tensor of that dtype crosses the boundary of a graph as one of another."""
    return dtype.is_complex or (dtype.is_floating_point and dtype.itemsize == 1)


def carried(tensor: Tensor) -> Tensor:
    """The tensor as it is handed to a compiled graph, in the same memory unless it is a lazy conjugate."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.view(torch.uint8) if needs_carrier(tensor.dtype) else tensor


def carried_spec(spec: TensorSpec) -> TensorSpec:
    """The spec of what :func:`carried` makes of a tensor of ``spec``."""
    dtype = spec.torch_dtype
    if dtype.is_complex:
        return TensorSpec(dtype_name(dtype.to_real()), (*spec.shape, 2))
    return TensorSpec(dtype_name(torch.uint8), spec.shape) if needs_carrier(dtype) else spec


def restored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor of ``dtype`` that ``tensor`` carries."""
    if dtype.is_complex:
        return torch.view_as_complex(tensor)
    return tensor.view(dtype) if needs_carrier(dtype) else tensor
