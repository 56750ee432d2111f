"""The calling convention of a compiled graph: what goes in, what comes out, what is written in place."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def dtype_name(dtype: torch.dtype) -> str:
    """torch's own name without the prefix: ``float32``."""
    return str(dtype).removeprefix("torch.")


@functools.lru_cache(maxsize=256)
def torch_dtype(name: str) -> torch.dtype:
    """The dtype of that name. Raises ``ValueError`` for a name that torch does not have."""
    import torch  # What only looks a cache over has no use for it.

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch")
    return dtype


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
        """The dtype itself. Raises ``ValueError`` for a name that torch does not have."""
        return torch_dtype(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class InputName(str):
    """What one input of a model's graph is: a step input, a KV cache of a layer, or a weight.

    The text is that of manifests: ``inputs.<name>``, ``kv.<layer>.k`` or ``.v``, ``weights.<name>``.
    """

    __slots__ = ()

    @classmethod
    def step(cls, name: str) -> InputName:
        """That of a step input."""
        return cls(f"inputs.{name}")

    @classmethod
    def kv(cls, layer: int, side: str) -> InputName:
        """That of a layer's K or V cache; ``side`` is ``k`` or ``v``."""
        return cls(f"kv.{layer}.{side}")

    @classmethod
    def weight(cls, name: str) -> InputName:
        """That of a parameter or buffer, by the model's own name."""
        return cls(f"weights.{name}")

    @property
    def is_step(self) -> bool:
        """Whether it changes from step to step; all others stay bound."""
        return self.startswith("inputs.")

    @property
    def is_kv(self) -> bool:
        """Whether the graph writes it in place."""
        return self.startswith("kv.")

    @property
    def bare(self) -> str:
        """The name without what says which kind it is."""
        return self.partition(".")[2]


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
