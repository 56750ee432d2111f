"""Where something came from."""

from __future__ import annotations

from enum import StrEnum


class Source(StrEnum):
    """Where an entry or a manifest came from. In reports and logs it stands as its value."""

    LOCAL = "local"
    REMOTE = "remote"
    COMPILED = "compiled"
