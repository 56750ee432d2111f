"""What a remote tier tells of an entry without reading it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stored:
    """A finished entry: its bytes, when it was stored in Unix seconds, and the store's name for its marker.

    Equal means that nobody has stored another one in its place.
    """

    bytes: int
    when: float
    version: str
