"""The level of our loggers, and where their lines go in a process that has not set up logging."""

from __future__ import annotations

import contextlib
import logging

from vllm_neuron import envs
from vllm_neuron.errors import ConfigError

_LOGGER = logging.getLogger("vllm.neuron")


def set_level() -> None:
    """Log what the variable asks for.

    vLLM's handlers print it where vLLM is imported. Elsewhere, in a process whose user set the variable and no handler,
    it goes to standard error. A bad value changes nothing: it is reported when the environment is checked.
    """
    with contextlib.suppress(ConfigError):
        _LOGGER.setLevel(envs.LOG_LEVEL.get())
        if envs.LOG_LEVEL.is_set() and not _LOGGER.hasHandlers():
            logging.basicConfig(format="%(levelname)s %(asctime)s [%(name)s] %(message)s", datefmt="%m-%d %H:%M:%S")
