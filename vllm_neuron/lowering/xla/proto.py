"""The few bytes of an ``HloModuleProto`` that are not a function of the program."""

from __future__ import annotations

_MODULE_ID = 5  # HloModuleProto.id: how many modules its process had made before
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def without_module_id(data: bytes) -> bytes:
    """The serialized message without the field that counts modules. Nothing reads it."""
    kept, place = bytearray(), 0
    while place < len(data):
        start = place
        tag, place = _varint(data, place)
        place = _after(data, place, tag & 7)
        if tag >> 3 != _MODULE_ID:
            kept += data[start:place]
    return bytes(kept)


def _after(data: bytes, place: int, wire_type: int) -> int:
    """Where the value that starts at ``place`` ends."""
    value, end = _varint(data, place) if wire_type in (_VARINT, _BYTES) else (0, place)
    return end + {_VARINT: 0, _BYTES: value, _FIXED64: 8, _FIXED32: 4}[wire_type]


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, place
