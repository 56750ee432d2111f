"""Where manifests are kept: a folder on this machine, and the remote tiers beside their entries."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from vllm_neuron.cache.differences import differences
from vllm_neuron.cache.disk import files, folders
from vllm_neuron.cache.disk.threads import in_threads
from vllm_neuron.cache.key import TraceKey, abi_digest
from vllm_neuron.cache.manifests.folder import ManifestFolder
from vllm_neuron.cache.manifests.manifest import Manifest, ManifestError, parse_manifest
from vllm_neuron.cache.metadata import Metadata
from vllm_neuron.cache.remote.tier import RemoteTier
from vllm_neuron.cache.source import Source
from vllm_neuron.cache.store.base import STREAMS
from vllm_neuron.errors import CacheError

logger = logging.getLogger("vllm.neuron.cache")

# How many manifests are read to find the one that differs least.
_NEAREST_LIMIT = 64


@dataclass(frozen=True)
class FoundManifest:
    """A manifest, checked, and the tier that it came from."""

    manifest: Manifest
    tier: Source


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
        manifest = self._checked(key, self._local)
        if manifest is not None:
            return FoundManifest(manifest, Source.LOCAL)
        for remote in self._remotes:
            manifest = self._checked(key, remote)
            if manifest is not None:
                self.store(manifest)
                return FoundManifest(manifest, Source.REMOTE)
        return None

    def store(self, manifest: Manifest) -> None:
        """Keep a manifest on this machine, where that is possible: a start does not fail for want of it."""
        try:
            self._local.write_manifest(manifest.key, manifest.to_bytes())
        except OSError as error:
            logger.info("The manifest of %s can't be kept in %s: %s", manifest.graph, self.root, error)

    def adopt(self, key: str, data: bytes) -> bool:
        """Keep the bytes of a manifest from elsewhere, unless a good one of its key is here; whether they are new.

        Raises ``ManifestError`` where they are no manifest of ``key``, ``CacheError`` where nobody who is trusted has
        signed it, or where nothing can be stored.
        """
        manifest = parse_manifest(data, key)
        manifest.check_trusted()
        return self._adopt(manifest)

    def local_of(self, entries: Iterable[Metadata]) -> list[Manifest]:
        """The manifests of this machine whose artifact is one of ``entries``, by key."""
        modules = {_module_of(entry) for entry in entries}
        found = (self._checked(key, self._local) for key in sorted(self._local.manifest_keys()))
        return [manifest for manifest in found if manifest is not None and _module(manifest) in modules]

    def fetch_of(self, entries: Iterable[Metadata]) -> list[str]:
        """Keep those of the remote tiers whose artifact is one of ``entries``; return the keys of the new ones.

        Raises ``CacheError`` where a remote tier can't be listed, or where nothing can be stored.
        """
        modules, here = {_module_of(entry) for entry in entries}, set(self._local.manifest_keys())
        new: set[str] = set()
        for remote in self._remotes:
            wanted = [key for key in remote.manifest_keys() if key not in here]
            found = in_threads(functools.partial(self._checked, tier=remote), wanted, STREAMS)
            fitting = (one for one in found if one is not None and _module(one) in modules)
            new.update(one.key for one in fitting if self._adopt(one))
        return sorted(new)

    def publish(self, manifest: Manifest) -> bool:
        """Store a manifest in every remote tier that takes any; whether one lacked it.

        Raises ``CacheError`` where one can't be stored.
        """
        landed = False
        for remote in self._remotes:
            if remote.read_only:
                continue
            try:
                there = self._checked(manifest.key, remote)
                if there is None or not there.suffices_for(manifest):
                    remote.write_manifest(manifest.key, manifest.to_publish())
                    self.problems.pop(manifest.key, None)
                    landed = True
            except (OSError, CacheError) as error:
                raise CacheError(
                    f"the manifest of {manifest.graph} can't be published to {remote.name}: {error}"
                ) from error
        return landed

    def nearest_difference(self, key: TraceKey, graph: str, model: str) -> str | None:
        """What differs between ``key`` and the manifest of the same graph that comes nearest; None without one.

        A manifest of the same ``model`` comes before one of another.
        """
        candidates = [manifest for manifest in self._candidates if manifest.graph == graph]
        if not candidates:
            return None
        ranked = [(m.model != model, len(_changed(m.parts, key.parts)), n) for n, m in enumerate(candidates)]
        there = candidates[min(ranked)[2]].parts
        changed = _changed(there, key.parts)
        return "; ".join(text for name in changed for text in _phrases(name, there.get(name), key.parts.get(name)))

    def _adopt(self, manifest: Manifest) -> bool:
        key = manifest.key
        if self._checked(key, self._local) is not None:
            return False
        self.problems.pop(key, None)
        try:
            self._local.write_manifest(key, manifest.to_bytes())
        except OSError as error:
            raise CacheError(f"the manifest {key} can't be stored in {self.root}: {error}") from error
        return True

    @functools.cached_property
    def _candidates(self) -> list[Manifest]:
        return list(self._read_newest())

    def _read_newest(self) -> Iterator[Manifest]:
        tiers: list[ManifestFolder | RemoteTier] = [self._local, *self._remotes]
        for tier in tiers:
            for key in islice(_keys(tier), _NEAREST_LIMIT):
                try:
                    data = tier.read_manifest(key)
                    if data is not None:
                        yield parse_manifest(data, key)
                except (OSError, CacheError, files.NotAsExpected):
                    continue

    def _checked(self, key: str, tier: ManifestFolder | RemoteTier) -> Manifest | None:
        try:
            data = tier.read_manifest(key)
            if data is None:
                return None
            manifest = parse_manifest(data, key)
            if not isinstance(tier, ManifestFolder):
                manifest.check_trusted()
            return manifest
        except (ManifestError, files.NotAsExpected) as error:
            problem = f"the manifest {key} in {tier.name} can't be used: {error}"
        except (OSError, CacheError) as error:
            problem = f"the manifest {key} in {tier.name} can't be read: {error}"
        self.problems[key] = problem
        return None


def _keys(tier: ManifestFolder | RemoteTier) -> list[str]:
    try:
        return tier.manifest_keys()
    except (OSError, CacheError):
        return []


def _module(manifest: Manifest) -> tuple[str, str, str]:
    return manifest.module_sha256, manifest.module_format, abi_digest(manifest.module.abi)


def _module_of(entry: Metadata) -> tuple[str, str, str]:
    parts = entry.key_parts
    return parts["module"], parts["module_format"], parts["abi"]


def _changed(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    return sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))


def _phrases(name: str, there: str | None, here: str | None) -> list[str]:
    """For each field of a part that differs, its values; for a digest, only that it differs."""
    old, new = _fields(there), _fields(here)
    fields = [] if old is None or new is None else differences(name, old, new)
    return fields or [f"{name} differs"]


def _fields(part: str | None) -> dict[str, object] | None:
    try:
        value = json.loads(part or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
