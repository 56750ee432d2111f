"""Modes of files and folders, which are wishes: some file systems have none, as SMB and some FUSE ones."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

logger = logging.getLogger("vllm.neuron.cache")

# What a file system says of chmod for something that this process has just made, and so owns.
_NO_MODES = frozenset({errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})

_warned = False


def set_mode(made: Path | int, mode: int) -> None:
    """Give what this process has made, a path or an open file, ``mode``, where its file system has modes.

    Elsewhere it stays as the file system has made it, and the first time that is told in the log.
    """
    global _warned
    try:
        os.chmod(made, mode)  # noqa: PTH101 - of an open file too
    except OSError as error:
        if error.errno not in _NO_MODES:
            raise
        if not _warned:
            _warned = True
            where = str(made) if isinstance(made, Path) else "a lock"
            text = "Modes can't be set here (%s: %s): the file system decides who may read the cache."
            logger.warning(text, where, error.strerror)
