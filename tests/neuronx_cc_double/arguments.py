"""The command line of ``neuronx-cc compile``, as far as it is public."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

TARGETS = ("trn1", "inf2", "trn1n", "trn2", "trn3")
_ONE_CORE = ("trn1", "trn1n", "inf2")


def parse(argv: Sequence[str], targets: Sequence[str] = TARGETS) -> argparse.Namespace:
    """The arguments after ``compile``. Exits with 2, and a line that says why, on one that it does not know."""
    parser = argparse.ArgumentParser(prog="neuronx-cc", add_help=False)
    parser.add_argument("module", type=_module)
    parser.add_argument("--framework", required=True, type=_one_of("XLA"))
    parser.add_argument("--target", required=True, type=_one_of(*targets))
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--logfile", type=Path, default=Path("log-neuron-cc.txt"))
    parser.add_argument("--model-type", type=_one_of("generic", "transformer", "unet-inference"), default="generic")
    parser.add_argument("--auto-cast", type=_one_of("none", "matmult", "all"), default="none")
    parser.add_argument("--auto-cast-type", type=_one_of("bf16", "fp16", "tf32", "fp8_e4m3"), default="bf16")
    parser.add_argument("--lnc", "--logical-nc-config", type=_one_of("1", "2"))
    parser.add_argument("--optlevel", "-O", type=_one_of("1", "2", "3"), default="2")
    parser.add_argument("--verbose", type=_one_of("debug", "info", "warning", "error", "critical"), default="warning")
    parser.add_argument("--enable-saturate-infinity", action="store_true")
    parser.add_argument("--enable-mixed-precision-accumulation", action="store_true")
    parser.add_argument("--internal-hlo2tensorizer-options", default="")
    return parser.parse_args(argv)


def bad_logical_cores(arguments: argparse.Namespace) -> bool:
    """Whether the target does not have that many physical cores in a logical one."""
    return arguments.target in _ONE_CORE and arguments.lnc == "2"


def _one_of(*choices: str) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in choices:
            # The real one's words, which do not put the value between quotes.
            raise argparse.ArgumentTypeError(f"invalid choice: {value} (choose from {', '.join(choices)})")
        return value

    return check


def _module(value: str) -> Path:
    if not Path(value).is_file():
        raise argparse.ArgumentTypeError(f"no such file: {value}")
    if Path(value).suffix not in (".mlir", ".hlo", ".pb"):
        raise argparse.ArgumentTypeError(f"not the name of a module: {value}")
    return Path(value)
