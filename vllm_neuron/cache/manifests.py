"""Where manifests are kept: a folder on this machine, and the remote tiers beside their entries."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from vllm_neuron.cache import folders
from vllm_neuron.cache.key import TraceKey
from vllm_neuron.cache.manifest import Manifest, ManifestError, parse_manifest
from vllm_neuron.cache.manifest_folder import ManifestFolder
from vllm_neuron.cache.remote import RemoteTier
from vllm_neuron.errors import CacheError

logger = logging.getLogger("vllm.neuron.cache")

# How many manifests are read to find the one that differs least.
_NEAREST_LIMIT = 64
_FIELDS_SHOWN = 5


@dataclass(frozen=True)
class FoundManifest:
    """A manifest, checked, and the tier that it came from."""

    manifest: Manifest
    tier: Literal["local", "remote"]


class ManifestStore:
    """Manifests by trace key. One that can't be used is passed over with a warning; see :attr:`problems`.

    Raises ``ConfigError`` where ``root`` lies where another user could have put something in it.
    """

    def __init__(self, root: Path, remotes: Sequence[RemoteTier] = ()) -> None:
        folders.check_trusted(root)
        self.root = root
        self._local = ManifestFolder(root)
        self._remotes = list(remotes)
        self.problems: dict[str, str] = {}
        """By trace key: what was wrong with a manifest of that key, and where it is."""

    def lookup(self, key: str) -> FoundManifest | None:
        """The manifest of a trace key from the first tier that has a good one, or None.

        One from a remote tier is kept in the local one, in place of any that is there.
        """
        manifest = self._checked(key, str(self.root), self._local)
        if manifest is not None:
            return FoundManifest(manifest, "local")
        for remote in self._remotes:
            manifest = self._checked(key, remote.name, remote)
            if manifest is not None:
                self.store(manifest)
                return FoundManifest(manifest, "remote")
        return None

    def store(self, manifest: Manifest) -> None:
        """Keep a manifest on this machine, where that is possible: a start does not fail for want of it."""
        try:
            self._local.write(manifest.key, manifest.to_bytes())
        except OSError as error:
            logger.info("The manifest of %s can't be kept in %s: %s", manifest.graph, self.root, error)

    def publish(self, manifest: Manifest) -> None:
        """Store a manifest in every remote tier that takes any. Raises ``CacheError`` where one can't be."""
        data = manifest.to_bytes()
        for remote in self._remotes:
            if remote.read_only:
                continue
            try:
                if self._read(manifest.key, remote) != data:
                    remote.write_manifest(manifest.key, data)
            except (OSError, CacheError) as error:
                raise CacheError(
                    f"the manifest of {manifest.graph} can't be published to {remote.name}: {error}"
                ) from error

    def nearest_difference(self, key: TraceKey, graph: str, model: str) -> str | None:
        """What differs between ``key`` and the manifest of the same graph that comes nearest; None without one.

        A manifest of the same ``model`` comes before one of another.
        """
        candidates = [manifest for manifest in self._candidates if manifest.graph == graph]
        if not candidates:
            return None
        ranked = [(m.model != model, len(_changed(m.parts, key.parts)), n) for n, m in enumerate(candidates)]
        there = candidates[min(ranked)[2]].parts
        return "; ".join(_phrase(name, there, key.parts) for name in _changed(there, key.parts))

    @functools.cached_property
    def _candidates(self) -> list[Manifest]:
        return list(self._read_newest())

    def _read_newest(self) -> Iterator[Manifest]:
        tiers: list[ManifestFolder | RemoteTier] = [self._local, *self._remotes]
        for tier in tiers:
            keys = tier.keys() if isinstance(tier, ManifestFolder) else _keys(tier)
            for key in islice(keys, _NEAREST_LIMIT):
                try:
                    data = self._read(key, tier)
                    if data is not None:
                        yield parse_manifest(data, key)
                except (OSError, CacheError):
                    continue

    def _checked(self, key: str, place: str, tier: ManifestFolder | RemoteTier) -> Manifest | None:
        try:
            data = self._read(key, tier)
            return None if data is None else parse_manifest(data, key)
        except ManifestError as error:
            problem = f"the manifest {key} in {place} can't be used: {error}"
        except (OSError, CacheError) as error:
            problem = f"the manifest {key} in {place} can't be read: {error}"
        self.problems[key] = problem
        return None

    @staticmethod
    def _read(key: str, tier: ManifestFolder | RemoteTier) -> bytes | None:
        return tier.read(key) if isinstance(tier, ManifestFolder) else tier.read_manifest(key)


def _keys(remote: RemoteTier) -> list[str]:
    try:
        return remote.manifest_keys()
    except (OSError, CacheError):
        return []


def _changed(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    return sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))


def _phrase(name: str, there: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Such as ``model.hidden_size: 128 there, 256 here``; for a digest, only that it differs."""
    old, new = _fields(there.get(name)), _fields(here.get(name))
    if old is None or new is None:
        return f"{name} differs"
    changed = [field for field in sorted(old.keys() | new.keys()) if old.get(field) != new.get(field)]
    shown = [
        f"{name}.{ascii(field)[1:-1]}: {_shown(old, field)} there, {_shown(new, field)} here"
        for field in changed[:_FIELDS_SHOWN]
    ]
    more = len(changed) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _fields(part: str | None) -> dict[str, object] | None:
    try:
        value = json.loads(part or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _shown(fields: Mapping[str, object], field: str) -> str:
    text = json.dumps(fields[field]) if field in fields else "unset"
    return text if len(text) <= 80 else f"{text[:77]}..."
