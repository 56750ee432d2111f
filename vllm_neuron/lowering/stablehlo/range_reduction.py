"""Sine, cosine and tangent: IREE takes whole turns off an angle in one step, which loses the digits of large numbers.

Of a small negative angle it takes a turn too, and with it what there is of digits.
"""

from __future__ import annotations

import math
from typing import Any

from vllm_neuron.lowering.stablehlo.builders import build, convert, element_of, replace, shape_of, splat, tensor_type

# A turn, in parts that add up to it: Cody and Waite's reduction. The first two have 8 binary digits, so that their
# product with up to 2**16 turns, angles up to 4e5, is exact.
_FIRST = 6.28125
_SECOND = math.ldexp(round(math.ldexp(math.tau - _FIRST, 17)), -17)
_PARTS = (_FIRST, _SECOND, math.tau - _FIRST - _SECOND)


def reduce_angle(operation: Any) -> None:
    """Take whole turns off the angle of a ``stablehlo.sine``, ``cosine`` or ``tan`` of 32 bits or fewer."""
    angle, element = operation.operands[0], element_of(operation.result)
    if element not in ("f32", "f16", "bf16"):
        return
    angle = angle if element == "f32" else convert(angle, "f32")
    shape = shape_of(angle)

    def op(name: str, *operands: Any) -> Any:
        return build(f"stablehlo.{name}", [angle.type], operands).result

    bits = build("stablehlo.bitcast_convert", [tensor_type(shape, "i32")], [angle]).result
    angle = op("abs", angle)
    turns = op("round_nearest_even", op("multiply", angle, splat(shape, "f32", 1 / math.tau)))
    for part in _PARTS:
        angle = op("subtract", angle, op("multiply", turns, splat(shape, "f32", part)))
    result = op(operation.name.removeprefix("stablehlo."), angle)
    if operation.name != "stablehlo.cosine":
        result = _with_sign(result, bits)
    replace(operation, result if element == "f32" else convert(result, element))


def _with_sign(value: Any, bits: Any) -> Any:
    """``value``, an odd function of a positive number, negated where the number was negative to begin with."""
    shape = shape_of(value)
    sign = build("stablehlo.and", [bits.type], [bits, splat(shape, "i32", -(2**31))]).result
    turned = build("stablehlo.bitcast_convert", [bits.type], [value]).result
    turned = build("stablehlo.xor", [bits.type], [turned, sign]).result
    return build("stablehlo.bitcast_convert", [value.type], [turned]).result
