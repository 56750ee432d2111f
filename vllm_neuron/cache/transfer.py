"""Copying an entry between folders: every byte is hashed on its way, so what arrives is what was listed."""

from __future__ import annotations

from pathlib import Path

from vllm_neuron.cache import failpoint, trust
from vllm_neuron.cache.disk import files
from vllm_neuron.cache.disk.progress import Progress
from vllm_neuron.cache.failpoint import Failpoint
from vllm_neuron.cache.metadata import (
    COMPLETE_MARKER,
    MAX_ENTRY_BYTES,
    MAX_MARKER_BYTES,
    MAX_METADATA_BYTES,
    MAX_SIGNATURE_BYTES,
    METADATA_FILE,
    SIGNATURE_FILE,
    Metadata,
)
from vllm_neuron.cache.verified import trust_copy
from vllm_neuron.errors import DamagedEntryError


def copy_entry(
    source: Path,
    metadata: Metadata,
    into: Path,
    *,
    sync: bool = True,
    sign: bool = False,
    progress: Progress | None = None,
) -> int:
    """Copy the files of an entry into the empty folder ``into``, the marker last; return the bytes copied.

    Copies what ``metadata`` lists, and no more bytes of it. ``sync`` waits until all is on disk: not needed where what
    a loss of power takes can be fetched again. ``sign`` is for publishing: see ``trust``. Raises ``OSError``, or
    ``DamagedEntryError`` where a file is not as listed.
    """
    check_bounds(metadata, str(source))
    progress = progress or Progress()
    try:
        with files.folder(source) as folder:
            for name, record in metadata.files.items():
                found = files.copy_exactly(name, record.size, folder, into / name, sync=sync, progress=progress)
                if found != record.digest:
                    raise files.NotAsExpected(f"the digest of {name} is not the one in {METADATA_FILE}")
                failpoint.reached(Failpoint.FETCHED_FILE)
            data = files.read_small(METADATA_FILE, MAX_METADATA_BYTES, folder)
            marker = files.read_small(COMPLETE_MARKER, MAX_MARKER_BYTES, folder)
            signature = (signature_to_publish if sign else _signature)(metadata.key, data, folder)
    except files.NotAsExpected as problem:
        raise DamagedEntryError(f"the cache entry {source} is damaged: {problem}") from problem
    finish_copy(into, metadata, data, marker, signature, sync=sync)
    return metadata.size


def signature_to_publish(key: str, data: bytes, folder: int) -> bytes | None:
    """See ``trust.to_publish``."""
    return trust.to_publish(key, data, _signature(key, data, folder))


def _signature(key: str, data: bytes, folder: int) -> bytes | None:
    return files.read_if_there(SIGNATURE_FILE, MAX_SIGNATURE_BYTES, folder)


def check_bounds(metadata: Metadata, source: str) -> None:
    """Raise ``DamagedEntryError`` where an entry claims more bytes than any may have."""
    if metadata.size > MAX_ENTRY_BYTES:
        raise DamagedEntryError(
            f"the cache entry {source} claims {metadata.size} bytes, at most {MAX_ENTRY_BYTES} are allowed"
        )


def finish_copy(
    into: Path, metadata: Metadata, data: bytes, marker: bytes, signature: bytes | None, *, sync: bool
) -> None:
    """Write what describes an entry beside its files, which have been written and hashed by this process."""
    if signature is not None:
        files.write(into / SIGNATURE_FILE, signature, sync=sync)
    files.write(into / METADATA_FILE, data, sync=sync)
    files.write(into / COMPLETE_MARKER, marker, sync=sync)
    if sync:
        files.sync_folder(into)
    trust_copy(into, metadata, marker)
