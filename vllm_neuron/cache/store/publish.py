"""The one rule for publishing to a folder: written aside, verified, renamed; a loser uses what won."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from vllm_neuron.cache import failpoint
from vllm_neuron.cache.disk import files
from vllm_neuron.cache.entry import EntryState, Examined, examine, read_entry
from vllm_neuron.cache.failpoint import Failpoint
from vllm_neuron.errors import CacheError

_TAKEN = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})
ATTEMPTS = 16


def place(
    staged: Path,
    target: Path,
    key: str,
    set_aside: Callable[[Examined], object],
    is_acceptable: Callable[[Path], bool] = lambda path: True,
    *,
    sync: bool = True,
) -> bool:
    """Give the staged entry of ``key`` its name ``target``. True: ours landed. False: a whole one was there.

    What is at ``target`` and is not whole, or may not stay, is handed to ``set_aside``, which moves it away. Raises
    ``CacheError`` or ``DamagedEntryError`` where the staged entry is not whole, ``OSError`` where the file system
    refuses.
    """
    read_entry(staged, key)
    failpoint.reached(Failpoint.VERIFIED)
    for _ in range(ATTEMPTS):
        try:
            staged.rename(target)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
        else:
            failpoint.reached(Failpoint.RENAMED)
            if sync:
                files.sync_folder(target.parent)
            return True
        failpoint.reached(Failpoint.TAKEN)
        found = examine(target, key)
        if found.state is EntryState.COMPLETE and is_acceptable(target):
            return False
        if found.state is not EntryState.ABSENT:
            set_aside(found)
    raise CacheError(f"{target} can't be published: something that is not whole comes back in its place each time")


def move_out(target: Path, aside: Path, point: Failpoint, must_stay: Callable[[Path], bool]) -> bool:
    """Move what was found at ``target`` out of sight, to the new name ``aside``. True if that is where it is now.

    Between the look and the move someone may have put something else there, or begun to use it: ``must_stay`` is asked
    once more, of ``aside``, where nobody else finds it, and what must stay is put back.
    """
    try:
        target.rename(aside)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        # An overlay file system does not rename folders of a lower layer, such as those of a container's image.
        shutil.move(target, aside)
    failpoint.reached(point)
    if not must_stay(aside):
        return True
    with suppress(OSError):  # A third process may have published in the meantime. Then its entry stands.
        aside.rename(target)
    return False
