"""One form for one graph: whichever way it was captured, equal programs become equal canonical graphs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_aggregate, map_arg
from torch.utils._python_dispatch import _disable_current_modes

from vllm_neuron.abi import Abi, TensorSpec
from vllm_neuron.errors import CaptureError, UnsupportedOpError
from vllm_neuron.lowering.shared.numbers import misfit

_aten = torch.ops.aten

# Values pass through these unchanged, strides included: they only hide that two graphs are equal.
_IDENTITIES = frozenset(
    {
        _aten.alias.default,
        _aten.detach.default,
        _aten.lift_fresh.default,
        _aten.lift_fresh_copy.default,
        torch.ops.prims.device_put.default,
    }
)
# Claims about dtypes, which capture has settled, and about values, which a compiled graph does not check.
_CHECKS = frozenset({_aten._assert_tensor_metadata.default, _aten._assert_async.default, _aten._assert_async.msg})

# What may give scales of 8 bits: a view of bytes as such.
_BYTEWISE = frozenset({_aten.view.dtype, _aten.view.default, _aten.reshape.default, _aten.slice.Tensor})


@dataclass(frozen=True)
class CanonicalGraph:
    """A functional core-ATen graph in canonical form.

    The graph module's placeholders are in natural order of ``input_names``; its output is one flat tuple: the new
    values of the mutated inputs (in input order, as ``abi.aliases`` says), then the results.
    ``input_positions`` gives each input's place among the placeholders of the captured graph.
    The graph module may be shared: passes work on a copy.
    """

    graph_module: GraphModule
    input_names: tuple[str, ...]
    input_positions: tuple[int, ...]
    abi: Abi


def natural_key(name: str) -> tuple[list[str | int], str]:
    """Sort key that puts ``layers.10`` after ``layers.9``."""
    parts = re.split(r"([0-9]+)", name)
    return [int(part) if index % 2 else part for index, part in enumerate(parts)], name


def canonicalize(gm: GraphModule, names: Sequence[str]) -> CanonicalGraph:
    """Bring a captured graph into canonical form; ``gm`` itself is left as it is.

    ``gm`` is functional ATen of static shape whose in-place effects are ``aten.copy_`` nodes on placeholders
    (AOTAutograd with ``keep_inference_input_mutations=True``, or ``make_fx`` over a functionalised function), and
    whose outputs are all tensors. ``names`` gives each placeholder, in order, a unique name. Unused placeholders
    and dead code are dropped. Tensor literals (``get_attr``) stay, by value: whoever captures a
    model lifts its weights to placeholders first.

    Raises :class:`CaptureError` when the graph is not of that form, :class:`UnsupportedOpError` for an operator that
    has an effect besides its result.
    """
    source = _read(gm, names)
    live = source.live()
    kept = sorted(live & source.names.keys(), key=lambda node: natural_key(source.names[node]))
    index = {node: i for i, node in enumerate(kept)}
    mutated = sorted(source.mutated, key=index.__getitem__)
    outputs = [*(source.mutated[node] for node in mutated), *source.results]
    positions = {node: i for i, node in enumerate(source.names)}
    abi = Abi(
        inputs=tuple(tensor_spec(node) for node in kept),
        outputs=tuple(tensor_spec(node) for node in outputs),
        aliases=tuple(index[node] for node in mutated),
    )
    body = [node for node in gm.graph.nodes if node in live and node not in source.names]
    # Dynamo compiles while its own fake mode is active.
    with _disable_current_modes():
        rebuilt = _rebuild(gm, source, [*kept, *body], outputs)
    return CanonicalGraph(
        graph_module=rebuilt,
        input_names=tuple(source.names[node] for node in kept),
        input_positions=tuple(positions[node] for node in kept),
        abi=abi,
    )


def tensor_spec(node: Node) -> TensorSpec:
    """Shape and dtype of ``node`` as captured. Raises :class:`CaptureError` if it is not one tensor of static shape."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise CaptureError(f"{node.format_node()} is {type(value).__name__}, where one tensor is needed")
    if any(not isinstance(size, int) for size in value.shape):
        raise CaptureError(
            f"{node.name} has the dynamic shape {tuple(value.shape)}: capture one static shape at a time"
        )
    return TensorSpec.of(value)


@dataclass
class _Source:
    """The captured graph as read: identities and the copy epilogue are seen through."""

    names: dict[Node, str]
    mutated: dict[Node, Node] = field(default_factory=dict)
    results: list[Node] = field(default_factory=list)
    operands: dict[Node, tuple[Any, Any]] = field(default_factory=dict)

    def live(self) -> set[Node]:
        """Nodes that the results and the mutated inputs need. A mutated input is one of them: it is written."""
        live: set[Node] = set()
        pending = [*self.mutated, *self.mutated.values(), *self.results]
        while pending:
            node = pending.pop()
            if node not in live:
                live.add(node)
                map_arg(self.operands.get(node, ()), pending.append)
        return live


def _read(gm: GraphModule, names: Sequence[str]) -> _Source:
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    if len(names) != len(placeholders) or len(set(names)) != len(names):
        raise CaptureError(
            f"the graph has {len(placeholders)} placeholders, but got {len(names)} names, {len(set(names))} of them "
            "different: give every placeholder one unique name"
        )
    source = _Source(dict(zip(placeholders, names, strict=True)))
    value_of: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), value_of.__getitem__)
        value_of[node] = node
        if node.op == "output":
            source.results = _flat_results(args[0])
        elif node.target is _aten.copy_.default and node.args[0] in source.names:
            value_of[node] = value_of[node.args[0]] = _new_value(node.args[0], args[1])
            source.mutated[node.args[0]] = args[1]
        elif node.target in _IDENTITIES:
            value_of[node] = args[0]
        elif node.op not in ("placeholder", "get_attr"):
            _check_operator(node)
            source.operands[node] = (args, _portable(kwargs))
    source.mutated = {node: value for node, value in source.mutated.items() if node is not value}
    return source


def _new_value(placeholder: Node, value: Node) -> Node:
    if not isinstance(value, Node) or tensor_spec(value) != tensor_spec(placeholder):
        raise CaptureError(
            f"input {placeholder.name} ({tensor_spec(placeholder)}) is overwritten by {value} of another shape or dtype"
        )
    return value


def _flat_results(results: Any) -> list[Node]:
    flat = list(results) if isinstance(results, Iterable) else [results]
    for result in flat:
        if not isinstance(result, Node):
            raise CaptureError(f"output {result!r} is not a tensor: keep constants out of the captured graph's outputs")
    return flat


def _check_operator(node: Node) -> None:
    if node.op != "call_function":
        raise CaptureError(f"{node.format_node()} is not an operator call: capture down to ATen first")
    if any(_is_dynamic(value) for value in _leaves(node.meta.get("val"))):
        raise UnsupportedOpError(
            f"{node.target}: what it returns, or its shape, depends on the values in a tensor, and a compiled graph "
            "has static shapes: leave it out of the compiled function"
        )
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.dtype == torch.float8_e8m0fnu and node.target not in _BYTEWISE:
        raise UnsupportedOpError(f"{node.target} gives float8_e8m0fnu, to which compilers round otherwise than torch")
    if said := misfit(node):
        raise UnsupportedOpError(f"{node.target}: {said}")
    if not isinstance(node.target, OpOverload) or node.target in _CHECKS:
        return
    schema = node.target._schema
    if schema.is_mutable:
        raise CaptureError(
            f"{node.target} writes in place ({node.name}): the graph has to be functional, with writes to inputs as "
            "aten.copy_ on the placeholder"
        )
    if not schema.returns:
        raise UnsupportedOpError(
            f"{node.target} has an effect but no result, which a compiled graph can't carry out: remove it"
        )


def _leaves(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, list | tuple) else [value]


def _is_dynamic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(not isinstance(size, int) for size in value.shape)
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def _portable(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments without the placement that differs between fake, meta and real captures."""
    kept = {name: value for name, value in kwargs.items() if name not in ("pin_memory", "layout")}
    return {**kept, "device": torch.device("cpu")} if "device" in kept else kept


def _rebuild(gm: GraphModule, source: _Source, nodes: list[Node], outputs: list[Node]) -> GraphModule:
    graph, fakes = Graph(), _Fakes()
    literals: dict[str, Any] = {}
    copies: dict[Node, Node] = {}
    for node in nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            copy = graph.placeholder(f"arg{len(copies)}")
        elif node.op == "get_attr":
            name = f"literal{len(literals)}"
            value = literals[name] = _literal(gm, node)
            copy = graph.create_node("get_attr", name, name=name)
        else:
            args, kwargs = map_arg(source.operands[node], copies.__getitem__)
            copy = graph.create_node("call_function", node.target, args, kwargs, name=f"v{len(copies)}")
        copy.meta["val"] = map_aggregate(value, fakes.like)
        copies[node] = copy
    graph.output(tuple(copies[node] for node in outputs))
    # Its Python code is generated only if someone runs the graph.
    return _LazyGraphModule(literals, graph)


def _literal(gm: GraphModule, node: Node) -> torch.Tensor:
    value: Any = gm
    for part in str(node.target).split("."):
        value = getattr(value, part)
    if isinstance(value, torch.nn.Module):
        raise UnsupportedOpError(f"{node.target} is a sub-graph: control flow inside a compiled graph is not supported")
    if type(value) is not torch.Tensor or value.device.type != "cpu":
        kind = f"{type(value).__name__} on {getattr(value, 'device', None)}"
        raise CaptureError(f"{node.target} ({kind}) would be baked into the graph: lift it to an input")
    return value.detach()


class _Fakes:
    """CPU fake tensors, one for each layout: it takes longer to make one than to capture an operator."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._made: dict[Any, torch.Tensor] = {}

    def like(self, value: Any) -> Any:
        """A fake tensor of the same shape, strides, offset and dtype; what is no tensor as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        layout = (tuple(value.shape), value.stride(), int(value.storage_offset()), value.dtype)
        if layout not in self._made:
            with self._mode:
                self._made[layout] = self._make(*layout)
        return self._made[layout]

    @staticmethod
    def _make(shape: tuple[int, ...], strides: tuple[int, ...], offset: int, dtype: torch.dtype) -> torch.Tensor:
        fake = torch.empty_strided(shape, strides, dtype=dtype)
        if not offset:
            return fake
        span = offset + fake.untyped_storage().nbytes() // fake.element_size()
        return torch.empty(span, dtype=dtype).as_strided(shape, strides, offset)
