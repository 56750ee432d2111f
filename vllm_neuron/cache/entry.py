"""One entry of the cache: a folder that holds a compiled artifact and everything needed to trust and use it.

What a folder's files say about its state:

============= ======================================================================================
state         files
============= ======================================================================================
ABSENT        no folder
IN_PROGRESS   a folder without ``.compilation_complete``
COMPLETE      ``.compilation_complete`` holds the digest of ``metadata.json``, which lists every file
              with its size and digest, and each is as listed
FOREIGN       as COMPLETE so far as can be read, but ``metadata.json`` has another format version
DAMAGED       anything else: a file that lacks, differs or is no plain file; another key's entry;
              metadata that does not parse or contradicts itself; a folder that is a symbolic link
============= ======================================================================================

An entry has no absolute path in it and needs nothing beside it, so ``cp -r`` moves one. It knows inputs and outputs by
position only: two models can share an artifact under different parameter names. Files that are not listed are ignored.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from pydantic import JsonValue, ValidationError

from vllm_neuron.abi import Abi
from vllm_neuron.cache import failpoint, verified
from vllm_neuron.cache.disk import file_digest, files
from vllm_neuron.cache.failpoint import Failpoint
from vllm_neuron.cache.key import FORMAT_VERSION, ArtifactKey, is_key
from vllm_neuron.cache.metadata import (
    COMPLETE_MARKER,
    MAX_MARKER_BYTES,
    MAX_METADATA_BYTES,
    METADATA_FILE,
    FileRecord,
    ForeignFormat,
    Metadata,
    first_problem,
    marker_of,
    parse_metadata,
)
from vllm_neuron.errors import CacheError, DamagedEntryError

MODULE_FILES = ("graph.mlir", "graph.hlo")


class EntryState(Enum):
    """See the table at the top of this module."""

    ABSENT = "absent"
    IN_PROGRESS = "in progress"
    COMPLETE = "complete"
    DAMAGED = "damaged"
    FOREIGN = "of another format version"


@dataclass(frozen=True)
class Entry:
    """A whole, verified entry at ``path``."""

    path: Path
    metadata: Metadata

    @property
    def key(self) -> str:
        """Its key, 32 hexadecimal digits."""
        return self.metadata.key

    @property
    def abi(self) -> Abi:
        """Inputs, outputs and aliases, by position."""
        return Abi.from_json(self.metadata.abi)

    @property
    def artifact_path(self) -> Path:
        """The compiled artifact."""
        return self.path / self.metadata.artifact_file

    @property
    def module_path(self) -> Path:
        """The module that was compiled."""
        return self.path / self.metadata.module_file


@dataclass(frozen=True)
class Examined:
    """What was found in a folder. ``metadata`` is there only when COMPLETE; ``reason`` only when it is not."""

    state: EntryState
    metadata: Metadata | None = None
    reason: str = ""


def write_entry(
    folder: Path,
    *,
    key: ArtifactKey,
    abi: Abi,
    required_features: Sequence[str] = (),
    provenance: Mapping[str, JsonValue] | None = None,
    compile_seconds: float = 0.0,
    peak_memory_bytes: int = 0,
) -> Metadata:
    """Turn a folder of files into an entry: every file to disk, then ``metadata.json``, then the marker.

    The folder holds one module (``graph.mlir`` or ``graph.hlo``), one artifact (any other file whose name starts with
    ``graph``), and whatever else is worth keeping. ``provenance`` holds plain values from which a miss is explained
    (model, bucket, versions, options); never names of parameters. Raises ``CacheError`` where the folder can't be an
    entry, ``OSError`` where it can't be written.
    """
    records = _records(folder)
    artifacts = [name for name in records if name.startswith("graph") and name not in MODULE_FILES]
    try:
        metadata = Metadata(
            format_version=FORMAT_VERSION,
            key=key.digest,
            key_parts=dict(key.parts),
            abi=abi.to_json(),
            module_file=_the_one(folder, [name for name in records if name in MODULE_FILES], "module"),
            artifact_file=_the_one(folder, artifacts, "artifact"),
            files=records,
            required_features=tuple(required_features),
            provenance=dict(provenance or {}),
            compile_seconds=compile_seconds,
            peak_memory_bytes=peak_memory_bytes,
        )
    except ValidationError as error:
        raise CacheError(f"{folder} can't be made an entry: {first_problem(error)}") from error
    _finish(folder, metadata)
    return metadata


def _finish(folder: Path, metadata: Metadata) -> None:
    data = metadata.to_json().encode()
    if len(data) > MAX_METADATA_BYTES:
        raise CacheError(f"the metadata in {folder} take {len(data)} bytes, at most {MAX_METADATA_BYTES} are allowed")
    failpoint.reached(Failpoint.FILES_LISTED)
    files.write_synced(folder / METADATA_FILE, data)
    failpoint.reached(Failpoint.METADATA_WRITTEN)
    files.write_synced(folder / COMPLETE_MARKER, marker_of(data))
    files.sync_folder(folder)
    failpoint.reached(Failpoint.MARKER_WRITTEN)


def _records(folder: Path) -> dict[str, FileRecord]:
    records = {}
    for path in sorted(folder.iterdir()):
        if path.name in (METADATA_FILE, COMPLETE_MARKER):
            raise CacheError(f"{folder} already has {path.name}; an entry is finished once")
        try:
            with files.open_plain(path) as file:
                os.fsync(file.fileno())
                size = os.fstat(file.fileno()).st_size
                records[path.name] = FileRecord(size=size, digest=file_digest.of_file(file.fileno()))
        except files.NotAsExpected as problem:
            raise CacheError(f"{folder} can't be made an entry: {problem}") from problem
    return records


def _the_one(folder: Path, names: list[str], what: str) -> str:
    if len(names) != 1:
        raise CacheError(f"{folder} has {len(names)} files that could be its {what}; an entry has exactly one")
    return names[0]


def read_entry(path: Path, key: str) -> Entry:
    """The entry of ``key`` at ``path``, every digest verified (once per process, while its files stay the same).

    Raises ``DamagedEntryError`` where it is damaged, ``CacheError`` where it is not whole for another reason, and
    ``OSError`` where the file system fails.
    """
    found = examine(path, key)
    if found.metadata is not None:
        return Entry(path, found.metadata)
    kind = DamagedEntryError if found.state is EntryState.DAMAGED else CacheError
    raise kind(f"the cache entry {path} is {found.state.value}: {found.reason}")


def examine(path: Path, key: str, *, digests: bool = True) -> Examined:
    """The state of ``path`` as the entry of ``key``. ``digests=False`` looks at names and sizes only.

    Raises ``OSError`` where the file system fails or refuses: that says nothing about the entry.
    """
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return Examined(EntryState.ABSENT, reason="there is no such folder")
    except OSError:
        if stat.S_ISDIR(path.lstat().st_mode):
            raise
        return Examined(EntryState.DAMAGED, reason="it is not a folder but a file or a symbolic link")
    try:
        return _examine_open(folder, key, digests)
    except files.NotAsExpected as problem:
        return Examined(EntryState.DAMAGED, reason=str(problem))
    finally:
        os.close(folder)


def _examine_open(folder: int, key: str, digests: bool) -> Examined:
    try:
        marker = files.read_small(COMPLETE_MARKER, MAX_MARKER_BYTES, folder)
    except FileNotFoundError:
        return Examined(EntryState.IN_PROGRESS, reason=f"it has no {COMPLETE_MARKER}")
    try:
        data = files.read_small(METADATA_FILE, MAX_METADATA_BYTES, folder)
    except FileNotFoundError as error:
        raise files.NotAsExpected(f"{METADATA_FILE} is missing") from error
    if marker != marker_of(data):
        raise files.NotAsExpected(f"{COMPLETE_MARKER} does not hold the digest of {METADATA_FILE}")
    try:
        metadata = parse_metadata(data, key)
    except ForeignFormat as problem:
        return Examined(EntryState.FOREIGN, reason=str(problem))
    verified.check_files(folder, metadata, marker, digests=digests)
    return Examined(EntryState.COMPLETE, metadata)


def complete_keys(root: Path) -> list[str]:
    """Keys of the entries below ``root`` that claim to be complete, sorted. Nothing is verified."""
    return sorted(path.name for path in root.iterdir() if is_key(path.name) and (path / COMPLETE_MARKER).exists())
