"""The angle of a point: IREE makes NaN of the origin and of what is infinitely far along both axes, and loses signs."""

from __future__ import annotations

import math
from typing import Any

from vllm_neuron.lowering.stablehlo.builders import build, compare, element_of, replace, shape_of, splat


def signed_angle(operation: Any) -> None:
    """Take a ``stablehlo.atan2`` of the point's mirror image above the x axis, moved to where the angle is the same."""
    y, x = operation.operands
    shape, element = shape_of(x), element_of(x)
    zero, one, infinity = (splat(shape, element, number) for number in (0.0, 1.0, math.inf))

    def op(name: str, *operands: Any) -> Any:
        return build(f"stablehlo.{name}", [operands[-1].type], operands).result

    def below(value: Any) -> Any:
        # The reciprocal tells the two zeros apart.
        return op("or", compare(value, zero, "LT"), compare(op("divide", one, value), zero, "LT"))

    def both(size: Any) -> Any:
        return op("and", *(compare(op("abs", value), size, "EQ") for value in (y, x)))

    far, origin = both(infinity), both(zero)
    sign = op("select", below(x), op("negate", one), one)
    height, width = op("select", far, one, op("abs", y)), op("select", op("or", far, origin), sign, x)
    angle = op("atan2", height, width)
    replace(operation, op("select", below(y), op("negate", angle), angle))
