"""Compile jobs from a command line: of ``vllm-neuron compile``, and of ``vllm serve`` in compile-only mode."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_neuron import envs
from vllm_neuron.cache.tiers import TieredCache
from vllm_neuron.compilers.base import check_compiler
from vllm_neuron.jobs.compile_only import compile_model
from vllm_neuron.jobs.report import JobReport
from vllm_neuron.model.checkpoint import check_dtype_known
from vllm_neuron.model.refusals import in_one_line, refused_configuration
from vllm_neuron.targets import resolve_target

try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ModuleNotFoundError:  # vLLM 0.33 has it elsewhere.
    from vllm.entrypoints.common.cli_args import make_arg_parser  # type: ignore[no-redef]

_USAGE = {"server": UsageContext.OPENAI_API_SERVER, "llm": UsageContext.LLM_CLASS}


def compile_for_targets(
    program: str, model: str, options: Sequence[str], targets: Sequence[str], entry_point: str
) -> JobReport:
    """Compile ``model`` with vLLM's command-line ``options`` for every target, one after the other.

    ``program`` is what the user called, for messages. A configuration is made per target, because sizes that vLLM
    derives from memory differ. Exits with 2 on an option that vLLM does not know; raises :class:`ConfigError` for a
    configuration that can't be served.
    """
    return compile_arguments(parse(program, model, options), targets, entry_point)


def parse(program: str, model: str, options: Sequence[str]) -> argparse.Namespace:
    """``model`` and ``options`` as vLLM's server reads them. Exits with 2 on an option that vLLM does not know.

    Raises :class:`ConfigError` for a configuration file that can't be read.
    """
    # vLLM's own usage is a list of three hundred options, and would hide the line that says which one is wrong.
    usage = f"{program} MODEL [its own options, and those of vllm serve; each has a --help]"
    parser = make_arg_parser(FlexibleArgumentParser(prog=program, usage=usage))  # type: ignore[no-untyped-call]
    with in_one_line(refused_configuration):
        arguments: argparse.Namespace = parser.parse_args([model, *options])
    return arguments


def compile_arguments(arguments: argparse.Namespace, targets: Sequence[str], entry_point: str) -> JobReport:
    """As :func:`compile_for_targets`, from arguments that vLLM's parser has read."""
    if arguments.model_tag is not None:
        arguments.model = arguments.model_tag
    start = time.monotonic()
    if not envs.strict():
        TieredCache.from_environment().check_publishable()
        for target in targets:
            check_compiler(resolve_target(target))
    reports = []
    for target in targets:
        os.environ[envs.TARGET_OVERRIDE.name] = target
        reports.append(compile_model(engine_config(arguments, entry_point)))
    report = JobReport(reports[0].model, [line for each in reports for line in each.graphs], reports[0].tiers)
    report.seconds = time.monotonic() - start
    return report


def engine_config(arguments: argparse.Namespace, entry_point: str) -> Any:
    """vLLM's configuration, as its server or ``LLM(...)`` would make it from these arguments.

    Raises :class:`ConfigError` for what vLLM refuses.
    """
    with in_one_line(refused_configuration):
        args = AsyncEngineArgs.from_cli_args(arguments)
        config = args.create_engine_config(_USAGE[entry_point])
    check_dtype_known(config, str(args.dtype))
    return config


def serve_command(arguments: argparse.Namespace) -> int:
    """What ``vllm serve`` does in compile-only mode: the job, its report on the terminal, and the exit code."""
    target = envs.TARGET_OVERRIDE.get()
    assert target is not None, "checked when the platform was handed the parser"
    report = compile_arguments(arguments, [target], "server")
    report.print()
    return report.exit_code
