"""The digest of a content, over pieces that can be hashed and moved at the same time.

Of at most ``PIECE_BYTES`` it is the SHA-256; of more it is the SHA-256 over the SHA-256 digests (32 bytes each) of the
pieces, in order. One stream of SHA-256 is slower than a copy; several, on threads, need not be.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

PIECE_BYTES = 4 << 20


def of_bytes(data: bytes) -> str:
    """The digest of ``data``, in hexadecimal."""
    view = memoryview(data)
    return of_pieces([hashlib.sha256(view[start:stop]).digest() for start, stop in pieces(len(data))])


def of_pieces(digests: Sequence[bytes]) -> str:
    """The digest of a content from the SHA-256 of each of its pieces, in hexadecimal."""
    return digests[0].hex() if len(digests) == 1 else hashlib.sha256(b"".join(digests)).hexdigest()


def pieces(size: int) -> list[tuple[int, int]]:
    """Where the pieces of ``size`` bytes begin and end. There is always one, if only an empty one."""
    return [(start, min(start + PIECE_BYTES, size)) for start in range(0, size, PIECE_BYTES)] or [(0, 0)]
