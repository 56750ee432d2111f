"""Denormal floats in the places where zero would be another answer: IREE 3.13 runs with denormals taken for zero.

The rules stand for whole questions (is it positive, what is the next integer, what is its logarithm), in integers where
the number itself would be lost. Sums and products of denormals stay what the processor makes of them.
"""

from __future__ import annotations

import math
from typing import Any

from vllm_neuron.lowering.stablehlo.builders import (
    build,
    compare,
    convert,
    element_of,
    replace,
    shape_of,
    splat,
    tensor_type,
)

# Element type to the integer of its size, the bits of its fraction, and the exponent of the least denormal.
_FORMATS = {"f64": ("i64", 52, -1074), "f32": ("i32", 23, -149), "bf16": ("i16", 7, -133)}


def keep_sides_of_zero(operation: Any, zero: int) -> None:
    """Let the operand beside the zero, of a comparison, have the smallest normal number in a denormal's place."""
    other = operation.operands[1 - zero]
    if element_of(other) in _FORMATS:
        operation.operands[1 - zero] = _raised(other)


def keep_operand(operation: Any) -> None:
    """The same for the only operand: of a rounding, or of a conversion to a truth value."""
    if element_of(operation.operands[0]) in _FORMATS:
        operation.operands[0] = _raised(operation.operands[0])


def logarithm(operation: Any) -> None:
    """The logarithm of a denormal is that of the integer which its fraction is, less that of its unit."""
    value, element = operation.operands[0], element_of(operation.result)
    if element not in _FORMATS:
        return
    source = convert(value, "f32") if element == "bf16" else value
    wide, shape = element_of(source), shape_of(source)
    integer, fraction, least = _FORMATS[wide]
    bits, is_denormal = _inspect(source)
    number = convert(_op("and", bits, splat(shape, integer, (1 << fraction) - 1)), wide)
    number = _op("select", compare(bits, splat(shape, integer, 0), "LT", "SIGNED"), _op("negate", number), number)
    unit = _op("select", is_denormal, splat(shape, wide, least * math.log(2)), splat(shape, wide, 0))
    result = _op("add", _op("log", _op("select", is_denormal, number, source)), unit)
    replace(operation, convert(result, element) if wide != element else result)


def _raised(value: Any) -> Any:
    """``value``, with the smallest normal number of its sign in the place of a denormal."""
    integer, fraction, _ = _FORMATS[element_of(value)]
    bits, is_denormal = _inspect(value)
    normal = _op("or", bits, splat(shape_of(value), integer, 1 << fraction))
    return build("stablehlo.bitcast_convert", [value.type], [_op("select", is_denormal, normal, bits)]).result


def _inspect(value: Any) -> tuple[Any, Any]:
    """The bits of ``value``, and where it is a denormal."""
    integer, fraction, _ = _FORMATS[element_of(value)]
    shape = shape_of(value)
    bits = build("stablehlo.bitcast_convert", [tensor_type(shape, integer)], [value]).result
    magnitude = _op("and", bits, splat(shape, integer, (1 << int(integer[1:]) - 1) - 1))
    # As signed numbers: IREE 3.13 looks at the type alone, and these have no sign of their own.
    above = compare(magnitude, splat(shape, integer, 0), "GT", "SIGNED")
    below = compare(magnitude, splat(shape, integer, 1 << fraction), "LT", "SIGNED")
    return bits, _op("and", above, below)


def _op(name: str, *operands: Any) -> Any:
    return build(f"stablehlo.{name}", [operands[-1].type], operands).result
