"""vLLM's command line: what is checked as it is parsed, and errors in one line with exit status 2."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_neuron import envs
from vllm_neuron.errors import ConfigError, NeuronError
from vllm_neuron.model.buckets import neuron_config
from vllm_neuron.model.checkpoint import check_model_folder
from vllm_neuron.model.patches.configuration import after_parsing
from vllm_neuron.serve.mistakes import tell_in_one_line

_parsed = False


def prepare(parser: Any) -> None:
    """Have arguments checked as soon as vLLM's parser has read them, and mistakes told in one line where it serves."""
    if _serves(parser):
        tell_in_one_line()

    def check(namespace: Any) -> None:
        global _parsed
        _parsed = True
        with refusing():
            envs.check_environment()
            neuron_config(getattr(namespace, "additional_config", None))
            if model := getattr(namespace, "model_tag", None) or getattr(namespace, "model", None):
                check_model_folder(model)
        if envs.CPU_COMPILE.get() and _serves(parser):
            raise SystemExit(_compile_instead(namespace))

    after_parsing(parser, check)


@contextmanager
def refusing() -> Iterator[None]:
    """A ``ConfigError`` inside ends a command with one line and exit status 2; a program's own call gets the error."""
    try:
        yield
    except ConfigError as error:
        if not _parsed:
            raise
        print(f"vllm: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def _serves(parser: Any) -> bool:
    """True for the parser of ``vllm serve`` or of the API server's module."""
    return parser.prog.split()[-1] == "serve" or Path(sys.argv[0]).parent.name in ("openai", "api_server")


def _compile_instead(arguments: Any) -> int:
    """The job that takes the server's place in compile-only mode. Returns the exit code."""
    # Imports most of vLLM, which a server that only parses its options need not wait for.
    from vllm_neuron.jobs.command_line import serve_command

    try:
        return serve_command(arguments)
    except NeuronError as error:
        print(f"vllm: error: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, ConfigError) else 1
