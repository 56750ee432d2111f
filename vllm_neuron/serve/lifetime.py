"""How a server and its engine end: when told to while they start, and never one without the other."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from typing import Any, NoReturn

logger = logging.getLogger("vllm.neuron.lifetime")

GRACE_SECONDS = 5.0


def stop_at_signals() -> None:
    """Make SIGTERM and SIGINT end vLLM's server while it starts.

    vLLM turns them into a ``KeyboardInterrupt``, which the part of it that waits for the engine drops, so that the
    signal is lost. Nothing drops ``SystemExit``. Once the server is up, vLLM sets handlers that replace these. In any
    other program, such as one that makes an ``LLM``, signals are left alone.
    """
    present = getattr(signal.getsignal(signal.SIGTERM), "__module__", None) or ""
    if present.startswith("vllm.entrypoints.") and threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _stop)


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
