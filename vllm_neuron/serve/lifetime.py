"""How a server and its engine end: when told to while they start, with one clear error, and never one alone."""

from __future__ import annotations

import atexit
import functools
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, TypeVar

from vllm_neuron.errors import NeuronError

logger = logging.getLogger("vllm.neuron.lifetime")

GRACE_SECONDS = 5.0
_ENGINE_FAILED = "Engine core initialization failed"  # What vLLM's server raises when its engine has ended.

P = ParamSpec("P")
T = TypeVar("T")


def mind_the_start() -> None:
    """Make vLLM's server end at SIGTERM and SIGINT while it starts, and without a traceback when its engine fails.

    vLLM turns the signals into a ``KeyboardInterrupt``, which the part of it that waits for the engine drops, so that
    they are lost. Nothing drops ``SystemExit``. Once the server is up, vLLM sets handlers that replace these. In any
    other program, such as one that makes an ``LLM``, signals and errors are left alone.
    """
    present = getattr(signal.getsignal(signal.SIGTERM), "__module__", None) or ""
    if present.startswith("vllm.entrypoints.") and threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _stop)
        sys.excepthook = _point_to_the_reason
        free_at_exit()


def free_at_exit() -> None:
    """Free what vLLM, or this package, has frozen: else extension modules print pages about it, after the last line."""
    atexit.register(gc.unfreeze)


def ends_engine(step: Callable[P, T]) -> Callable[P, T]:
    """For a step of an engine's start. A :class:`NeuronError` is for the user, who is to see it, and nothing after it.

    In the process that vLLM made for the engine it is logged, and ends the process with status 1; raised, it would be
    printed three times between tracebacks. In a process of the user's own it is raised.
    """

    @functools.wraps(step)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return step(*args, **kwargs)
        except NeuronError as error:
            if not multiprocessing.current_process().name.startswith("EngineCore"):
                raise
            logger.error("%s", error)
            logger.debug("It was raised here", exc_info=True)
        raise SystemExit(1)

    return run


def end_with_parent() -> None:
    """End this process after the one that started it for its own use, however that one ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_wait_for_end, args=(parent,), name="neuron-parent", daemon=True).start()


def _point_to_the_reason(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if _ENGINE_FAILED not in str(error) or logger.isEnabledFor(logging.DEBUG):
        sys.__excepthook__(kind, error, trace)
        return
    print("vllm-neuron: error: the engine did not start; its own error is above", file=sys.stderr)


def _stop(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _wait_for_end(parent: Any) -> None:
    parent.join()
    logger.warning("The process that started this engine (%d) is gone: the engine ends too", parent.pid)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(1)
