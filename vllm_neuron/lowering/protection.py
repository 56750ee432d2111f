"""Make in-place execution sound.

IREE 3.13 takes two liberties with the buffers at a program's boundary. An operation that it runs in place (a scatter,
a sort) writes into an input that the program only reads. And ``tf.aliasing_output`` makes whatever produces that output
write straight into the input's buffer, without regard to who still reads the old value. Its bookkeeping is right
between intermediate values, and for an aliased input whose new value is made by an in-place operation on that very
input. So the program is put into a form that needs nothing else:

* The new value of an aliased input comes from a chain of scatters that starts at the input. If the program computes it
  in another way, the finished value is written over the input by one scatter at the end.
* Any other in-place operation on an input works on a copy; none has an operand that shares storage with what it writes.
* No result shares storage with an input, with an aliased output or with another result.

A copy is an operation that changes nothing, but that only the last stage of the compiler finds out about: it stays an
operation with an output of its own, and it is exact for every dtype. (``stablehlo.optimization_barrier`` would not do:
IREE takes the value behind it for other memory than the one before it, and loses track of who may write when.)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from vllm_neuron.lowering.stablehlo import build, element_of, recomputed, shape_of, splat, tensor_type

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


def protect(module: Any, aliases: Sequence[int]) -> None:
    """Rewrite ``main`` of ``module``; output ``k`` is the new value of input ``aliases[k]``.

    Marks those inputs with ``tf.aliasing_output``. No simplification may follow: it could undo the protection.
    """
    from torch_mlir import ir

    with module.context, ir.Location.unknown():
        function = module.body.operations[0].operation
        _Protection(function.regions[0].blocks[0], aliases).run()
        _mark_aliases(function, aliases)


def _mark_aliases(function: Any, aliases: Sequence[int]) -> None:
    from torch_mlir import ir

    attributes = [ir.DictAttr.get({}) for _ in function.regions[0].blocks[0].arguments]
    for output, argument in enumerate(aliases):
        index = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), output)
        attributes[argument] = ir.DictAttr.get({"tf.aliasing_output": index})
    function.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)


class _Protection:
    def __init__(self, block: Any, aliases: Sequence[int]) -> None:
        self.block = block
        self.arguments = list(block.arguments)
        self.aliases = aliases
        self.output = list(block.operations)[-1].operation
        # Keyed by an operation's first result: the hash of an operation changes with its operands.
        self.owned: dict[Any, Any] = {}  # in-place operation -> the aliased argument that it may write to
        self.roots: dict[Any, frozenset[Any]] = {argument: frozenset([argument]) for argument in self.arguments}
        self.place: dict[Any, int] = {}
        self.copies = 0

    def run(self) -> None:
        for output, argument in enumerate(self.aliases):
            self._own(output, self.arguments[argument])
        operations = [op.operation for op in self.block.operations]
        self.place = {operation.results[0]: place for place, operation in enumerate(operations[:-1])}
        for operation in operations[:-1]:
            self._visit(operation)
        self._separate_results()

    def _own(self, output: int, argument: Any) -> None:
        """Let the input be written by the scatters that make its new value, or else by one at the end."""
        value, chain = self.output.operands[output], []
        while value.owner != self.block and value != argument:
            operation = value.owner
            if operation.name == "stablehlo.scatter" and len(operation.results) == 1:
                chain.append(operation)
            elif operation.name != "stablehlo.reshape":
                break
            value = operation.operands[0]
        if value != argument:
            chain = [self._overwrite(output, argument)] if prod(shape_of(argument)) else []
        self.owned.update((operation.results[0], argument) for operation in chain)

    def _overwrite(self, output: int, argument: Any) -> Any:
        from torch_mlir import ir

        shape, element = shape_of(argument), element_of(argument)
        flat = tensor_type([1, prod(shape)], element)
        with ir.InsertionPoint(self.output):
            row = splat([1, 1], "i32", 0)
            old = build("stablehlo.reshape", [flat], [argument]).result
            new = build("stablehlo.reshape", [flat], [self.output.operands[output]]).result
            scatter = build("stablehlo.scatter", [flat], [old, row, new], _one_row(), regions=1)
            scalar = tensor_type([], element)
            with ir.InsertionPoint(scatter.regions[0].blocks.append(scalar, scalar)) as point:
                build("stablehlo.return", [], [point.block.arguments[1]])
            self.output.operands[output] = build("stablehlo.reshape", [argument.type], [scatter.result]).result
        return scatter

    def _visit(self, operation: Any) -> None:
        if operation.name in _IN_PLACE:
            self._separate_operands(operation)
        if operation.results[0] in self.owned:
            self._settle_readers(operation)
        for index, result in enumerate(operation.results):
            sources = (self.roots[value] for value in _same_memory(operation, index))
            self.roots[result] = frozenset([result]).union(*sources)

    def _separate_operands(self, operation: Any) -> None:
        inputs = frozenset(self.arguments) - {self.owned.get(operation.results[0])}
        written = _written(operation)
        shared: frozenset[Any] = frozenset()
        for index in [*written, *(i for i in range(len(operation.operands)) if i not in written)]:
            roots = self.roots[operation.operands[index]]
            if roots & shared or (index in written and roots & inputs):
                operation.operands[index] = self._copy(operation.operands[index], operation)
            elif index in written:
                shared |= roots

    def _settle_readers(self, operation: Any) -> None:
        """Let later readers of what ``operation`` overwrites read a copy made before.

        Otherwise IREE works on a copy and copies back, which the runtime forbids on small imported buffers.
        """
        argument = self.owned[operation.results[0]]
        for value in [value for value, roots in self.roots.items() if argument in roots]:
            uses = [(use.owner.operation, use.operand_number) for use in value.uses]
            late = [(reader, index) for reader, index in uses if self._is_after(reader, operation)]
            if late:
                copy = self._copy(value, operation)
                for reader, index in late:
                    reader.operands[index] = copy

    def _is_after(self, reader: Any, operation: Any) -> bool:
        # Copies have no place: each stands before what it was made for.
        return reader == self.output or self.place.get(reader.results[0], -1) > self.place[operation.results[0]]

    def _separate_results(self) -> None:
        count = len(self.aliases)
        taken = frozenset(self.arguments).union(*(self.roots[value] for value in list(self.output.operands)[:count]))
        for index in range(count, len(self.output.operands)):
            value = self.output.operands[index]
            if self.roots[value] & taken:
                value = self.output.operands[index] = self._copy(value, self.output)
            taken |= self.roots[value]

    def _copy(self, value: Any, before: Any) -> Any:
        """The same value in storage of its own. Copies differ in a number, so that none becomes another."""
        from torch_mlir import ir

        self.copies += 1
        with ir.InsertionPoint(before):
            result = recomputed(value, self.copies)
        self.roots[result] = frozenset([result])
        return result


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
        return operands[1:]
    if name in _BINARY and any(map(_is_known, operands)):
        return operands
    if name in _IDEMPOTENT and operands[0] == operands[1]:
        return operands
    return []


def _is_known(value: Any) -> bool:
    """Whether ``value`` is a constant, or one repeated."""
    operation = value.owner
    while getattr(operation, "name", "") in ("stablehlo.broadcast_in_dim", "stablehlo.reshape"):
        operation = operation.operands[0].owner
    return getattr(operation, "name", "") == "stablehlo.constant"


def _one_row() -> dict[str, Any]:
    """Attributes of a scatter of ``[1, n]`` into rows of ``[1, n]``."""
    from torch_mlir import ir

    dimensions = (
        "#stablehlo.scatter<update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], "
        "index_vector_dim = 1>"
    )
    flag = ir.BoolAttr.get(True)
    return {
        "scatter_dimension_numbers": ir.Attribute.parse(dimensions),
        "indices_are_sorted": flag,
        "unique_indices": flag,
    }
