"""Failpoints: places at which a process can die, by name. What is to hold at each is tested by a kill there.

A whole entry or none is visible at every point, and what a dead process leaves is removed by the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum


class Failpoint(Enum):
    """The value says what has just been done, or is about to be."""

    # Compile
    LOCKED = "the lock of the key is ours"
    STAGED = "an empty folder for the entry is there"
    MODULE_WRITTEN = "the module is in it"
    COMPILING = "the compiler is about to be started"
    COMPILED = "the compiler has ended, the artifact is there"
    FILES_LISTED = "every file is on disk, and its digest is known"
    METADATA_WRITTEN = "metadata.json is on disk"
    MARKER_WRITTEN = "the completion marker is on disk"
    # Publish to a folder, local or remote
    OPENED_TO_READERS = "the files have the mode that they are to have"
    VERIFIED = "what is to be published is whole, and about to be renamed"
    TAKEN = "another entry has the name"
    RENAMED = "the entry has its name"
    SET_ASIDE = "what was not whole has been moved away"
    # Publish to a remote folder
    REMOTE_STAGED = "an empty folder in the remote tier is there"
    REMOTE_COPIED = "every file has been copied to it"
    # Publish to an object store
    UPLOADING = "the upload has its name, no file of it is there"
    UPLOADED_FILE = "a file has been uploaded"
    UPLOADED = "every file has been uploaded, the marker has not"
    MARKED = "the marker is there"
    # Fetch
    FOUND = "a remote tier has the entry"
    FETCHED_FILE = "a file has been fetched"
    FETCHED = "every file has been fetched"
    # Remove
    CHOSEN = "it is known which entries are to go"
    REMOVING = "an entry has been moved out of sight"
    PINS_READ_AGAIN = "nobody has begun to use it in the meantime"
    REMOVED = "an entry has been removed"
    # Remove from a remote tier
    HIDDEN = "an entry is out of sight, its files are there"
    REMOTE_REMOVED = "its files are gone"


_observer: Callable[[Failpoint], object] | None = None


def reached(point: Failpoint) -> None:
    """Say that this process has come to ``point``."""
    if _observer is not None:
        _observer(point)


def observe(observer: Callable[[Failpoint], object] | None) -> None:
    """Let ``observer`` be called at each failpoint of this process; None: nobody."""
    global _observer
    _observer = observer
