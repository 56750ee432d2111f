"""The static shapes that are served: which buckets there are, and which one a step runs in."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, Literal

from vllm_neuron.compilers.arguments import canonical_arguments
from vllm_neuron.errors import ConfigError

SMALLEST_PREFILL = 128
CONTEXT_MULTIPLE = 128

PREFILL_OPTION = "num_batched_tokens_buckets"
DECODE_OPTION = "num_seqs_buckets"
CONTEXT_OPTION = "decode_context_length_buckets"
ARGUMENTS_OPTION = "compiler_args"
OPTIONS = (PREFILL_OPTION, DECODE_OPTION, CONTEXT_OPTION, ARGUMENTS_OPTION)


@dataclass(frozen=True)
class Bucket:
    """One static shape: ``seqs`` sequences of ``tokens`` query tokens each, over ``context`` tokens of KV context.

    A prefill bucket has one sequence, a decode bucket one token per sequence. ``limited`` says that ``context`` is
    one of ``decode_context_length_buckets`` and so below the model's limit.
    """

    kind: Literal["prefill", "decode"]
    tokens: int
    seqs: int
    context: int
    limited: bool = False

    @property
    def name(self) -> str:
        """Such as ``prefill_s128``, ``decode_b4``, ``decode_b4_c512``: in logs, reports and metrics."""
        if self.kind == "prefill":
            return f"prefill_s{self.tokens}"
        return f"decode_b{self.seqs}_c{self.context}" if self.limited else f"decode_b{self.seqs}"


def buckets_for(vllm_config: Any) -> list[Bucket]:
    """All buckets of a configuration: prefill ascending, then decode ascending by sequences and context.

    Raises ``ConfigError`` for an option under ``neuron_config`` that breaks a rule.
    """
    scheduler, max_len = vllm_config.scheduler_config, vllm_config.model_config.max_model_len
    options = neuron_config(vllm_config.additional_config)
    prefill = _prefill_sizes(options, scheduler.max_num_batched_tokens, max_len)
    decode = _decode_sizes(options, scheduler.max_num_seqs)
    contexts = _context_sizes(options, max_len)
    return [Bucket("prefill", tokens, 1, max_len) for tokens in prefill] + [
        Bucket("decode", 1, seqs, context, limited=context < max_len) for seqs in decode for context in contexts
    ]


def neuron_config(additional_config: Any) -> dict[str, Any]:
    """The ``neuron_config`` part of ``--additional-config``. Raises ``ConfigError`` for another type or unknown key."""
    config = additional_config.get("neuron_config") if isinstance(additional_config, dict) else None
    if config is None:
        return {}
    if not isinstance(config, dict):
        raise ConfigError(f"--additional-config: neuron_config must be an object, not {config!r}")
    for key in config:
        if key not in OPTIONS:
            near = get_close_matches(str(key), OPTIONS, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"neuron_config has no option {key!r}: {hint}The options are {', '.join(OPTIONS)}")
    canonical_arguments(config.get(ARGUMENTS_OPTION))
    return config


def compiler_arguments(additional_config: Any) -> tuple[str, ...]:
    """The user's arguments for neuronx-cc, in canonical form. Raises ``ConfigError`` where they can't be given."""
    return canonical_arguments(neuron_config(additional_config).get(ARGUMENTS_OPTION))


def powers_of_two(start: int, limit: int) -> list[int]:
    """``start``, twice that, and so on below ``limit``; then ``limit`` itself."""
    sizes = []
    while start < limit:
        sizes.append(start)
        start *= 2
    return [*sizes, limit]


def _prefill_sizes(options: dict[str, Any], limit: int, max_len: int) -> list[int]:
    if options.get(PREFILL_OPTION) is None:
        # No segment of a prompt is longer than the model's limit.
        return powers_of_two(SMALLEST_PREFILL, min(limit, max_len))
    return _ending_with(_sizes(options, PREFILL_OPTION), PREFILL_OPTION, limit, "max_num_batched_tokens")


def _decode_sizes(options: dict[str, Any], limit: int) -> list[int]:
    if options.get(DECODE_OPTION) is None:
        return powers_of_two(1, limit)
    return _ending_with(_sizes(options, DECODE_OPTION), DECODE_OPTION, limit, "max_num_seqs")


def _context_sizes(options: dict[str, Any], max_len: int) -> list[int]:
    if options.get(CONTEXT_OPTION) is None:
        return [max_len]
    sizes = _sizes(options, CONTEXT_OPTION)
    for size in sizes:
        if size % CONTEXT_MULTIPLE:
            raise ConfigError(f"{CONTEXT_OPTION} must be multiples of {CONTEXT_MULTIPLE}: {size} is not")
        if size >= max_len:
            raise ConfigError(
                f"{CONTEXT_OPTION} must be below max_model_len ({max_len}), which needs no entry: {size} is not"
            )
    return [*sizes, max_len]


def _sizes(options: dict[str, Any], option: str) -> list[int]:
    sizes = options[option]
    if not isinstance(sizes, list) or not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise ConfigError(f"{option} must be a list of positive integers, not {sizes!r}")
    if any(low >= high for low, high in pairwise(sizes)):
        raise ConfigError(f"{option} must be ascending, without repeats: {sizes}")
    return sizes


def _ending_with(sizes: list[int], option: str, limit: int, name: str) -> list[int]:
    if sizes[-1] != limit:
        raise ConfigError(
            f"The largest of {option} must equal {name} ({limit}), not {sizes[-1]}: "
            f"change the list, or set --{name.replace('_', '-')} {sizes[-1]}"
        )
    return sizes


class BucketTable:
    """Finds the smallest bucket that holds a step."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = list(buckets)
        self._prefill = sorted((b for b in buckets if b.kind == "prefill"), key=lambda b: b.tokens)
        self._tokens = [bucket.tokens for bucket in self._prefill]
        decode = [b for b in buckets if b.kind == "decode"]
        self._seqs = sorted({bucket.seqs for bucket in decode})
        self._contexts = sorted({bucket.context for bucket in decode})
        self._decode = {(bucket.seqs, bucket.context): bucket for bucket in decode}

    @property
    def largest_prefill(self) -> int:
        """Query tokens of the largest prefill bucket."""
        return self._tokens[-1]

    @property
    def largest_decode(self) -> int:
        """Sequences of the largest decode bucket."""
        return self._seqs[-1]

    def prefill(self, tokens: int) -> Bucket:
        """The smallest prefill bucket for ``tokens`` query tokens. Raises ``IndexError`` beyond the largest."""
        return self._prefill[bisect_left(self._tokens, tokens)]

    def decode(self, seqs: int, context: int) -> Bucket:
        """The smallest decode bucket for ``seqs`` sequences whose longest has ``context`` tokens, its new one included.

        Raises ``IndexError`` beyond the largest.
        """
        return self._decode[
            self._seqs[bisect_left(self._seqs, seqs)], self._contexts[bisect_left(self._contexts, context)]
        ]
