"""What this process has verified: the digest of a file is taken once, for as long as the file stays the same.

An entry is known by its marker and by the identities of its files, so a file that is written again is read again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from vllm_neuron.cache.disk import file_digest, files
from vllm_neuron.cache.disk.recent import Recent
from vllm_neuron.cache.metadata import (
    COMPLETE_MARKER,
    MAX_MARKER_BYTES,
    MAX_METADATA_BYTES,
    METADATA_FILE,
    Metadata,
    parse_metadata,
)

_State: TypeAlias = tuple[bytes, tuple[files.Identity, ...]]
"""The marker of an entry, and the identities of its files."""

_verified: Recent[_State, None] = Recent(4096)


def check_files(folder: int, metadata: Metadata, marker: bytes, *, digests: bool) -> None:
    """Raise ``NotAsExpected`` unless every listed file is there, with its size and, if asked for, its digest."""
    state = marker, _identities(folder, metadata)
    if not digests or state in _verified:
        return
    for name, record in metadata.files.items():
        with files.open_plain(name, folder) as file:
            if file_digest.of_file(file.fileno()) != record.digest:
                raise files.NotAsExpected(f"the digest of {name} is not the one in {METADATA_FILE}")
    _verified[state] = None


def trust_copy(folder: Path, metadata: Metadata, marker: bytes) -> None:
    """Note that this process has just written the files in ``folder``, and seen that each has its digest."""
    with files.folder(folder) as descriptor:
        _verified[marker, _identities(descriptor, metadata)] = None


@contextmanager
def still_trusted(folder: Path, key: str) -> Iterator[None]:
    """What was verified of the entry in ``folder`` need not be read again because modes of files change inside."""
    before = _state_of(folder, key)
    yield
    after = _state_of(folder, key)
    if before in _verified and before is not None and after is not None and _but_ctime(before) == _but_ctime(after):
        _verified[after] = None


def forget() -> None:
    """Let every file be verified again, as in a new process."""
    _verified.clear()


def _identities(folder: int, metadata: Metadata) -> tuple[files.Identity, ...]:
    return tuple(files.check_size(name, record.size, folder) for name, record in metadata.files.items())


def _state_of(folder: Path, key: str) -> _State | None:
    """How ``_verified`` knows the entry in ``folder``; None for what is no entry."""
    try:
        with files.folder(folder) as descriptor:
            marker = files.read_small(COMPLETE_MARKER, MAX_MARKER_BYTES, descriptor)
            metadata = parse_metadata(files.read_small(METADATA_FILE, MAX_METADATA_BYTES, descriptor), key)
            return marker, _identities(descriptor, metadata)
    except (OSError, files.NotAsExpected):
        return None


def _but_ctime(state: _State) -> tuple[bytes, list[tuple[int, ...]]]:
    return state[0], [identity[:-1] for identity in state[1]]
