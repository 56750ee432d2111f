"""Which entries of a tier are to go, local or remote."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from vllm_neuron.cache.metadata import Metadata


@dataclass(frozen=True)
class Policy:
    """What is to go: an entry goes where any of these says so.

    ``max_bytes`` is the most that all entries together may take: the oldest go first. ``max_age`` is in seconds since
    an entry was stored here; what lies in quarantine goes by it too. ``keep`` are the only keys that stay.
    ``other_version`` says of an entry's metadata that another release made it.
    """

    max_bytes: int | None = None
    max_age: float | None = None
    keep: Collection[str] | None = None
    other_version: Callable[[Metadata], bool] | None = None


@dataclass(frozen=True)
class Candidate:
    """An entry that was looked at. ``reason`` says why it goes; '' where it stays; ``kept`` why it stays after all.

    ``failed`` says that it stays because it could not be removed.
    """

    key: str
    bytes: int
    stored: float
    reason: str = ""
    kept: str = ""
    failed: bool = False


def judge(candidates: Iterable[Candidate], policy: Policy) -> list[Candidate]:
    """All candidates, oldest first, where those that are too many have a reason to go too."""
    found = sorted(candidates, key=lambda one: one.stored)
    if policy.max_bytes is None:
        return found
    left = sum(one.bytes for one in found if not one.reason)
    judged = []
    for one in found:
        if not one.reason and left > policy.max_bytes:
            left -= one.bytes
            one = replace(one, reason="the oldest, and there are too many bytes")
        judged.append(one)
    return judged


def reason_for(key: str, stored: float, policy: Policy, is_of_other_version: Callable[[], bool]) -> str:
    """Why ``policy`` lets an entry go, apart from its bytes; '' where it does not. The version is asked for at need."""
    if policy.keep is not None and key not in policy.keep:
        return "not in the plan"
    if policy.max_age is not None and time.time() - stored > policy.max_age:
        return "too old"
    if policy.other_version is not None and is_of_other_version():
        return "of another version"
    return ""
