"""What vLLM, pydantic and transformers raise for a value that they do not take, as one line."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from vllm_neuron import logs
from vllm_neuron.errors import ConfigError, NeuronError

logger = logging.getLogger("vllm.neuron.job")


@contextmanager
def refusals_in_one_line() -> Iterator[None]:
    """Raises :class:`ConfigError` for whatever is raised inside: they raise anything, and it is the user's."""
    try:
        yield
    except NeuronError:
        raise
    except Exception as error:
        logs.set_level()  # vLLM may have set up its handlers just now.
        logger.debug("Refused", exc_info=True)
        raise refused(error) from error


def refused(error: Exception) -> ConfigError:
    """The one line for what was raised while a configuration was made."""
    return ConfigError(f"vLLM does not accept this configuration: {_reason(error)}")


def _reason(error: Exception) -> str:
    """One line; of a ``ValidationError``, each field and what is wrong with it."""
    if isinstance(error, ValidationError):
        details = error.errors(include_url=False, include_context=False, include_input=False)
        text = "; ".join(": ".join([*map(str, detail["loc"]), detail["msg"]]) for detail in details)
    else:
        text = str(error) or type(error).__name__
    return " ".join(text.split())
