"""One line for an architecture whose class vLLM could not import to look at it.

Checked on vLLM 0.32.0 and 0.33.0; can go when vLLM logs the reason without the tracebacks.
"""

from __future__ import annotations

import logging

_LOGGER = "vllm.model_executor.models.registry"


def shorten_inspection_errors() -> None:
    """vLLM logs two tracebacks, one of them of another process. What they end with is the reason."""
    logging.getLogger(_LOGGER).addFilter(_in_one_line)


def _in_one_line(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if error is not None and not logging.getLogger("vllm.neuron").isEnabledFor(logging.DEBUG):
        reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {reason[0]}", (), None
    return True
