"""The calling convention of a compiled graph: what goes in, what comes out, what is written in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def dtype_name(dtype: torch.dtype) -> str:
    """torch's own name without the prefix: ``float32``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class TensorSpec:
    """One tensor at the boundary of a graph. Always contiguous, in row-major order.

    ``dtype`` is torch's own name without the prefix: ``float32``, ``bfloat16``, ``int64``, ``bool``.
    """

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """That of a tensor."""
        return cls(dtype_name(tensor.dtype), tuple(tensor.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself. Raises ``AttributeError`` where torch has none of that name."""
        import torch  # What only looks a cache over has no use for it.

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Abi:
    """Inputs and outputs in positional order.

    The first ``len(aliases)`` outputs are the mutated inputs: output ``k`` is the new value of input ``aliases[k]``.
    It is in that input's storage where the module says so (a KV cache is); else the runtime copies it there. The
    remaining outputs are the results, in fresh storage.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    aliases: tuple[int, ...] = ()

    @property
    def results(self) -> tuple[TensorSpec, ...]:
        """The outputs that are not mutated inputs."""
        return self.outputs[len(self.aliases) :]

    def to_json(self) -> dict[str, Any]:
        """Plain lists and strings, for ``metadata.json`` and for the key."""
        return {
            "inputs": [[spec.dtype, list(spec.shape)] for spec in self.inputs],
            "outputs": [[spec.dtype, list(spec.shape)] for spec in self.outputs],
            "aliases": list(self.aliases),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Abi:
        """The inverse of :meth:`to_json`. Raises ``KeyError``, ``TypeError`` or ``ValueError`` on anything else."""
        specs = {
            side: tuple(TensorSpec(str(dtype), tuple(int(n) for n in shape)) for dtype, shape in data[side])
            for side in ("inputs", "outputs")
        }
        aliases = tuple(int(index) for index in data["aliases"])
        if len(aliases) > len(specs["outputs"]) or any(not 0 <= i < len(specs["inputs"]) for i in aliases):
            raise ValueError(f"aliases {aliases} do not fit {len(specs['inputs'])} inputs")
        return cls(specs["inputs"], specs["outputs"], aliases)
