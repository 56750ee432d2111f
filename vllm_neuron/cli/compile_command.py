"""``vllm-neuron compile`` and ``plan``: vLLM's own options, and where and for what to compile."""

from __future__ import annotations

import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_neuron import envs
from vllm_neuron.cache.tiers import TieredCache
from vllm_neuron.cli.keys import set_variable
from vllm_neuron.compilers.base import check_compiler, compiler_for
from vllm_neuron.errors import ConfigError, NeuronError
from vllm_neuron.model.checkpoint import check_model_folder
from vllm_neuron.targets import resolve_target

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}


class EntryPoint(StrEnum):
    """Whose defaults to take: the server's, or those of ``LLM(...)``."""

    SERVER = "server"
    LLM = "llm"


Model = Annotated[str, typer.Argument(help="Folder or hub id; its weights are not read.")]
Targets = Annotated[
    list[str] | None, typer.Option("--target", help="What to compile for; may be given several times. Default: cpu.")
]
Remote = Annotated[str | None, typer.Option("--remote", help="Remote tier to publish to.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; the log goes to standard error.")]
For = Annotated[EntryPoint, typer.Option("--for", help="Whose default sizes to take.")]


def compile_model(
    context: typer.Context,
    model: Model,
    target: Targets = None,
    remote: Remote = None,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Most compilers at once.")] = None,
    report: Annotated[Path | None, typer.Option("--report", help="Write a JSON report to this file.")] = None,
    as_json: AsJson = False,
    entry_point: For = EntryPoint.SERVER,
) -> None:
    """Compile every graph of MODEL without its weights, and publish them. Takes every option of `vllm serve`."""
    if report is not None:
        _check_report(report)
    set_variable(envs.REMOTE_CACHE, remote)
    set_variable(envs.COMPILE_WORKERS, workers)
    result = _run(context, model, target, entry_point, as_json=as_json)
    if report is not None:
        try:
            result.write(report)
        except OSError as error:
            raise NeuronError(f"The report can't be written: {error}") from error
    sys.exit(result.exit_code)


def plan(
    context: typer.Context,
    model: Model,
    target: Targets = None,
    remote: Annotated[str | None, typer.Option("--remote", help="Remote tier to look into.")] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Exit with 1 if a graph is missing: from the remote tiers, where there are any."),
    ] = False,
    as_json: AsJson = False,
    entry_point: For = EntryPoint.SERVER,
) -> None:
    """Show every graph of MODEL with its key, and whether a tier has it. Compiles nothing."""
    set_variable(envs.REMOTE_CACHE, remote)
    os.environ[envs.DISABLE_WARMUP_COMPILE.name] = "1"
    result = _run(context, model, target, entry_point, as_json=as_json)
    sys.exit(result.exit_code if check else 0)


def _check_report(path: Path) -> None:
    """Raises :class:`ConfigError` where no file can be written at ``path``: before anything is compiled."""
    if path.is_dir():
        raise ConfigError(f"--report {path} is a folder. Name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"--report {path}: there is no folder {path.parent}. Make it, or name a file elsewhere")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--report {path} can't be written by this user. Name a file elsewhere")


def _run(
    context: typer.Context, model: str, targets: list[str] | None, entry_point: EntryPoint, *, as_json: bool
) -> Any:
    """Run the job, print its report, and return it."""
    if as_json:
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # Standard output is for the report alone.
    os.environ[envs.CPU_COMPILE.name] = "1"
    targets = targets or [envs.TARGET_OVERRIDE.get() or "cpu"]
    os.environ[envs.TARGET_OVERRIDE.name] = targets[0]
    envs.check_environment()
    resolved = [resolve_target(target) for target in targets]
    check_model_folder(model)
    cache = TieredCache.from_environment()
    if not envs.strict():
        cache.check_publishable()
    for target in resolved:
        if not envs.strict():
            check_compiler(target)
        compiler_for(target).version()
    # vLLM takes seconds to import: not for --help, nor for a mistake that can be told without it.
    from vllm_neuron.jobs.command_line import compile_for_targets

    result = compile_for_targets(context.command_path, model, context.args, targets, entry_point.value)
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=2))
    else:
        result.print()
    return result
