"""The level of our loggers, and where their lines go in a process that has not set up logging."""

from __future__ import annotations

import contextlib
import logging

from vllm_neuron import envs
from vllm_neuron.errors import ConfigError

_LOGGER = logging.getLogger("vllm.neuron")


def set_level() -> None:
    """Log what the variable asks for.

    vLLM's handlers print it where vLLM has set them up; it does so while it makes its configuration, and this is to be
    called again after that. Elsewhere, in a process whose user set the variable and no handler, it goes to standard
    error. A bad value changes nothing: it is reported when the environment is checked.
    """
    with contextlib.suppress(ConfigError):
        _LOGGER.setLevel(envs.LOG_LEVEL.get())
        if not envs.LOG_LEVEL.is_set():
            return
        # vLLM's own level is also that of its handlers, of which ours may be less severe. Its loggers keep it.
        for handler in logging.getLogger("vllm").handlers:
            handler.setLevel(min(handler.level, _LOGGER.level))
        if not _LOGGER.hasHandlers():
            logging.basicConfig(format="%(levelname)s %(asctime)s [%(name)s] %(message)s", datefmt="%m-%d %H:%M:%S")
