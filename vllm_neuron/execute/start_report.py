"""Where the time of a start went, and where its graphs came from: in the log, and in a file for ``start-report``."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_neuron import envs
from vllm_neuron.cache.disk import files
from vllm_neuron.routes import current_route

logger = logging.getLogger("vllm.neuron.start")

_HANDED_DOWN = "_VLLM_NEURON_STARTED"
_MAX_BYTES = 1 << 20

BEFORE_WORKER = "before_worker"
"""From the start of the first process: imports, configuration and the engine's process."""


def note_process_start() -> None:
    """Hand the time at which the first process began to its children, who measure from there."""
    import psutil

    # A spawned child imports this module before multiprocessing has told it of its parent: its command line knows.
    spawned = "--multiprocessing-fork" in sys.orig_argv
    if multiprocessing.parent_process() is None and not spawned:
        os.environ[_HANDED_DOWN] = str(psutil.Process().create_time())


class StartClock:
    """Seconds per phase of the worker's own thread, in order; begins with what went before the worker."""

    def __init__(self) -> None:
        self._begun = float(os.environ.get(_HANDED_DOWN) or time.time())
        self.seconds: dict[str, float] = {BEFORE_WORKER: max(0.0, time.time() - self._begun)}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block; a name that comes again adds to what it has."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start

    def facts(self, vllm_config: Any, buckets: list[str], graphs: Mapping[str, Any]) -> dict[str, Any]:
        """All that is known of a start that has just become ready, as plain values."""
        return {
            "model": vllm_config.model_config.model,
            "route": current_route().value,
            "strict": envs.strict(),
            "buckets": buckets,
            **graphs,
            "seconds": {name: round(seconds, 3) for name, seconds in self.seconds.items()},
            "begun": datetime.fromtimestamp(self._begun, UTC).isoformat(timespec="seconds"),
            "total_seconds": round(time.time() - self._begun, 3),
        }


def log_start(facts: Mapping[str, Any]) -> None:
    """Log a breakdown for a person and one line of JSON for a program, and keep the facts as the last start's."""
    spent = ", ".join(f"{name.replace('_', ' ')} {seconds:.1f} s" for name, seconds in facts["seconds"].items())
    logger.info("Ready after %.1f s: %s", facts["total_seconds"], spent)
    logger.info("Start facts: %s", json.dumps(facts, separators=(",", ":")))
    path = report_path()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(path) as aside:
            aside.write_text(json.dumps(facts))


def report_path() -> Path:
    """Where the facts of the last start that became ready are."""
    return Path(envs.get_neuron_precompile_cache_dir()).with_name("last_start.json")


def last_start() -> dict[str, Any] | None:
    """The facts of the last start of this user on this machine; None where there was none, or they can't be read."""
    path = report_path()
    try:
        if path.stat().st_size > _MAX_BYTES:
            return None
        facts = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) else None
