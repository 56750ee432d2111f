"""The digest of a file's content, over pieces that can be hashed and moved at the same time.

Of at most ``PIECE_BYTES`` it is the SHA-256; of more it is the SHA-256 over the SHA-256 digests (32 bytes each) of the
pieces, in order. One stream of SHA-256 is slower than a copy; several, on threads, are not: ``hashlib`` lets other
threads run.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from vllm_neuron.runtime.cpu import usable_cores

PIECE_BYTES = 4 << 20
_MOST_THREADS = 8
_BUFFER_BYTES = 256 << 10

T = TypeVar("T")


def of_bytes(data: bytes) -> str:
    """The digest of ``data``, in hexadecimal."""
    view = memoryview(data)
    return of_pieces([hashlib.sha256(view[start:stop]).digest() for start, stop in pieces(len(data))])


def of_pieces(digests: Sequence[bytes]) -> str:
    """The digest of a content from the SHA-256 of each of its pieces, in hexadecimal."""
    return digests[0].hex() if len(digests) == 1 else hashlib.sha256(b"".join(digests)).hexdigest()


def of_file(descriptor: int) -> str:
    """The digest of a whole open file."""

    def one(span: tuple[int, int]) -> bytes:
        hashed = hashlib.sha256()
        for data in read_span(descriptor, *span):
            hashed.update(data)
        return hashed.digest()

    return of_pieces(over(one, pieces(os.fstat(descriptor).st_size)))


def pieces(size: int) -> list[tuple[int, int]]:
    """Where the pieces of ``size`` bytes begin and end. There is always one, if only an empty one."""
    return [(start, min(start + PIECE_BYTES, size)) for start in range(0, size, PIECE_BYTES)] or [(0, 0)]


def over(function: Callable[[tuple[int, int]], T], spans: Sequence[tuple[int, int]]) -> list[T]:
    """``function`` of every span, on as many threads as this process has cores for."""
    if len(spans) < 2 or (threads := min(usable_cores(), _MOST_THREADS, len(spans))) < 2:
        return [function(span) for span in spans]
    with ThreadPoolExecutor(threads, thread_name_prefix="cache-digest") as pool:
        return _results(pool.map(function, spans), pool)


def _results(values: Iterable[T], pool: ThreadPoolExecutor) -> list[T]:
    try:
        return list(values)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def read_span(descriptor: int, start: int, stop: int) -> Iterator[memoryview]:
    """The bytes of an open file from ``start`` to ``stop``, or as far as it goes, a little at a time.

    Each view is good until the next one: they share a buffer that fits a core's own cache.
    """
    buffer = memoryview(bytearray(min(_BUFFER_BYTES, stop - start)))
    while start < stop and (size := os.preadv(descriptor, [buffer[: stop - start]], start)):
        yield buffer[:size]
        start += size
