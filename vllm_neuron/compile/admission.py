"""One bound per host on compilers that run at the same time, whatever the number of ranks, workers and servers.

A compiler process needs gigabytes. Each takes a slot first: a kernel lock on one of a few files that every process of
this user shares through the local tier. The kernel frees the slot when its holder ends, however it ends.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from vllm_neuron import envs
from vllm_neuron.cache.disk.lock import NO_LOCKS, KernelLock
from vllm_neuron.host.cpu import available_memory_bytes, usable_cores

_POLL_SECONDS = 0.05


def compile_workers(memory_per_compile: int) -> int:
    """How many compilers may run at once: the variable's number, bounded by this host's cores and memory."""
    by_memory = available_memory_bytes() // memory_per_compile
    return max(1, min(envs.COMPILE_WORKERS.get(), usable_cores(), by_memory))


@contextlib.contextmanager
def compile_slot(folder: Path | None, slots: int) -> Iterator[None]:
    """Hold one of ``slots`` places in ``folder`` while a compiler runs. Waits for one, fairly enough: in no order.

    ``folder`` is None where processes share nothing (a disabled or unwritable local tier): no bound is kept then.
    """
    if folder is None:
        yield
        return
    with contextlib.ExitStack() as held:
        with _gate(folder):
            held.enter_context(_free_slot(folder, slots))
        yield


@contextlib.contextmanager
def every_slot(folder: Path | None) -> Iterator[None]:
    """Hold all places in ``folder``: no other compiler of this user runs on this host meanwhile.

    Whoever waits at the gate holds no place, so the one who is past it gets all of them in the end.
    """
    if folder is None:
        yield
        return
    with contextlib.ExitStack() as held:
        held.enter_context(_gate(folder))
        for path in sorted(folder.glob("slot-*.lock")):
            held.enter_context(_one_of([path]))
        yield


def _gate(folder: Path) -> contextlib.AbstractContextManager[None]:
    """What everyone holds while they take their places, and lets nobody else take one meanwhile."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return _one_of([folder / "gate.lock"])


def _free_slot(folder: Path, slots: int) -> contextlib.AbstractContextManager[None]:
    return _one_of([folder / f"slot-{index}.lock" for index in range(slots)])


@contextlib.contextmanager
def _one_of(paths: Sequence[Path]) -> Iterator[None]:
    """Hold one of these locks, whichever is free first. Where there are no locks, as on some file systems, none."""
    locks = [KernelLock(path) for path in paths]
    try:
        while not any(_acquired(lock) for lock in locks):
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        for lock in locks:
            lock.release()


def _acquired(lock: KernelLock) -> bool:
    try:
        return lock.try_acquire()
    except OSError as error:
        if error.errno in NO_LOCKS:
            return True
        raise
