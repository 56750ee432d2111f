"""A user's mistake in one line from vLLM's own server command, where vLLM prints a traceback."""

from __future__ import annotations

import logging
import sys
import traceback
from types import FrameType, TracebackType

from vllm_neuron.model.refusals import refused_configuration

logger = logging.getLogger("vllm.neuron.command")

_ENGINE_FAILED = "Engine core initialization failed"  # What vLLM's server raises when its engine has ended.
# Functions of vLLM that raise for what a user has given, and do nothing else.
_OF_ARGUMENTS = ("parse_args", "validate_parsed_serve_args", "validate_api_server_args", "from_cli_args",
                 "create_engine_config")  # fmt: skip
_OF_SOCKETS = ("create_server_socket", "create_server_unix_socket")


def tell_in_one_line() -> None:
    """Have this process, which is vLLM's server, end with one line and exit status 2 at a user's mistake.

    An engine that did not start has told why in its own process: status 1, and a line that points there.
    """
    sys.excepthook = _tell


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    line = _mistake(error, [frame for frame, _ in traceback.walk_tb(trace)])
    if logger.isEnabledFor(logging.DEBUG) or not (line or _ENGINE_FAILED in str(error)):
        sys.__excepthook__(kind, error, trace)
        return
    if line:
        print(f"vllm: error: {line}", file=sys.stderr)
        raise SystemExit(2)
    print("vllm-neuron: error: the engine did not start; its own error is above", file=sys.stderr)


def _mistake(error: BaseException, frames: list[FrameType]) -> str | None:
    ours = {frame.f_code.co_name: frame for frame in frames if frame.f_globals.get("__name__", "").startswith("vllm.")}
    if isinstance(error, OSError):
        for frame in (ours[name] for name in _OF_SOCKETS if name in ours):
            given = frame.f_locals
            place = "{}:{}".format(*given["addr"]) if "addr" in given else given.get("path")
            reason = error.strerror or error
            return f"the server can't listen on {place}: {reason}. Choose another --port, --host or --uds"
    if isinstance(error, Exception) and any(name in ours for name in _OF_ARGUMENTS):
        return str(refused_configuration(error))
    return None
