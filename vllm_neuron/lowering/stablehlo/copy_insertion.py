"""Make in-place execution sound.

IREE 3.13 takes three liberties with buffers. An operation that it runs in place (a scatter, a sort) writes into an
input that the program only reads. ``tf.aliasing_output`` makes whatever produces that output write straight into the
input's buffer, without regard to who still reads the old value. And what reads a value may be scheduled after an
operation that overwrites it in place, unless that operation needs its result. So the program is put into a form that
needs none of this to be right:

* An input is aliased where its new value is a chain of scatters that starts at the input, and nothing else reads what
  they overwrite: the way a KV cache is written. The other inputs with new values get them from the caller, which finds
  that the output is not in the input's memory and copies it there.
* Any other in-place operation works on a tensor of which it is the only reader, a copy if need be.
* No output shares storage with an input or with another output.

A copy is an operation that changes nothing, but that only the last stage of the compiler finds out about: it stays an
operation with an output of its own, and it is exact for every dtype. (``stablehlo.optimization_barrier`` would not do:
IREE takes the value behind it for other memory than the one before it, and loses track of who may write when.)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from vllm_neuron.lowering.stablehlo.builders import element_of, shape_of
from vllm_neuron.lowering.stablehlo.rewrites import recomputed

# Operations whose result can be the same memory as their first operand.
_VIEWS = frozenset(
    {
        "stablehlo.bitcast_convert",
        "stablehlo.broadcast_in_dim",
        "stablehlo.dynamic_slice",
        "stablehlo.pad",
        "stablehlo.reshape",
        "stablehlo.reverse",
        "stablehlo.slice",
        "stablehlo.transpose",
    }
)
# Arithmetic that a compiler can find to change nothing: alone or in pairs, with a constant, with equal operands.
_UNARY = frozenset({"stablehlo.convert", "stablehlo.negate", "stablehlo.not", "stablehlo.reduce_precision"})
_BINARY = frozenset(
    {
        "stablehlo.add",
        "stablehlo.and",
        "stablehlo.divide",
        "stablehlo.maximum",
        "stablehlo.minimum",
        "stablehlo.multiply",
        "stablehlo.or",
        "stablehlo.power",
        "stablehlo.remainder",
        "stablehlo.shift_left",
        "stablehlo.shift_right_arithmetic",
        "stablehlo.shift_right_logical",
        "stablehlo.subtract",
        "stablehlo.xor",
    }
)
_IDEMPOTENT = frozenset({"stablehlo.and", "stablehlo.maximum", "stablehlo.minimum", "stablehlo.or"})
_IN_PLACE = frozenset({"stablehlo.dynamic_update_slice", "stablehlo.scatter", "stablehlo.sort", "stablehlo.while"})


def insert_copies(module: Any, aliases: Sequence[int]) -> None:
    """Rewrite ``main`` of ``module``; output ``k`` is the new value of input ``aliases[k]``.

    Marks with ``tf.aliasing_output`` the inputs that are written in place. No simplification may follow: it
    could undo it.
    """
    from torch_mlir import ir

    with module.context, ir.Location.unknown():
        function = module.body.operations[0].operation
        insertion = _CopyInsertion(function.regions[0].blocks[0], aliases)
        insertion.run()
        _mark_aliases(function, insertion.in_place)


def _mark_aliases(function: Any, in_place: dict[int, int]) -> None:
    """``in_place`` maps outputs to the inputs whose memory they are in."""
    from torch_mlir import ir

    attributes = [ir.DictAttr.get({}) for _ in function.regions[0].blocks[0].arguments]
    for output, argument in in_place.items():
        index = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), output)
        attributes[argument] = ir.DictAttr.get({"tf.aliasing_output": index})
    function.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)


class _CopyInsertion:
    def __init__(self, block: Any, aliases: Sequence[int]) -> None:
        self.block = block
        self.aliases = aliases
        self.output = list(block.operations)[-1].operation
        self.in_place: dict[int, int] = {}
        # First results of the scatters that may write to an input. (An operation's hash changes with its operands.)
        self.chained: set[Any] = set()
        self.copies = 0

    def run(self) -> None:
        self._fill_gaps()
        self._widen_factors()
        for output, argument in enumerate(self.aliases):
            chain = self._chain(self.output.operands[output], self.block.arguments[argument])
            if chain is not None and all(self._is_only_reader(scatter, 0) for scatter in chain):
                self.in_place[output] = argument
                self.chained.update(scatter.results[0] for scatter in chain)
        self._separate_operands()
        self._separate_outputs()

    def _fill_gaps(self) -> None:
        """IREE 3.13 can't compile a read by index from memory with gaps: a slice of columns becomes a tensor first."""
        for op in list(self.block.operations):
            operation = op.operation
            if operation.name in ("stablehlo.gather", "stablehlo.reverse"):
                pending = [operation.operands[0]]
                while pending:
                    value = pending.pop()
                    if _has_gaps(value):
                        operation.operands[0] = self._copy(operation.operands[0], operation)
                        break
                    if value.owner != self.block and value.owner.name not in _IN_PLACE:
                        pending += _same_memory(value.owner, list(value.owner.results).index(value))

    def _widen_factors(self) -> None:
        """IREE 3.13 multiplies what a factor was before a conversion, and takes the highest bit for a sign: truth
        values become 0 and -1 in a product, and bytes above 127 negative. So an unsigned factor is converted before."""
        for op in list(self.block.operations):
            operation = op.operation
            if operation.name in ("stablehlo.dot_general", "stablehlo.convolution"):
                for index, factor in enumerate(operation.operands):
                    if _is_unsigned(factor):
                        operation.operands[index] = self._copy(factor, operation)

    def _chain(self, value: Any, argument: Any) -> list[Any] | None:
        """The scatters, last first, that make ``value`` from ``argument``; None if something else does."""
        chain = []
        while value != argument:
            operation = value.owner
            if value.owner == self.block or operation.name not in ("stablehlo.scatter", "stablehlo.reshape"):
                return None
            if operation.name == "stablehlo.scatter":
                chain.append(operation)
            value = operation.operands[0]
        return chain

    def _is_only_reader(self, operation: Any, index: int) -> bool:
        """Whether nothing but operand ``index`` of ``operation`` reads the memory of that operand."""
        seen: set[Any] = set()
        pending = [operation.operands[index]]
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            if value.owner != self.block and value.owner.name not in _IN_PLACE:
                pending += _same_memory(value.owner, list(value.owner.results).index(value))
            for use in value.uses:
                reader = use.owner.operation
                if reader == operation and use.operand_number == index:
                    continue
                views = [] if reader.name in _IN_PLACE else _views(reader, value)
                if not views:
                    return False
                pending += views
        return True

    def _separate_operands(self) -> None:
        roots = self._roots()
        inputs = frozenset(self.block.arguments)
        for op in list(self.block.operations)[:-1]:
            operation = op.operation
            if operation.name not in _IN_PLACE or operation.results[0] in self.chained:
                continue
            for index in _written(operation):
                if roots[operation.operands[index]] & inputs or not self._is_only_reader(operation, index):
                    operation.operands[index] = self._copy(operation.operands[index], operation)

    def _separate_outputs(self) -> None:
        roots = self._roots()
        values = list(self.output.operands)
        taken = frozenset(self.block.arguments).union(*(roots[values[output]] for output in self.in_place))
        for index, value in enumerate(values):
            if index in self.in_place:
                continue
            if roots[value] & taken:
                self.output.operands[index] = self._copy(value, self.output)
            taken |= roots[value]

    def _roots(self) -> dict[Any, frozenset[Any]]:
        """For each value, the values in whose memory it may be: itself, and what it may be a view or an update of."""
        roots = {argument: frozenset([argument]) for argument in self.block.arguments}
        for op in list(self.block.operations)[:-1]:
            for index, result in enumerate(op.operation.results):
                sources = (roots[value] for value in _same_memory(op.operation, index))
                roots[result] = frozenset([result]).union(*sources)
        return roots

    def _copy(self, value: Any, before: Any) -> Any:
        """The same value in storage of its own. Copies differ in a number, so that none becomes another."""
        from torch_mlir import ir

        self.copies += 1
        with ir.InsertionPoint(before):
            return recomputed(value, self.copies)


def _is_unsigned(value: Any) -> bool:
    """Whether ``value`` is an unsigned number or a truth value, perhaps converted or seen through views."""
    while element_of(value) != "i1" and not element_of(value).startswith("ui"):
        operation = value.owner
        if getattr(operation, "name", "") not in _VIEWS | {"stablehlo.convert"}:
            return False
        value = operation.operands[0]
    return True


def _has_gaps(value: Any) -> bool:
    if getattr(value.owner, "name", "") != "stablehlo.slice":
        return False
    taken, whole = shape_of(value), shape_of(value.owner.operands[0])
    partial = [index for index, size in enumerate(taken) if size != whole[index]]
    return bool(partial) and prod(taken[: partial[-1]]) > 1


def _views(operation: Any, value: Any) -> list[Any]:
    """The results of ``operation`` that may be in the memory of ``value``."""
    return [result for index, result in enumerate(operation.results) if value in _same_memory(operation, index)]


def _written(operation: Any) -> list[int]:
    """Positions of the operands that the results of an in-place operation take over, result by result."""
    if operation.name == "stablehlo.dynamic_update_slice":
        return [0]
    return list(range(len(operation.results)))


def _same_memory(operation: Any, index: int) -> list[Any]:
    """The operands whose memory result ``index`` of ``operation`` may be; too many rather than too few."""
    name, operands = operation.name, list(operation.operands)
    if name in _IN_PLACE:
        return [operands[_written(operation)[index]]]
    if name == "stablehlo.optimization_barrier":
        return [operands[index]]
    if name in _VIEWS or name in _UNARY:
        return operands[:1]
    if name == "stablehlo.reduce":
        operand = operands[index]
        return [operand] if prod(shape_of(operand)) == prod(shape_of(operation.results[index])) else []
    if name == "stablehlo.concatenate":
        filled = [operand for operand in operands if prod(shape_of(operand))]
        return filled if len(filled) == 1 else []
    if name in ("stablehlo.select", "stablehlo.clamp"):
        return [operand for operand in operands[1:] if not _is_known(operand)]
    if name in _BINARY and any(map(_is_known, operands)):
        return [operand for operand in operands if not _is_known(operand)]
    return operands if name in _IDEMPOTENT and operands[0] == operands[1] else []


def _is_known(value: Any) -> bool:
    """Whether ``value`` is a constant, or one repeated."""
    operation = value.owner
    while getattr(operation, "name", "") in ("stablehlo.broadcast_in_dim", "stablehlo.reshape"):
        operation = operation.operands[0].owner
    return getattr(operation, "name", "") == "stablehlo.constant"
