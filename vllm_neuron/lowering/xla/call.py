"""One operator call while it is traced: its arguments as JAX values, and what torch says of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch.fx import Node

from vllm_neuron.abi import dtype_name
from vllm_neuron.errors import UnsupportedOpError
from vllm_neuron.lowering.shared.half import wide
from vllm_neuron.lowering.shared.passes import describe

Array = jax.Array
# Takes the call, then the operator's own arguments. The result may have another dtype than torch's: it is converted.
Operator = Callable[..., Any]


@dataclass(frozen=True)
class Call:
    """The node whose operator is being carried out."""

    node: Node

    @property
    def value(self) -> torch.Tensor:
        """The result as captured: the first one, where there are several."""
        value = self.node.meta["val"]
        first: torch.Tensor = value[0] if isinstance(value, list | tuple) else value
        return first

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        return tuple(self.value.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the result."""
        return self.value.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that torch computes the result in: 32 bits for a float of 16."""
        return wide(self.dtype)

    def promoted(self, *arguments: Any) -> list[Array]:
        """The arguments as arrays of the one dtype that torch compares them in."""
        metas: list[Any] = [
            arg.meta["val"] if isinstance(arg, Node) else arg for arg in self.node.args[: len(arguments)]
        ]
        dtype = torch.result_type(metas[0], metas[1])
        return [array(argument, dtype) for argument in arguments]

    def unsupported(self, why: str = "") -> UnsupportedOpError:
        """The error for an operator, or for a form of one, that this route lacks."""
        return UnsupportedOpError(f"{describe(self.node)} is not supported on the XLA route{why and f': {why}'}")


def jax_dtype(dtype: torch.dtype) -> Any:
    """The NumPy dtype of the same name, which for small floats comes from ml_dtypes."""
    return jnp.dtype(dtype_name(dtype))


def array(value: Any, dtype: torch.dtype) -> Array:
    """A number or an array, as an array of that dtype."""
    if isinstance(value, bool | int | float):
        # By way of NumPy, which wraps a number that does not fit, as torch does.
        value = np.asarray(value).astype(jax_dtype(dtype))
    return lax.convert_element_type(jnp.asarray(value), jax_dtype(dtype))


def literal(tensor: torch.Tensor) -> Array:
    """A tensor of the graph itself, bit for bit."""
    shape, dtype = tuple(tensor.shape), jax_dtype(tensor.dtype)
    flat = tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    return jnp.asarray(np.frombuffer(flat.numpy().tobytes(), dtype=dtype).reshape(shape))
