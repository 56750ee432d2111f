"""Entries in one file, for images and for sites without a network: a tar of whole entries, verified on both sides.

::

    <key>/<file>                 every file of one entry after another, its description first, its marker last
    .manifests/<trace key>.json  after all entries: what spares a start that uses them the capture
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from vllm_neuron import digests
from vllm_neuron.cache import transfer, trust
from vllm_neuron.cache.disk import files
from vllm_neuron.cache.entry import Entry
from vllm_neuron.cache.key import is_key
from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.cache.manifests.manifest import Manifest, ManifestError
from vllm_neuron.cache.manifests.store import ManifestStore
from vllm_neuron.cache.metadata import (
    COMPLETE_MARKER,
    MAX_METADATA_BYTES,
    MAX_SIGNATURE_BYTES,
    METADATA_FILE,
    SIGNATURE_FILE,
    Metadata,
    marker_of,
    parse_metadata,
)
from vllm_neuron.cache.store.layout import MANIFESTS, MAX_MANIFEST_BYTES, manifest_key, manifest_path
from vllm_neuron.errors import CacheError, NeuronError


@dataclass(frozen=True)
class Unpacked:
    """What an archive held, by key: whether it is new here."""

    entries: dict[str, bool]
    manifests: dict[str, bool]


def pack(entries: Sequence[Entry], target: Path, manifests: Sequence[Manifest] = ()) -> int:
    """Write ``entries`` and ``manifests`` to the new archive ``target``; return its size in bytes.

    The same things give the same bytes. They are signed as by a publish. Raises ``CacheError``.
    """
    try:
        _check_target(target)
        with files.replacing(target.absolute()) as aside:
            with tarfile.open(aside, "w", format=tarfile.PAX_FORMAT) as archive:
                for entry in sorted(entries, key=lambda one: one.key):
                    _add(archive, entry)
                for manifest in sorted(manifests, key=lambda one: one.key):
                    data = manifest.to_publish()
                    archive.addfile(_member(manifest_path(manifest.key), len(data)), io.BytesIO(data))
            return aside.stat().st_size
    except OSError as error:
        raise CacheError(f"the archive {target} can't be written: {error}") from error


def _check_target(target: Path) -> None:
    """Nothing but an older archive is ever replaced: not a folder, nor a device such as ``/dev/stdout``."""
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "no plain file"
        raise CacheError(f"{target} is {kind}: name the archive that is to be written, such as cache.tar")


def _add(archive: tarfile.TarFile, entry: Entry) -> None:
    with files.folder(entry.path) as folder:
        data = files.read_small(METADATA_FILE, MAX_METADATA_BYTES, folder)
        signature = transfer.signature_to_publish(entry.key, data, folder)
        small = {METADATA_FILE: data, **({SIGNATURE_FILE: signature} if signature else {})}
        for name, content in small.items():
            archive.addfile(_member(f"{entry.key}/{name}", len(content)), io.BytesIO(content))
        for name, record in entry.metadata.files.items():
            with files.open_plain(name, folder) as file:
                archive.addfile(_member(f"{entry.key}/{name}", record.size), file)
        marker = marker_of(data)
        archive.addfile(_member(f"{entry.key}/{COMPLETE_MARKER}", len(marker)), io.BytesIO(marker))


def _member(path: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(path)
    member.size, member.mode = size, 0o644
    return member


def unpack(source: Path, local: LocalTier, manifests: ManifestStore) -> Unpacked:
    """Store every entry of an archive in ``local``, and every manifest in ``manifests``.

    Nothing of an entry is visible before all of it has been checked: names, sizes, digests, and its signature where
    keys are trusted. Raises ``CacheError`` where the archive is damaged, or where what is in it can't be kept; what
    comes before stays.
    """
    done = Unpacked({}, {})
    try:
        with tarfile.open(source, "r|") as archive:
            reader = _Reader(archive, source)
            while (place := reader.next_place()) is not None:
                if place == MANIFESTS:
                    key, data = reader.manifest()
                    done.manifests[key] = _adopt(reader, manifests, key, data)
                else:
                    done.entries[place] = _store(reader, local, place)
    except NeuronError:
        raise
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise CacheError(f"the archive {source} can't be read: {error}") from error
    if not done.entries and not done.manifests:
        raise CacheError(f"the archive {source} is empty: there is nothing to unpack")
    return done


def _store(reader: _Reader, local: LocalTier, key: str) -> bool:
    if local.lookup(key) is not None:
        reader.skip(key)
        return False
    entry = local.build(key, lambda folder: reader.extract(key, folder))
    local.check_kept(entry)
    return True


def _adopt(reader: _Reader, manifests: ManifestStore, key: str, data: bytes) -> bool:
    try:
        return manifests.adopt(key, data)
    except ManifestError as problem:
        raise reader.damaged(f"the manifest {key}: {problem}") from problem


class _Reader:
    """Members of an archive in their order, an entry or a manifest at a time."""

    def __init__(self, archive: tarfile.TarFile, source: Path) -> None:
        self._archive = archive
        self._source = source
        self._member = archive.next()

    def next_place(self) -> str | None:
        """The key of the entry that comes next, or ``MANIFESTS``; None at the end."""
        return None if self._member is None else self._name(self._member)[0]

    def manifest(self) -> tuple[str, bytes]:
        """The key and the bytes, unchecked, of the manifest that comes next."""
        name = self._name(self._member)[1] if self._member is not None else ""
        key = manifest_key(name)
        if key is None:
            raise self.damaged(f"{MANIFESTS}/{name} is not the name of a manifest")
        return key, self._take(MANIFESTS, name, MAX_MANIFEST_BYTES)

    def skip(self, key: str) -> None:
        """Pass over an entry."""
        while self._member is not None and self._name(self._member)[0] == key:
            self._member = self._archive.next()

    def extract(self, key: str, into: Path) -> None:
        """Write the files of the entry that comes next into an empty folder."""
        data, signature = self._take(key, METADATA_FILE, MAX_METADATA_BYTES), None
        if self._member is not None and self._name(self._member) == (key, SIGNATURE_FILE):
            signature = self._take(key, SIGNATURE_FILE, MAX_SIGNATURE_BYTES)
        try:
            metadata = parse_metadata(data, key)
        except files.NotAsExpected as problem:
            raise self.damaged(f"entry {key}: {problem}") from problem
        trust.check(key, data, signature)
        for _ in metadata.files:
            self._file(key, metadata, into)
        if self._take(key, COMPLETE_MARKER, len(marker_of(data))) != marker_of(data):
            raise self.damaged(f"entry {key}: the marker does not fit")
        transfer.finish_copy(into, metadata, data, marker_of(data), signature, sync=True)

    def _file(self, key: str, metadata: Metadata, into: Path) -> None:
        name = self._name(self._member)[1] if self._member is not None else ""
        record = metadata.files.get(name)
        if record is None or self._member is None or self._member.size != record.size:
            raise self.damaged(f"entry {key}: {name or 'a file'} is not as listed")
        stream = self._archive.extractfile(self._member)
        assert stream is not None, "only plain files come here"
        with files.NewFile(into / name) as target:
            found = digests.of_pieces(
                [target.put(start, stream.read(stop - start)) for start, stop in digests.pieces(record.size)]
            )
            os.fsync(target.descriptor)
        if found != record.digest:
            raise self.damaged(f"entry {key}: the digest of {name} differs")
        self._member = self._archive.next()

    def _take(self, place: str, name: str, limit: int) -> bytes:
        member = self._member
        if member is None or self._name(member) != (place, name) or member.size > limit:
            raise self.damaged(f"{place}: {name} is missing, too large, or not in its place")
        stream = self._archive.extractfile(member)
        assert stream is not None, "only plain files come here"
        data = stream.read()
        self._member = self._archive.next()
        return data

    def _name(self, member: tarfile.TarInfo) -> tuple[str, str]:
        parts = PurePosixPath(member.name).parts
        if len(parts) != 2 or not (is_key(parts[0]) or parts[0] == MANIFESTS) or not member.isreg():
            raise self.damaged(f"{member.name!r} is neither a file of an entry nor a manifest")
        return parts[0], parts[1]

    def damaged(self, problem: str) -> CacheError:
        """The error to raise for what is not as it should be."""
        return CacheError(f"the archive {self._source} is damaged: {problem}")
