"""Operations, types and constants of StableHLO, made at the current insertion point of torch-mlir's bindings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def build(
    name: str,
    results: Sequence[Any],
    operands: Sequence[Any] = (),
    attributes: dict[str, Any] | None = None,
    regions: int = 0,
) -> Any:
    """Create an operation at the current insertion point."""
    from torch_mlir import ir

    return ir.Operation.create(
        name, results=list(results), operands=list(operands), attributes=attributes or {}, regions=regions
    )


def tensor_type(shape: Sequence[int], element: str) -> Any:
    """The ranked tensor type of that shape and element type, written as MLIR does: ``f32``, ``i64``."""
    from torch_mlir import ir

    return ir.RankedTensorType.get(list(shape), ir.Type.parse(element))


def shape_of(value: Any) -> list[int]:
    """The static shape of a tensor value."""
    from torch_mlir import ir

    return list(ir.RankedTensorType(value.type).shape)


def element_of(value: Any) -> str:
    """The element type of a tensor value, as MLIR writes it."""
    from torch_mlir import ir

    return str(ir.RankedTensorType(value.type).element_type)


def constant(value: Any) -> Any:
    """A ``stablehlo.constant`` of an elements attribute, at the current insertion point."""
    return build("stablehlo.constant", [value.type], attributes={"value": value}).result


def splat(shape: Sequence[int], element: str, scalar: float) -> Any:
    """A constant tensor of one number, at the current insertion point."""
    from torch_mlir import ir

    type_ = ir.Type.parse(element)
    attribute = (
        ir.IntegerAttr.get(type_, int(scalar)) if isinstance(type_, ir.IntegerType) else ir.FloatAttr.get(type_, scalar)
    )
    return constant(ir.DenseElementsAttr.get_splat(tensor_type(shape, element), attribute))


def convert(value: Any, element: str) -> Any:
    """``value`` converted to another element type, at the current insertion point."""
    return build("stablehlo.convert", [tensor_type(shape_of(value), element)], [value]).result


def compare(left: Any, right: Any, direction: str, kind: str = "FLOAT") -> Any:
    """Elementwise comparison. ``direction``: ``LT``, ``EQ``, ...; ``kind``: ``FLOAT``, ``SIGNED`` or ``UNSIGNED``."""
    from torch_mlir import ir

    attributes = {
        "comparison_direction": ir.Attribute.parse(f"#stablehlo<comparison_direction {direction}>"),
        "compare_type": ir.Attribute.parse(f"#stablehlo<comparison_type {kind}>"),
    }
    return build("stablehlo.compare", [tensor_type(shape_of(left), "i1")], [left, right], attributes).result


def replace(old: Any, *values: Any) -> None:
    """Put ``values`` in the place of the results of ``old``, which goes."""
    for result, value in zip(old.results, values, strict=True):
        result.replace_all_uses_with(value)
    old.erase()
