"""Places for compilers on a host: so many at once, and one that has them all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from filelock import FileLock, Timeout

from vllm_neuron.compile.admission import compile_slot, every_slot


class Holder:
    """A thread that takes a place, and keeps it until it is told to give it back."""

    def __init__(self, place: Callable[[], AbstractContextManager[None]]) -> None:
        self.has_it, self.give_back = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._hold, args=(place,), daemon=True)
        self.thread.start()

    def _hold(self, place: Callable[[], AbstractContextManager[None]]) -> None:
        with place():
            self.has_it.set()
            self.give_back.wait(60)

    def end(self) -> None:
        self.give_back.set()
        self.thread.join(60)


def held(lock: Path) -> bool:
    probe = FileLock(lock)
    try:
        probe.acquire(blocking=False)
    except Timeout:
        return True
    probe.release()
    return False


def test_one_that_is_to_be_alone_waits_for_all_and_holds_off_the_rest(tmp_path: Path) -> None:
    first, second = (Holder(lambda: compile_slot(tmp_path, 2)) for _ in range(2))
    assert first.has_it.wait(60)
    assert second.has_it.wait(60)
    alone = Holder(lambda: every_slot(tmp_path))
    first.end()
    while not held(tmp_path / "gate.lock"):
        time.sleep(0.01)
    # It waits for the second, and the place that is free is not to be had.
    late = Holder(lambda: compile_slot(tmp_path, 2))
    assert not alone.has_it.is_set()
    second.end()
    assert alone.has_it.wait(60)
    assert not late.has_it.is_set()
    alone.end()
    assert late.has_it.wait(60)
    late.end()


def test_two_that_are_to_be_alone_take_turns(tmp_path: Path) -> None:
    with compile_slot(tmp_path, 2):
        pass
    one, other = Holder(lambda: every_slot(tmp_path)), Holder(lambda: every_slot(tmp_path))
    while not (one.has_it.is_set() or other.has_it.is_set()):
        time.sleep(0.01)
    assert one.has_it.is_set() != other.has_it.is_set()
    one.give_back.set()
    other.give_back.set()
    assert one.has_it.wait(60)
    assert other.has_it.wait(60)
    one.end()
    other.end()


def test_nothing_is_bounded_where_nothing_is_shared() -> None:
    with compile_slot(None, 1), compile_slot(None, 1), every_slot(None):
        pass
