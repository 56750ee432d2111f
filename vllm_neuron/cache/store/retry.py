"""Asking a store again that failed for a reason that may pass: a few times, a little later each time."""

from __future__ import annotations

import errno
import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from vllm_neuron.cache.disk.progress import Abandoned

logger = logging.getLogger("vllm.neuron.cache")

ATTEMPTS = 3
_FIRST_PAUSE_SECONDS = 0.2
_FACTOR = 4

_LASTING = frozenset({
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EISDIR,
    errno.EEXIST, errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG,
})  # fmt: skip

T = TypeVar("T")


def may_pass(error: BaseException) -> bool:
    """Whether the same call may succeed a little later."""
    return isinstance(error, OSError) and not isinstance(error, Abandoned) and error.errno not in _LASTING


def retried(call: Callable[[], T], what: str) -> T:
    """``call()``, up to three times as long as it raises an ``OSError`` that may pass. The last one is raised."""
    pause = _FIRST_PAUSE_SECONDS
    for left in reversed(range(ATTEMPTS)):
        try:
            return call()
        except OSError as error:
            if not left or not may_pass(error):
                raise
            logger.debug("%s failed (%s): asking again in %.1f s", what, error, pause)
        time.sleep(pause * random.uniform(0.5, 1.5))
        pause *= _FACTOR
    raise AssertionError("the last attempt returns or raises")
