"""The same work on several items at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
T = TypeVar("T")


def in_threads(function: Callable[[Item], T], items: Sequence[Item], threads: int) -> list[T]:
    """``function`` of every item, on at most ``threads`` threads. The first error is raised, and what waits is left."""
    if len(items) < 2 or threads < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items)), thread_name_prefix="cache") as pool:
        try:
            return list(pool.map(function, items))
        finally:
            pool.shutdown(cancel_futures=True)
