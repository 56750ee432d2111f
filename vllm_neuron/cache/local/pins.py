"""Pins: which entries running processes use, so that none is removed under them.

A process lists its entries once per start, in ``.in-use/<random>.keys`` beside a lock that it holds until it ends.
While it starts, and has not listed them yet, it may use any.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from vllm_neuron.cache.disk import files, folders
from vllm_neuron.cache.disk.lock import KernelLock
from vllm_neuron.cache.disk.scratch import sweep
from vllm_neuron.cache.key import is_key
from vllm_neuron.cache.local.tier import LocalTier

logger = logging.getLogger("vllm.neuron.cache")

FOLDER = "in-use"
_LOCK, _KEYS = ".lock", ".keys"


class Pin:
    """Says that this process uses entries of a local tier: any, until ``restrict`` has said which.

    What dead processes have left in the tier is removed on this occasion: a hit does not look for it. Where nothing
    can be written nothing is said.
    """

    def __init__(self, local: LocalTier) -> None:
        self._lock: KernelLock | None = None
        folder = local.shared_folder(FOLDER) if local.writable else None
        if folder is None:
            return
        try:
            sweep(local.root / ".staging")
            _remove_dead(folder)
            lock = KernelLock(folder / f"{secrets.token_hex(8)}{_LOCK}", folders.mode_of(folder) & 0o666)
            if lock.try_acquire():
                self._lock = lock
        except OSError as error:
            logger.debug("What this process uses can't be listed in %s: %s", folder, error)

    def restrict(self, keys: Iterable[str]) -> None:
        """This process uses ``keys``, and no others."""
        if self._lock is None:
            return
        path = self._lock.path.with_suffix(_KEYS)
        try:
            with files.replacing(path) as aside:
                aside.write_text("".join(f"{key}\n" for key in sorted(set(keys))))
        except OSError as error:
            logger.debug("What this process uses can't be listed in %s: %s", path, error)

    def close(self) -> None:
        """This process uses nothing any more. Its end says the same."""
        if self._lock is not None:
            _remove(self._lock)
            self._lock = None


def pinned(local: LocalTier) -> set[str] | None:
    """Keys that running processes use; None where one is just starting, and may use any."""
    folder = local.root / f".{FOLDER}"
    if not folder.is_dir():
        return set()
    _remove_dead(folder)
    keys: set[str] = set()
    for path in folder.glob(f"*{_LOCK}"):
        try:
            keys.update(key for key in path.with_suffix(_KEYS).read_text().split() if is_key(key))
        except FileNotFoundError:
            if path.exists():
                return None
    return keys


def _remove_dead(folder: Path) -> None:
    """Remove the lists of processes that are dead: their locks can be had."""
    for path in folder.glob(f"*{_LOCK}"):
        lock = KernelLock(path)
        with suppress(OSError):
            if lock.try_acquire():
                _remove(lock)
        lock.release()


def _remove(lock: KernelLock) -> None:
    # The lock goes last, and while it is held: as long as anything is left, the next one can tell that we are dead.
    with suppress(OSError):
        for path in (*lock.path.parent.glob(f".{lock.path.stem}.*"), lock.path.with_suffix(_KEYS)):
            path.unlink(missing_ok=True)
        lock.path.unlink()
    lock.release()
