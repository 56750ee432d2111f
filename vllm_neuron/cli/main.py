"""The ``vllm-neuron`` command: parse, call, print."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

from vllm_neuron import __version__, logs
from vllm_neuron.cli import cache, compare_command, compile_command, doctor, start_report, targets
from vllm_neuron.errors import ConfigError, NeuronError

app = typer.Typer(
    name="vllm-neuron",
    help="Compile LLM graphs ahead of time, and look after the cache that they are kept in.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("compile", context_settings=compile_command.PASS_THROUGH)(compile_command.compile_model)
app.command("plan", context_settings=compile_command.PASS_THROUGH)(compile_command.plan)
app.command("compare", context_settings=compile_command.PASS_THROUGH)(compare_command.compare)
app.command("targets")(targets.show_targets)
app.command()(doctor.doctor)
app.command("start-report")(start_report.start_report)
app.add_typer(cache.app, name="cache")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main() -> None:
    """Console entry. Exit codes: 0 all there, 1 something is missing or failed, 2 bad arguments."""
    _open_closed_streams()
    logs.set_level()
    try:
        app()
    except ConfigError as error:
        fail(error, 2)
    except NeuronError as error:
        fail(error, 1)
    except OSError as error:
        # A full disk, and standard output may be on it: what is left to be written there is given up.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        fail(error, 1)


def _open_closed_streams() -> None:
    """Let a standard stream that the caller has closed lead nowhere: the next file to be opened would become it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115


def fail(error: Exception, code: int) -> None:
    """Print ``error`` as the one line that a user gets, and exit with ``code``."""
    typer.echo(f"vllm-neuron: error: {error}", err=True)
    sys.exit(code)
