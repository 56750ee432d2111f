"""Extra arguments for neuronx-cc, as a user gives them: checked, and in the one form that goes into the key."""

from __future__ import annotations

import shlex

from vllm_neuron.errors import ConfigError

# What this package gives the compiler itself, and what to set instead.
_OURS = {
    "--target": "set the target with --target, or NEURON_PLATFORM_TARGET_OVERRIDE",
    "--framework": "it follows from the route",
    "--output": "it follows from the key",
    "-o": "it follows from the key",
    "--logfile": "the log is kept beside the artifact",
    "--model-type": "it is fixed",
    "--auto-cast": "it is fixed: a model is computed in its own dtype",
    "--lnc": "set NEURON_LOGICAL_NC_CONFIG",
    "--logical-nc-config": "set NEURON_LOGICAL_NC_CONFIG",
    "--optlevel": "set --optimization-level",
}
_LEVEL = "-O"


def canonical_arguments(given: object) -> tuple[str, ...]:
    """Arguments as one string, or as a list of strings: sorted by option, ``--name value`` as ``--name=value``.

    Arguments that mean the same have the same form, and so the same key. Raises ``ConfigError`` for another type, for
    a value without an option, for an option that comes twice and for one that this package sets.
    """
    options = _options(_words(given))
    names = [words[0].partition("=")[0] for words in options]
    for name in names:
        _refuse_ours(name)
        if names.count(name) > 1:
            raise ConfigError(f"compiler_args has {name} more than once: keep one")
    joined = [["=".join(words)] if len(words) == 2 and "=" not in words[0] else words for words in options]
    return tuple(word for words in sorted(joined) for word in words)


def _words(given: object) -> list[str]:
    if given is None:
        return []
    if isinstance(given, str):
        try:
            return shlex.split(given)
        except ValueError as error:
            raise ConfigError(f"compiler_args can't be split into words: {error}: {given!r}") from None
    if isinstance(given, list) and all(isinstance(word, str) and word for word in given):
        return list(given)
    raise ConfigError(
        f'compiler_args must be a string, or a list of strings, such as ["--verbose=info"], not {given!r}'
    )


def _options(words: list[str]) -> list[list[str]]:
    """Each option with the values that follow it."""
    options: list[list[str]] = []
    for word in words:
        if word.startswith("-"):
            options.append([word])
        elif not options:
            raise ConfigError(f"compiler_args must begin with an option, such as --verbose, not with {word!r}")
        else:
            options[-1].append(word)
    return options


def _refuse_ours(name: str) -> None:
    """The compiler takes any beginning of an option's name for the option."""
    if name.startswith(_LEVEL):
        raise ConfigError(f"compiler_args can't have {name}: set --optimization-level")
    for ours, instead in _OURS.items():
        if name == ours or (len(name) > 2 and ours.startswith(name)):
            raise ConfigError(f"compiler_args can't have {name}, which this package sets: {instead}")
