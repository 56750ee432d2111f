"""What vLLM, pydantic, transformers and a model's code raise for what they do not take, as one line.

They raise anything, and not all of it can be sent by a capture worker.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from vllm_neuron import envs, logs
from vllm_neuron.errors import CaptureError, ConfigError, NeuronError

logger = logging.getLogger("vllm.neuron.job")


@contextmanager
def in_one_line(refused: Callable[[Exception], NeuronError]) -> Iterator[None]:
    """Raises what ``refused`` makes of whatever is raised inside; a :class:`NeuronError` is one line already."""
    try:
        yield
    except NeuronError:
        raise
    except Exception as error:
        raise refused(error) from error


def refused_configuration(error: Exception) -> ConfigError:
    """The one line for what was raised while a configuration was made; of a ``ValidationError``, for each field."""
    logs.set_level()  # vLLM may have set up its handlers just now.
    logger.debug("Refused", exc_info=error)
    if isinstance(error, ValidationError):
        details = error.errors(include_url=False, include_context=False, include_input=False)
        text = "; ".join(": ".join([*map(str, detail["loc"]), detail["msg"]]) for detail in details)
    else:
        text = str(error) or type(error).__name__
    return ConfigError(f"vLLM does not accept this configuration: {_line(text)}")


def refused_model(model: str, error: Exception) -> CaptureError:
    """The one line for what was raised while ``model`` was built; of an assertion that says nothing, its code."""
    text = str(error).rstrip(".")
    if not text:
        text = traceback.extract_tb(error.__traceback__)[-1].line or "no reason given"
    return CaptureError(
        f"vLLM could not build the model {model} from its configuration: {type(error).__name__}: {_line(text)}. "
        f"{envs.LOG_LEVEL.name}=DEBUG shows where"
    )


def _line(text: str) -> str:
    return " ".join(text.split())
