"""A file with the structure of a NEFF: a header of 1024 bytes, and a tar."""

from __future__ import annotations

import hashlib
import io
import struct
import tarfile

HEADER_SIZE = 1024
_FORMAT = "<QQQQQ128sI32s16s256s"
_LOGICAL_CORES_AT = 552


def make(name: str, files: dict[str, bytes], version: str, logical_cores: int) -> bytes:
    """The same bytes for the same arguments."""
    data = _tar(files)
    digest = hashlib.sha256(data).digest()
    header = struct.pack(
        _FORMAT, 2, HEADER_SIZE, len(data), 2, 0, version.encode(), logical_cores, digest, digest[:16], name.encode()
    )
    header = header.ljust(_LOGICAL_CORES_AT, b"\0") + struct.pack("<I", logical_cores)
    return header.ljust(HEADER_SIZE, b"\0") + data


def _tar(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()
