"""Capture: one forward pass over fake tensors becomes one functional ATen graph with named inputs.

Nothing is executed and no weight is read: inputs are fake tensors, so capture needs a shape and a dtype only.
The graph has the form that AOTAutograd gives with ``keep_inference_input_mutations``: functional operators, and a
trailing ``aten.copy_`` for each input that the pass writes to. Dynamo's route through :mod:`.backends` ends in the
same canonical graph, byte for byte, at several times the cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from vllm_neuron.abi import TensorSpec
from vllm_neuron.compile.patches import tracing_what_is_compiled
from vllm_neuron.errors import CaptureError
from vllm_neuron.lowering.canonical import CanonicalGraph, canonicalize
from vllm_neuron.lowering.decompositions.table import decomposition_table
from vllm_neuron.lowering.shared.boundary import with_carriers

Forward = Callable[[dict[str, torch.Tensor]], torch.Tensor]

_LIBRARIES = ("aten", "prims")


def fake_inputs(mode: FakeTensorMode, specs: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
    """Fresh, contiguous fake CPU tensors for ``specs``, by name."""
    with mode:
        return {name: torch.empty(spec.shape, dtype=spec.torch_dtype) for name, spec in specs.items()}


def capture(
    forward: Forward, specs: Mapping[str, TensorSpec], mutated: Iterable[str], mode: FakeTensorMode
) -> CanonicalGraph:
    """Trace ``forward`` once over fake tensors and return its canonical graph.

    ``forward`` takes the inputs by name and returns one tensor. ``mutated`` names exactly the inputs that it writes.
    Raises :class:`CaptureError` if it writes others, or fewer, if the value of a tensor that is no literal would be
    baked into the graph, if control flow depends on a tensor's value, or if an operator outside ATen is left.
    """
    names = list(specs)
    written: list[str] = []
    inputs = fake_inputs(mode, specs)
    trace = make_fx(
        _functional(forward, names, written), tracing_mode="real", decomposition_table=decomposition_table()
    )
    try:
        with torch.no_grad(), mode, tracing_what_is_compiled():
            graph_module = trace(*inputs.values())
    except (
        torch._subclasses.fake_tensor.DataDependentOutputException,
        torch._subclasses.fake_tensor.DynamicOutputShapeException,
    ) as error:
        raise CaptureError(
            f"the model's control flow or a shape depends on the value of a tensor, at {error}; "
            "a graph with static shapes can't be captured from it"
        ) from error
    _check(graph_module, written, frozenset(mutated))
    return canonicalize(with_carriers(graph_module), names)


def _functional(forward: Forward, names: list[str], written: list[str]) -> Callable[..., tuple[torch.Tensor]]:
    """``forward`` on positional tensors, free of mutation, with a ``copy_`` to each input that it wrote.

    Notes in ``written`` the names of those inputs. Functionalization finds them: a fixed list would silently drop a
    write to any other input.
    """

    # torch exports these without types.
    sync: Callable[[Any], None] = vars(torch)["_sync"]
    is_written: Callable[[Any], bool] = vars(torch)["_functionalize_has_data_mutation"]

    def run(*flat: torch.Tensor) -> tuple[torch.Tensor]:
        no_functionalize = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
        updates: list[tuple[int, torch.Tensor]] = []
        with torch._C._ExcludeDispatchKeyGuard(no_functionalize), FunctionalTensorMode():
            wrapped: list[Any] = [FunctionalTensor.to_functional(tensor) for tensor in flat]
            output: Any = forward(dict(zip(names, wrapped, strict=True)))
            sync(output)
            result = torch._from_functional_tensor(output.elem)
            for index, tensor in enumerate(wrapped):
                sync(tensor)
                if torch._functionalize_has_metadata_mutation(tensor.elem):
                    raise CaptureError(f"the model changes the shape or strides of its input '{names[index]}' in place")
                if is_written(tensor.elem):
                    updates.append((index, torch._from_functional_tensor(tensor.elem)))
        written[:] = [names[index] for index, _ in updates]
        for index, update in updates:
            torch.ops.aten.copy_.default(flat[index], update)
        return (result,)

    return run


def _is_written_in_code(graph_module: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    """Whether a tensor is a literal of ``forward``, as ``torch.tensor(2.0)``, or one number that its module keeps.

    Torch lifts literals, and no tensor that was there before. A model is first captured without values: what could be
    a weight is a fake tensor then.
    """
    value = getattr(graph_module, str(node.target), None)
    if type(value) is not torch.Tensor:
        return False
    return value.dim() == 0 or all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)


def _check(graph_module: torch.fx.GraphModule, written: list[str], declared: frozenset[str]) -> None:
    unexpected = sorted(set(written) - declared)
    if unexpected:
        raise CaptureError(f"the model writes to inputs other than its KV cache: {', '.join(unexpected)}")
    missing = sorted(declared - set(written))
    if missing:
        raise CaptureError(f"the model does not write to {len(missing)} of its KV caches, the first is {missing[0]}")
    for node in graph_module.graph.nodes:
        if node.op == "get_attr" and not _is_written_in_code(graph_module, node):
            raise CaptureError(
                f"the value of a tensor ('{node.target}') would be baked into the graph; it has to be a parameter or a "
                "buffer of the model, so that it can be bound when the artifact is loaded"
            )
        namespace = getattr(node.target, "namespace", None)
        if node.op == "call_function" and namespace is not None and namespace not in _LIBRARIES:
            raise CaptureError(f"the model calls the operator {node.target}, which is not an ATen operator")
