"""Whether a module is one: StableHLO by torch-mlir, HLO by jaxlib where it is installed and by its structure if not."""

from __future__ import annotations

from pathlib import Path

# Of HloModuleProto: the number of each field, and its wire type (0 is a varint, 2 has a length).
_NAME, _ENTRY_NAME, _COMPUTATIONS, _PROGRAM_SHAPE, _ID, _ENTRY_ID = 1, 2, 3, 4, 5, 6
_WIRE_TYPES = {_NAME: 2, _ENTRY_NAME: 2, _COMPUTATIONS: 2, _PROGRAM_SHAPE: 2, _ID: 0, _ENTRY_ID: 0}


class MalformedModuleError(Exception):
    """The file is not what its suffix says."""


def check(path: Path) -> None:
    """Raises :class:`MalformedModuleError`."""
    if path.suffix == ".mlir":
        _check_stablehlo(path.read_text(errors="replace"))
        return
    data = path.read_bytes()
    _check_hlo_fields(data)
    _check_hlo_by_jaxlib(data)


def _check_stablehlo(text: str) -> None:
    from torch_mlir import ir
    from torch_mlir.dialects import torch as _registers_passes  # noqa: F401
    from torch_mlir.passmanager import PassManager

    with ir.Context():
        # Running a pass of StableHLO's makes its operations known to the context.
        simplify = PassManager.parse("builtin.module(func.func(stablehlo-aggressive-simplification))")
        simplify.run(ir.Module.parse("module {}").operation)
        try:
            module = ir.Module.parse(text)
        except ir.MLIRError as error:
            raise MalformedModuleError(" ".join(str(error).split())) from None
        names = [function.name.value for function in module.body.operations]
    if "main" not in names:
        raise MalformedModuleError(f"there is no function main among {names}")


def _check_hlo_by_jaxlib(data: bytes) -> None:
    try:
        from jaxlib import xla_client
    except ImportError:
        return
    try:
        xla_client.XlaComputation(data).as_hlo_text()
    except Exception as error:
        raise MalformedModuleError(str(error)) from None


def _check_hlo_fields(data: bytes) -> None:
    found, at = set(), 0
    while at < len(data):
        tag, at = _varint(data, at)
        field, wire = tag >> 3, tag & 7
        if wire not in (0, 2) or _WIRE_TYPES.get(field, wire) != wire or not field:
            raise MalformedModuleError(f"field {field} of the HloModuleProto has wire type {wire}")
        value, at = _varint(data, at)
        at += value if wire == 2 else 0
        found.add(field)
    if at != len(data):
        raise MalformedModuleError("the HloModuleProto ends within a field")
    if missing := {_NAME, _COMPUTATIONS, _PROGRAM_SHAPE} - found:
        raise MalformedModuleError(f"the HloModuleProto lacks the fields {sorted(missing)}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
    raise MalformedModuleError("the HloModuleProto ends within a number")
