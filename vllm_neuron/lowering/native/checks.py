"""What the native route refuses before it lowers anything, because a compiler would get it wrong or fail obscurely."""

from __future__ import annotations

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from vllm_neuron.errors import UnsupportedOpError
from vllm_neuron.lowering.canonical import tensor_spec
from vllm_neuron.lowering.shared.passes import describe

_aten = torch.ops.aten

_NOT_IN_64_BITS = (
    _aten.sin.default, _aten.cos.default, _aten.tan.default, _aten.tanh.default, _aten.asin.default,
    _aten.acos.default, _aten.atan.default, _aten.atan2.default,
)  # fmt: skip


def refuse_unsupported(gm: GraphModule) -> None:
    """Raises :class:`UnsupportedOpError` for complex and random numbers, and for functions of 64-bit floats."""
    for node in gm.graph.nodes:
        _refuse_complex(node)
        if node.op == "call_function":
            _refuse_random(node)
            _refuse_double(node)


def _refuse_complex(node: Node) -> None:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.dtype.is_complex:
        name = describe(node) if node.op == "call_function" else "an input"
        raise UnsupportedOpError(
            f"{name} is {tensor_spec(node)}: complex numbers are not supported; use real and imaginary parts"
        )


def _refuse_random(node: Node) -> None:
    if isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
        raise UnsupportedOpError(
            f"{describe(node)}: random numbers in a compiled graph would not follow torch's seed. Draw them outside "
            "and pass them in; for dropout, call model.eval()"
        )


def _refuse_double(node: Node) -> None:
    value = node.meta.get("val")
    if node.target in _NOT_IN_64_BITS and isinstance(value, torch.Tensor) and value.dtype == torch.float64:
        raise UnsupportedOpError(f"{describe(node)}: IREE has no such function of 64-bit floats. Use 32 bits")
