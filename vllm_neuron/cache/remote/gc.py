"""Making room in a remote tier, which has no locks and does not know who reads from it.

An entry goes out of sight in one step, and then its files go. So whoever reads meanwhile has a whole entry or misses;
and an entry that was stored after the look is not the one that was judged, and stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vllm_neuron.cache.remote.tier import RemoteTier
from vllm_neuron.cache.retention import Candidate, Policy, judge, reason_for
from vllm_neuron.errors import CacheError, ConfigError


def collect_remote(remote: RemoteTier, policy: Policy, *, dry_run: bool = False) -> list[Candidate]:
    """Remove from ``remote`` what ``policy`` says; return what was to go, oldest first.

    What can't be removed is in the list as ``failed``, and does not stop the rest. Raises ``ConfigError`` where the
    tier is read-only, ``CacheError`` where it can't be listed.
    """
    if remote.read_only:
        raise ConfigError(
            f"the remote cache {remote.name} is read-only, and nothing can be removed from it: "
            "name the folder or the bucket that is behind it"
        )
    try:
        stored = remote.stored()
    except OSError as error:
        raise CacheError(f"the entries of {remote.name} can't be listed: {error}") from error
    found = [
        Candidate(key, one.bytes, one.when, reason_for(key, one.when, policy, _other_version(remote, key, policy)))
        for key, one in stored.items()
    ]
    chosen = [candidate for candidate in judge(found, policy) if candidate.reason]
    if dry_run:
        return chosen

    def removed(candidate: Candidate) -> Candidate:
        try:
            gone = remote.remove(candidate.key, stored[candidate.key])
        except (OSError, CacheError) as error:
            return replace(candidate, kept=f"it can't be removed: {error}", failed=True)
        return candidate if gone else replace(candidate, kept="it was stored again, or removed, in the meantime")

    return [removed(candidate) for candidate in chosen]


def _other_version(remote: RemoteTier, key: str, policy: Policy) -> Callable[[], bool]:
    def ask() -> bool:
        try:
            metadata = remote.metadata(key)
        except OSError as error:
            raise CacheError(f"{remote.name} can't be asked for key {key}: {error}") from error
        # None: of a format of another release, or damaged, and so of no use to any.
        return metadata is None or (policy.other_version is not None and policy.other_version(metadata))

    return ask
