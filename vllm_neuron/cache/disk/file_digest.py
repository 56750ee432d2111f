"""The digest of an open file, piece by piece on several threads: ``hashlib`` lets other threads run.

``digests`` defines what a digest is.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence

from vllm_neuron.cache.disk.threads import in_threads
from vllm_neuron.digests import of_pieces, pieces
from vllm_neuron.host.cpu import usable_cores

_MOST_THREADS = 8
_BUFFER_BYTES = 256 << 10


def of_file(descriptor: int) -> str:
    """The digest of a whole open file."""

    def one(span: tuple[int, int]) -> bytes:
        hashed = hashlib.sha256()
        for data in read_span(descriptor, *span):
            hashed.update(data)
        return hashed.digest()

    return of_pieces(over(one, pieces(os.fstat(descriptor).st_size)))


def over(function: Callable[[tuple[int, int]], bytes], spans: Sequence[tuple[int, int]]) -> list[bytes]:
    """``function`` of every span, on as many threads as this process has cores for."""
    # Cores are counted at need only: that takes longer than to hash a small file.
    return in_threads(function, spans, min(usable_cores(), _MOST_THREADS) if len(spans) > 1 else 1)


def read_span(descriptor: int, start: int, stop: int) -> Iterator[memoryview]:
    """The bytes of an open file from ``start`` to ``stop``, or as far as it goes, a little at a time.

    Each view is good until the next one: they share a buffer that fits a core's own cache.
    """
    buffer = memoryview(bytearray(min(_BUFFER_BYTES, stop - start)))
    while start < stop and (size := os.preadv(descriptor, [buffer[: stop - start]], start)):
        yield buffer[:size]
        start += size
