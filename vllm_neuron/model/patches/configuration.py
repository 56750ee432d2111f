"""What is changed of how vLLM makes its configuration. Checked on vLLM 0.32.0 and 0.33.0."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from vllm_neuron.errors import ConfigError
from vllm_neuron.model.level import settle_level


def set_vllm_variables() -> None:
    """Settle what vLLM reads from variables, before it reads them.

    Its scheduler speaks the dialect of one runner or the other, and takes the second where its own GPU kernels are
    installed: ours is of the first kind. Can go when ``NeuronRunner`` follows the second, or vLLM asks its platform.
    A first start compiles everything, which takes longer than vLLM waits for an engine; a user's own value stays.
    """
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    os.environ.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", str(24 * 3600))


@functools.cache
def extend_configurations() -> None:
    """Settle the optimization level as a configuration is made, and raise our own refusals as they are.

    pydantic turns a ``ConfigError`` that one of the platform's hooks raises into four lines about types and a web page.
    That can go when vLLM calls its platform outside of its validators; for the level, see ``level``.
    """
    from vllm.config import ModelConfig, VllmConfig

    setattr(ModelConfig, "__init__", _unwrapping(ModelConfig.__init__))  # noqa: B010
    setattr(VllmConfig, "__init__", _with_level(_unwrapping(VllmConfig.__init__)))  # noqa: B010


def _with_level(make: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(make)
    def make_with_level(*args: Any, **kwargs: Any) -> None:
        settle_level(kwargs)
        make(*args, **kwargs)

    return make_with_level


def _unwrapping(make: Callable[..., None]) -> Callable[..., None]:
    from pydantic import ValidationError

    @functools.wraps(make)
    def make_or_refuse(*args: Any, **kwargs: Any) -> None:
        try:
            make(*args, **kwargs)
        except ValidationError as error:
            causes = [detail.get("ctx", {}).get("error") for detail in error.errors()]
            ours = next((cause for cause in causes if isinstance(cause, ConfigError)), None)
            raise (ours or error) from None

    return make_or_refuse


def after_parsing(parser: Any, use: Callable[[Any], None]) -> None:
    """Call ``use`` with the arguments each time that vLLM's ``parser`` has read a command line.

    The platform is handed the parser before anything is parsed, and asked no more until the model has been looked at,
    which is late for a misspelt option. Can go when vLLM calls its platform with the arguments.
    """
    parse_known_args = parser.parse_known_args

    def parse_and_use(*args: Any, **kwargs: Any) -> Any:
        namespace, rest = parse_known_args(*args, **kwargs)
        use(namespace)
        return namespace, rest

    parser.parse_known_args = parse_and_use
