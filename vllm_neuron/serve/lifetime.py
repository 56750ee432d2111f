"""How a server and its engine end: when told to while they start, and never one alone."""

from __future__ import annotations

import atexit
import functools
import gc
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar

from vllm_neuron.errors import NeuronError
from vllm_neuron.serve import patches

logger = logging.getLogger("vllm.neuron.lifetime")

GRACE_SECONDS = 5.0

P = ParamSpec("P")
T = TypeVar("T")


def mind_the_server() -> None:
    """Make vLLM's server end at SIGTERM and SIGINT while it starts, and with status 1 when its engine dies later.

    vLLM turns the signals into a ``KeyboardInterrupt``, which the part of it that waits for the engine drops, so that
    they are lost. Nothing drops ``SystemExit``. Once the server is up, vLLM sets handlers that replace these. The
    parent of several API servers has handlers of its own, for good, and they raise ``SystemExit``. In any other
    program, such as one that makes an ``LLM``, signals and errors are left alone.
    """
    if multiprocessing.current_process().name.startswith("ApiServer_"):
        patches.drain_before_shutdown()
        free_at_exit()
        return
    present = signal.getsignal(signal.SIGTERM)
    module = getattr(present, "__module__", None) or ""
    if not module.startswith("vllm.entrypoints.") or threading.current_thread() is not threading.main_thread():
        return
    if getattr(present, "__qualname__", "").startswith("run_server."):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _stop)
        patches.fail_with_the_engine(module)
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


def _stop(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _wait_for_end(parent: Any) -> None:
    parent.join()
    logger.warning("The process that started this engine (%d) is gone: the engine ends too", parent.pid)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(1)
