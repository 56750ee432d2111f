"""Extra compiler arguments: one form for one meaning, and none that clash with ours."""

from __future__ import annotations

import pytest

from vllm_neuron.compilers.arguments import canonical_arguments
from vllm_neuron.errors import ConfigError


@pytest.mark.parametrize(
    "given",
    [
        "--verbose=info --auto-cast-type bf16 --enable-saturate-infinity",
        "--enable-saturate-infinity --verbose info   --auto-cast-type=bf16",
        ["--auto-cast-type", "bf16", "--enable-saturate-infinity", "--verbose=info"],
    ],
)
def test_what_means_the_same_has_one_form(given: object) -> None:
    assert canonical_arguments(given) == ("--auto-cast-type=bf16", "--enable-saturate-infinity", "--verbose=info")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ()),
        ("", ()),
        ([], ()),
        ("--internal-hlo2tensorizer-options='--verify-hlo=true --x'",
         ("--internal-hlo2tensorizer-options=--verify-hlo=true --x",)),
        ("--several one two", ("--several", "one", "two")),
        ("-v", ("-v",)),
    ],
)  # fmt: skip
def test_forms(given: object, expected: tuple[str, ...]) -> None:
    assert canonical_arguments(given) == expected


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--target trn1", "--target, which this package sets: set the target with --target"),
        ("--lnc=1", "--lnc, which this package sets: set NEURON_LOGICAL_NC_CONFIG"),
        ("--logical-nc-config 1", "set NEURON_LOGICAL_NC_CONFIG"),
        ("-O1", "can't have -O1: set --optimization-level"),
        ("-O 1", "can't have -O: set --optimization-level"),
        ("--optlevel=1", "set --optimization-level"),
        ("--auto-cast=all", "--auto-cast, which this package sets"),
        ("--targ trn1", "can't have --targ, which this package sets"),
        ("--output x", "can't have --output"),
        ("--verbose info --verbose=debug", "has --verbose more than once"),
        ("trn1", "must begin with an option, such as --verbose, not with 'trn1'"),
        ("--verbose 'info", "can't be split into words"),
        (7, "must be a string, or a list of strings"),
        (["--verbose", 7], "must be a string, or a list of strings"),
    ],
)
def test_refused(given: object, says: str) -> None:
    with pytest.raises(ConfigError, match=r"^compiler_args ") as caught:
        canonical_arguments(given)
    assert says in str(caught.value)
