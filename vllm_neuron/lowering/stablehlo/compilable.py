"""Forms of StableHLO that IREE 3.13 can't compile, as equal ones that it can."""

from __future__ import annotations

from typing import Any

from vllm_neuron.lowering.stablehlo.builders import build, element_of, replace, shape_of, tensor_type


def split_contraction(operation: Any) -> None:
    """A sum of products over several dimensions sums the last of them first.

    Otherwise IREE makes one contraction of it, and then fails where a factor is repeated along one of the dimensions.
    """
    from torch_mlir import ir

    dims = sorted(int(dim) for dim in ir.DenseI64ArrayAttr(operation.attributes["dimensions"]))
    body = operation.regions[0].blocks[0].operations
    if len(operation.results) > 1 or len(dims) < 2 or body[0].operation.name != "stablehlo.add":
        return
    if not _is_product(operation.operands[0]):
        return
    kept = shape_of(operation.operands[0])
    del kept[dims[-1]]
    part = _sum_over(operation, operation.operands[0], dims[-1:], kept)
    replace(operation, _sum_over(operation, part, dims[:-1], shape_of(operation.results[0])))


def _is_product(value: Any) -> bool:
    while getattr(value.owner, "name", "") in ("stablehlo.convert", "stablehlo.reshape"):
        value = value.owner.operands[0]
    return getattr(value.owner, "name", "") == "stablehlo.multiply"


def _sum_over(operation: Any, value: Any, dims: list[int], shape: list[int]) -> Any:
    """``value`` summed over ``dims``, by the body and from the initial value of ``operation``."""
    from torch_mlir import ir

    element = element_of(value)
    attributes = {"dimensions": ir.DenseI64ArrayAttr.get(dims)}
    result = build(
        "stablehlo.reduce", [tensor_type(shape, element)], [value, operation.operands[1]], attributes, regions=1
    )
    scalar = tensor_type([], element)
    with ir.InsertionPoint(result.regions[0].blocks.append(scalar, scalar)) as point:
        build("stablehlo.return", [], [build("stablehlo.add", [scalar], list(point.block.arguments)).result])
    return result.result


def reverse_as_signed(operation: Any) -> None:
    """A reversal of unsigned numbers moves them as signed ones of the same bits."""
    value, element = operation.operands[0], element_of(operation.result)
    if element.startswith("ui"):
        signed = tensor_type(shape_of(value), element[1:])
        bits = build("stablehlo.bitcast_convert", [signed], [value]).result
        attributes = {"dimensions": operation.attributes["dimensions"]}
        turned = build("stablehlo.reverse", [signed], [bits], attributes).result
        replace(operation, build("stablehlo.bitcast_convert", [operation.result.type], [turned]).result)
