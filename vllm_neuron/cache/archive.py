"""Entries in one file, for images and for sites without a network: a tar of whole entries, verified on both sides."""

from __future__ import annotations

import io
import os
import secrets
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from vllm_neuron import digests
from vllm_neuron.cache import files, transfer, trust
from vllm_neuron.cache.entry import Entry, marker_of, parse_metadata
from vllm_neuron.cache.key import is_key
from vllm_neuron.cache.local import LocalTier
from vllm_neuron.cache.metadata import (
    COMPLETE_MARKER,
    MAX_METADATA_BYTES,
    MAX_SIGNATURE_BYTES,
    METADATA_FILE,
    SIGNATURE_FILE,
    Metadata,
)
from vllm_neuron.errors import CacheError


def pack(entries: Sequence[Entry], target: Path) -> int:
    """Write ``entries`` to the new archive ``target``; return its size in bytes.

    The same entries give the same bytes. They are signed as by a publish. Raises ``CacheError``.
    """
    aside = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        with tarfile.open(aside, "w", format=tarfile.PAX_FORMAT) as archive:
            for entry in sorted(entries, key=lambda one: one.key):
                _add(archive, entry)
        size = aside.stat().st_size
        aside.replace(target)
    except OSError as error:
        raise CacheError(f"the archive {target} can't be written: {error}") from error
    finally:
        aside.unlink(missing_ok=True)
    return size


def _add(archive: tarfile.TarFile, entry: Entry) -> None:
    with files.folder(entry.path) as folder:
        data = files.read_small(METADATA_FILE, MAX_METADATA_BYTES, folder)
        signature = transfer.signature_to_publish(entry.key, data, folder)
        small = {METADATA_FILE: data, **({SIGNATURE_FILE: signature} if signature else {})}
        for name, content in small.items():
            archive.addfile(_member(entry.key, name, len(content)), io.BytesIO(content))
        for name, record in entry.metadata.files.items():
            with files.open_plain(name, folder) as file:
                archive.addfile(_member(entry.key, name, record.size), file)
        marker = marker_of(data)
        archive.addfile(_member(entry.key, COMPLETE_MARKER, len(marker)), io.BytesIO(marker))


def _member(key: str, name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(f"{key}/{name}")
    member.size, member.mode = size, 0o644
    return member


def unpack(source: Path, local: LocalTier) -> dict[str, bool]:
    """Store every entry of an archive in ``local``; return by key whether it is new.

    Nothing of an entry is visible before all of it has been checked: names, sizes, digests, and its signature where
    keys are trusted. Raises ``CacheError`` where the archive is damaged; entries before the damage stay.
    """
    done: dict[str, bool] = {}
    try:
        with tarfile.open(source, "r|") as archive:
            reader = _Reader(archive, source)
            while (key := reader.next_key()) is not None:
                new = local.lookup(key) is None
                if new:
                    local.build(key, lambda folder, key=key: reader.extract(key, folder))  # type: ignore[misc]
                else:
                    reader.skip(key)
                done[key] = new
    except (tarfile.TarError, EOFError, OSError) as error:
        raise CacheError(f"the archive {source} can't be read: {error}") from error
    return done


class _Reader:
    """Members of an archive in their order, an entry at a time."""

    def __init__(self, archive: tarfile.TarFile, source: Path) -> None:
        self._archive = archive
        self._source = source
        self._member = archive.next()

    def next_key(self) -> str | None:
        """The key of the entry that comes next; None at the end."""
        if self._member is None:
            return None
        key, _ = self._name(self._member)
        return key

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
            raise self._damaged(f"entry {key}: {problem}") from problem
        trust.check(key, data, signature)
        for _ in metadata.files:
            self._file(key, metadata, into)
        if self._take(key, COMPLETE_MARKER, len(marker_of(data))) != marker_of(data):
            raise self._damaged(f"entry {key}: the marker does not fit")
        transfer.finish_copy(into, metadata, data, marker_of(data), signature, sync=True)

    def _file(self, key: str, metadata: Metadata, into: Path) -> None:
        name = self._name(self._member)[1] if self._member is not None else ""
        record = metadata.files.get(name)
        if record is None or self._member is None or self._member.size != record.size:
            raise self._damaged(f"entry {key}: {name or 'a file'} is not as listed")
        stream = self._archive.extractfile(self._member)
        assert stream is not None, "only plain files come here"
        with files.NewFile(into / name) as target:
            found = digests.of_pieces(
                [target.put(start, stream.read(stop - start)) for start, stop in digests.pieces(record.size)]
            )
            os.fsync(target.descriptor)
        if found != record.digest:
            raise self._damaged(f"entry {key}: the digest of {name} differs")
        self._member = self._archive.next()

    def _take(self, key: str, name: str, limit: int) -> bytes:
        member = self._member
        if member is None or self._name(member) != (key, name) or member.size > limit:
            raise self._damaged(f"entry {key}: {name} is missing, too large, or not in its place")
        stream = self._archive.extractfile(member)
        assert stream is not None, "only plain files come here"
        data = stream.read()
        self._member = self._archive.next()
        return data

    def _name(self, member: tarfile.TarInfo) -> tuple[str, str]:
        parts = PurePosixPath(member.name).parts
        if len(parts) != 2 or not is_key(parts[0]) or not member.isreg():
            raise self._damaged(f"{member.name!r} is not a file of an entry")
        return parts[0], parts[1]

    def _damaged(self, problem: str) -> CacheError:
        return CacheError(f"the archive {self._source} is damaged: {problem}")
