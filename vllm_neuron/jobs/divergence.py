"""The same steps through several executors, and how far their logits, and so their greedy tokens, are apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_neuron.execute.base import GraphExecutor
from vllm_neuron.execute.batch import Requests, StepBuilder
from vllm_neuron.model.buckets import Bucket

_SEED = 0


@dataclass(frozen=True)
class Sizes:
    """What bounds the steps: ``blocks`` of ``block_size`` tokens each, the first one of which is the null block."""

    blocks: int
    block_size: int
    max_len: int
    vocab_size: int

    @classmethod
    def of(cls, vllm_config: Any, blocks: int) -> Sizes:
        """Those of a configuration."""
        model = vllm_config.model_config
        return cls(blocks, vllm_config.cache_config.block_size, model.max_model_len, model.get_vocab_size())

    def pages(self, tokens: int) -> int:
        """Blocks that hold that many tokens."""
        return -(-tokens // self.block_size)


@dataclass(frozen=True)
class Difference:
    """The first place where a greedy token is another. ``margin`` is what the reference's logits tell the two by."""

    step: int
    sequence: int
    expected: int
    found: int
    margin: float


@dataclass(frozen=True)
class BucketResult:
    """One bucket by one route. ``tokens`` were compared; ``max_error`` is the largest difference of a logit."""

    bucket: str
    route: str
    tokens: int
    max_error: float
    difference: Difference | None


class Comparison:
    """Runs every bucket of a model on random tokens, from an empty context to a full one.

    ``reference`` chooses the tokens that follow, so that all executors get the same inputs whatever they would have
    chosen themselves. Each has KV caches of its own.
    """

    def __init__(
        self,
        sizes: Sizes,
        buckets: Sequence[Bucket],
        reference: GraphExecutor,
        others: Mapping[str, GraphExecutor],
        steps: int,
    ) -> None:
        self._sizes, self._buckets = sizes, list(buckets)
        self._reference, self._others, self._steps = reference, others, steps

    def run(self) -> Iterator[BucketResult]:
        """The results of each bucket, route by route, as they come."""
        for bucket in self._buckets:
            tallies = {route: _Tally() for route in self._others}
            (self._prefill if bucket.kind == "prefill" else self._decode)(bucket, tallies)
            for route, tally in tallies.items():
                yield BucketResult(bucket.name, route, tally.tokens, tally.max_error, tally.difference)

    def _prefill(self, bucket: Bucket, tallies: dict[str, _Tally]) -> None:
        requests = self._requests(rows=1, shared=self._sizes.pages(self._sizes.max_len), own=0)
        count = min(bucket.tokens, self._sizes.max_len)
        chosen, inputs = StepBuilder([bucket], self._sizes.block_size).prefill(requests, 0, 0, count)
        self._step(chosen, inputs, 1, tallies)

    def _decode(self, bucket: Bucket, tallies: dict[str, _Tally]) -> None:
        """Sequences that begin with the same tokens, as many as the smaller contexts hold, and then part."""
        shorter = [
            other.context for other in self._buckets if other.kind == "decode" and other.context < bucket.context
        ]
        shared = min(
            max([1, *(size // self._sizes.block_size for size in shorter)]), self._sizes.pages(bucket.context) - 1
        )
        start = shared * self._sizes.block_size
        steps = min(self._steps, bucket.context - start)
        own = self._sizes.pages(steps)
        rows = min(bucket.seqs, (self._sizes.blocks - 1 - shared) // own)
        requests = self._requests(rows, shared, own)
        self._fill_context(requests, start)
        builder = StepBuilder([bucket], self._sizes.block_size)
        for position in range(start, start + steps):
            chosen, inputs = builder.decode(requests, np.arange(rows), np.full(rows, position))
            tokens = self._step(chosen, inputs, rows, tallies)
            if position + 1 < self._sizes.max_len:
                requests.token_ids[:, position + 1] = tokens

    def _fill_context(self, requests: Requests, count: int) -> None:
        builder = StepBuilder(self._buckets, self._sizes.block_size)
        start = 0
        while start < count:
            chunk = min(count - start, builder.table.largest_prefill)
            bucket, inputs = builder.prefill(requests, 0, start, chunk)
            self._step(bucket, inputs, 1, {})
            start += chunk

    def _step(self, bucket: Bucket, inputs: Any, rows: int, tallies: dict[str, _Tally]) -> Any:
        """Run one step everywhere; the tokens that the reference chooses."""
        expected = self._reference.run(bucket, inputs)[:rows].float()
        for route, executor in self._others.items():
            found = executor.run(bucket, inputs)[:rows].float()
            if route in tallies:
                tallies[route].add(expected, found)
        return expected.argmax(-1).numpy()

    def _requests(self, rows: int, shared: int, own: int) -> Requests:
        """Random tokens, over blocks of which all requests share the first ``shared`` and have ``own`` each."""
        tokens = np.random.default_rng(_SEED).integers(0, self._sizes.vocab_size, (rows, self._sizes.max_len))
        blocks = np.zeros((rows, self._sizes.pages(self._sizes.max_len)), np.int64)
        blocks[:, :shared] = 1 + np.arange(shared)
        blocks[:, shared : shared + own] = 1 + shared + np.arange(rows * own).reshape(rows, own)
        return Requests(tokens, blocks)


class _Tally:
    def __init__(self) -> None:
        self.tokens = self.step = 0
        self.max_error = 0.0
        self.difference: Difference | None = None

    def add(self, expected: torch.Tensor, found: torch.Tensor) -> None:
        """Logits [sequences, vocabulary] of one step, from the reference and from the executor under test."""
        self.tokens += len(expected)
        # A NaN on one side only is as far off as can be.
        error = torch.where(expected.isnan() & found.isnan(), 0.0, (expected - found).abs())
        self.max_error = max(self.max_error, float(error.nan_to_num(nan=math.inf, posinf=math.inf).max()))
        other = (expected.argmax(-1) != found.argmax(-1)).nonzero().flatten().tolist()
        if other and self.difference is None:
            row = other[0]
            right, wrong = int(expected[row].argmax()), int(found[row].argmax())
            margin = float(expected[row, right] - expected[row, wrong])
            self.difference = Difference(self.step, row, right, wrong, margin)
        self.step += 1
