"""``vllm-neuron compare``: which route is right, where they are not of one mind."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated

import typer

from vllm_neuron import envs
from vllm_neuron.errors import ConfigError
from vllm_neuron.routes import Route, check_available
from vllm_neuron.targets import compile_target


def compare(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder or hub id, with weights.")],
    steps: Annotated[int, typer.Option("--steps", min=1, help="Tokens to decode in each bucket.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run MODEL by both routes and by eager PyTorch on the same inputs. Takes every option of `vllm serve`.

    Reports, per graph, the largest error of a logit and the first greedy token that differs from eager PyTorch's.
    Exits with 1 if one does.
    """
    # Of what is printed to standard output, nothing but the report is ours.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    # As it asks for this platform on a machine that has another one, too.
    os.environ[envs.TARGET_OVERRIDE.name] = envs.TARGET_OVERRIDE.get() or "cpu"
    # Its default is what the native route runs at; the comparison gives each route its own.
    os.environ.pop(envs.BACKEND.name, None)
    envs.check_environment()
    _check()
    # vLLM takes seconds to import: not for --help, nor for a mistake that can be told without it.
    from vllm_neuron.jobs.compare_routes import compare_routes

    report = compare_routes(model, context.args, steps)
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        report.print()
    sys.exit(report.exit_code)


def _check() -> None:
    """Raises :class:`ConfigError` where a route lacks its libraries, and for a target that does not run here."""
    for route in Route:
        check_available(route)
    target = compile_target()
    if not target.runs_here:
        raise ConfigError(
            f"graphs for {target.name} do not run on this machine, so there is nothing to compare: "
            "use a CPU target that this machine has"
        )
