"""Rewrites of a StableHLO module that make it canonical, and that keep to what the device compilers handle well."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from vllm_neuron.lowering.stablehlo import denormals
from vllm_neuron.lowering.stablehlo.arctangent import signed_angle
from vllm_neuron.lowering.stablehlo.builders import (
    build,
    compare,
    constant,
    convert,
    element_of,
    replace,
    shape_of,
    splat,
    tensor_type,
)
from vllm_neuron.lowering.stablehlo.compilable import reverse_as_signed, split_contraction
from vllm_neuron.lowering.stablehlo.range_reduction import reduce_angle

_DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "f8E4M3FN": torch.float8_e4m3fn,
    "f8E4M3FNUZ": torch.float8_e4m3fnuz,
    "f8E5M2": torch.float8_e5m2,
    "f8E5M2FNUZ": torch.float8_e5m2fnuz,
    "f8E8M0FNU": torch.float8_e8m0fnu,
}


def rewrite(module: Any) -> None:
    """Apply every rewrite of this file to a ``torch_mlir.ir.Module``, in place.

    Constants become ``stablehlo.constant``; conversions and reshapes of splats are folded. Indices of gathers and
    scatters, and positions carried through a sort, become 32 bits wide. Sorts become stable and put NaN last, as torch
    does. Products of 16-bit floats accumulate in 32 bits. Angles are small.
    """
    from torch_mlir import ir

    with module.context, ir.Location.unknown():
        for operation in list(walk(module)):
            rule = _RULES.get(operation.name)
            if rule is not None:
                with ir.InsertionPoint(operation):
                    rule(operation)


def walk(module: Any) -> Iterator[Any]:
    """The operations of every function's body, in order. Those in nested regions are left out."""
    for function in module.body.operations:
        for block in function.operation.regions[0].blocks:
            for op in block.operations:
                yield op.operation


def recomputed(value: Any, number: int) -> Any:
    """``value`` bit for bit, by arithmetic that is folded only inside the operation that it becomes.

    For bits ``x | (x & n)``; for truth values whether ``exp(x)``, 1 or e, is more than a number between them.
    """
    shape, element = shape_of(value), element_of(value)
    distinct = 1 + number % 126
    if element == "i1":
        exponential = build("stablehlo.exponential", [tensor_type(shape, "f32")], [convert(value, "f32")]).result
        return compare(exponential, splat(shape, "f32", 1.5 + distinct / 128), "GT")
    integer = element if "i" in element else f"i{_DTYPES[element].itemsize * 8}"
    type_ = tensor_type(shape, integer)
    bits = value if integer == element else build("stablehlo.bitcast_convert", [type_], [value]).result
    part = build("stablehlo.and", [type_], [bits, splat(shape, integer, distinct)]).result
    bits = build("stablehlo.or", [type_], [bits, part]).result
    return bits if integer == element else build("stablehlo.bitcast_convert", [value.type], [bits]).result


def _attributes(operation: Any) -> dict[str, Any]:
    return {name: operation.attributes[name] for name in operation.attributes}


def _constant(operation: Any) -> None:
    from torch_mlir import ir

    if isinstance(operation.result.type, ir.RankedTensorType):
        replace(operation, constant(operation.attributes["value"]))


def _fold(operation: Any) -> bool:
    """Convert or reshape a splat now: torch's double-precision scalars leave no trace in a model of another dtype.

    False where there is none.
    """
    from torch_mlir import ir

    source, element = operation.operands[0], element_of(operation.result)
    old, new = _DTYPES.get(element_of(source)), _DTYPES.get(element)
    if old is None or new is None or getattr(source.owner, "name", "") != "stablehlo.constant":
        return False
    value = source.owner.attributes["value"]
    if not isinstance(value, ir.DenseElementsAttr) or not value.is_splat:
        return False
    scalar = torch.tensor(value.get_splat_value().value, dtype=old).to(new).item()
    replace(operation, splat(shape_of(operation.result), element, scalar))
    return True


def _convert(operation: Any) -> None:
    """Integers become 16-bit floats by way of 32 bits, as in torch: LLVM would call a function that IREE lacks.

    A bf16 is the upper half of the f32 that is nearest to it: bits are rounded to even, and cut off. As a conversion of
    its own it would be joined with the first.
    """
    if _fold(operation):
        return
    source, element = operation.operands[0], element_of(operation.result)
    if element == "bf16" and element_of(source).startswith(("i", "ui")):
        shape = shape_of(source)
        bits = build("stablehlo.bitcast_convert", [tensor_type(shape, "i32")], [convert(source, "f32")]).result

        def op(name: str, left: Any, right: Any) -> Any:
            return build(f"stablehlo.{name}", [bits.type], [left, right]).result

        half = splat(shape, "i32", 16)
        odd = op("and", op("shift_right_logical", bits, half), splat(shape, "i32", 1))
        rounded = op("add", op("add", bits, splat(shape, "i32", 0x7FFF)), odd)
        upper = convert(op("shift_right_logical", rounded, half), "i16")
        replace(operation, build("stablehlo.bitcast_convert", [operation.result.type], [upper]).result)
    elif element == "f16" and element_of(source).startswith(("i", "ui")):
        replace(operation, convert(convert(source, "f32"), element))
    elif element == "i1" and "f" in element_of(source):
        denormals.keep_operand(operation)
    elif element == "f8E4M3FN":
        _saturate(operation)


def _saturate(operation: Any) -> None:
    """A number beyond the range of this type is the nearest that there is, as in torch, and reaches it by 32 bits."""
    source, shape = operation.operands[0], shape_of(operation.result)
    number = source if element_of(source) == "f32" else convert(source, "f32")
    for limit, beyond in ((448.0, "GT"), (-448.0, "LT")):
        bound = splat(shape, "f32", limit)
        number = build("stablehlo.select", [number.type], [compare(number, bound, beyond), bound, number]).result
    replace(operation, convert(number, "f8E4M3FN"))


def _compare(operation: Any) -> None:
    zeros = [index for index, operand in enumerate(operation.operands) if _repeated(operand) == 0]
    if len(zeros) == 1 and "f" in element_of(operation.operands[0]):
        denormals.keep_sides_of_zero(operation, zeros[0])


def _narrow_indices(operation: Any) -> None:
    # IREE 3.13 can't compile 64-bit scatter indices that were reshaped, and no dimension needs more than 32 bits.
    if element_of(operation.operands[1]) == "i64":
        operation.operands[1] = convert(operation.operands[1], "i32")


def _sort(operation: Any) -> None:
    """A stable sort by the first operand, NaN last, with 64-bit positions carried through it in 32 bits.

    torch-mlir's comparator is one comparison of the keys, false for NaN on either side. IREE does not sort stably, so
    equal keys are compared by their positions; and its top-k, into which it turns a sort and a slice, takes 32-bit
    positions only.
    """
    from torch_mlir import ir

    keys, *payload = operation.operands
    comparisons = [op for op in operation.regions[0].blocks[0].operations if op.operation.name == "stablehlo.compare"]
    descending = "G" in str(comparisons[0].operation.attributes["comparison_direction"])
    operands = [keys, *(convert(value, "i32") if element_of(value) == "i64" else value for value in payload)]
    attributes = _attributes(operation) | {"is_stable": ir.BoolAttr.get(True)}
    new = build("stablehlo.sort", [value.type for value in operands], operands, attributes, regions=1)
    scalars = [tensor_type([], element_of(value)) for value in operands for _ in range(2)]
    with ir.InsertionPoint(new.regions[0].blocks.append(*scalars)) as point:
        build("stablehlo.return", [], [_before(list(point.block.arguments), descending)])
    results = [new.results[0]]
    for old, result in zip(list(operation.results)[1:], list(new.results)[1:], strict=True):
        results.append(result if result.type == old.type else convert(result, element_of(old)))
    replace(operation, *results)


def _before(arguments: list[Any], descending: bool) -> Any:
    """Whether the left element (every other argument) comes before the right one."""
    left, right, *payload = arguments
    before = _precedes(left, right, descending)
    if not payload:
        return before
    flag = tensor_type([], "i1")
    after = build("stablehlo.not", [flag], [_precedes(right, left, descending)]).result
    first = build("stablehlo.and", [flag], [after, compare(payload[0], payload[1], "LT", "SIGNED")]).result
    return build("stablehlo.or", [flag], [before, first]).result


def _precedes(left: Any, right: Any, descending: bool) -> Any:
    element, direction = element_of(left), "GT" if descending else "LT"
    if element.startswith(("i", "ui")):
        return compare(left, right, direction, "UNSIGNED" if element == "i1" or element[0] == "u" else "SIGNED")
    number, nan = (right, left) if descending else (left, right)
    flag = tensor_type([], "i1")
    is_number = build("stablehlo.not", [flag], [compare(number, number, "NE")]).result
    nan_last = build("stablehlo.and", [flag], [is_number, compare(nan, nan, "NE")]).result
    return build("stablehlo.or", [flag], [compare(left, right, direction), nan_last]).result


def _accumulate_wide(operation: Any) -> None:
    # IREE accumulates in the result's type: in 16 bits the error of a long product is several times torch's.
    element = element_of(operation.result)
    if element in ("bf16", "f16"):
        result = tensor_type(shape_of(operation.result), "f32")
        wide = build(operation.name, [result], operation.operands, _attributes(operation)).result
        replace(operation, convert(wide, element))


def _convolution(operation: Any) -> None:
    """In 32 bits, with a barrier behind each operand that was 16 bits wide, and which nothing else reads.

    IREE 3.13 looks through the conversion where it makes a product of matrices of a convolution, and then takes the
    operands' type for the result's. It does not look through a barrier.
    """
    element = element_of(operation.result)
    operands = [_fenced(operand) if _is_short(operand) else operand for operand in operation.operands]
    short = element in ("bf16", "f16")
    result = tensor_type(shape_of(operation.result), "f32" if short else element)
    wide = build(operation.name, [result], operands, _attributes(operation)).result
    replace(operation, convert(wide, element) if short else wide)


def _is_short(value: Any) -> bool:
    converted = getattr(value.owner, "name", "") == "stablehlo.convert"
    return any(element_of(one) in ("bf16", "f16") for one in (value, *(value.owner.operands if converted else ())))


def _fenced(value: Any) -> Any:
    wide = convert(value, "f32") if element_of(value) in ("bf16", "f16") else value
    return build("stablehlo.optimization_barrier", [wide.type], [wide]).result


def _repeated(value: Any) -> float | None:
    """The number that ``value`` repeats, where it is a constant that does."""
    from torch_mlir import ir

    while getattr(value.owner, "name", "") in ("stablehlo.broadcast_in_dim", "stablehlo.reshape"):
        value = value.owner.operands[0]
    if getattr(value.owner, "name", "") != "stablehlo.constant":
        return None
    attribute = value.owner.attributes["value"]
    splatted = isinstance(attribute, ir.DenseElementsAttr) and attribute.is_splat
    return float(attribute.get_splat_value().value) if splatted else None


_RULES: dict[str, Callable[[Any], Any]] = {
    "arith.constant": _constant,
    "stablehlo.convert": _convert,
    "stablehlo.reshape": _fold,
    "stablehlo.gather": _narrow_indices,
    "stablehlo.scatter": _narrow_indices,
    "stablehlo.sort": _sort,
    "stablehlo.ceil": denormals.keep_operand,
    "stablehlo.floor": denormals.keep_operand,
    "stablehlo.log": denormals.logarithm,
    "stablehlo.compare": _compare,
    "stablehlo.atan2": signed_angle,
    "stablehlo.sine": reduce_angle,
    "stablehlo.cosine": reduce_angle,
    "stablehlo.tan": reduce_angle,
    "stablehlo.reduce": split_contraction,
    "stablehlo.reverse": reverse_as_signed,
    "stablehlo.dot_general": _accumulate_wide,
    "stablehlo.convolution": _convolution,
}
