"""From requests to the step inputs of a bucket: positions, slots and block tables, without a loop over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_neuron.execute.base import Inputs, staging
from vllm_neuron.model.buckets import Bucket, BucketTable

Ints = npt.NDArray[np.integer]


@dataclass(frozen=True)
class Requests:
    """Views of the running requests' state, one row per request.

    token_ids: [requests, max_model_len]; block_tables: [requests, at least max_model_len / block_size].
    """

    token_ids: Ints
    block_tables: Ints


class StepBuilder:
    """Fills persistent arrays, one set per bucket. Padding is zeros: token 0, at position 0, in the null block."""

    def __init__(self, buckets: Sequence[Bucket], block_size: int) -> None:
        self.table = BucketTable(buckets)
        self.block_size = block_size
        self._staging = {bucket: staging(bucket, block_size) for bucket in buckets}

    def decode(self, requests: Requests, rows: Ints, positions: Ints) -> tuple[Bucket, Inputs]:
        """One token each of the requests ``rows`` at ``positions``. A row may occur more than once."""
        count = len(rows)
        bucket = self.table.decode(count, int(positions.max()) + 1)
        inputs = self._staging[bucket]
        blocks = inputs["block_tables"]
        blocks[:count] = requests.block_tables[rows, : blocks.shape[1]]
        blocks[count:] = 0
        self._fill(
            inputs, requests.token_ids[rows, positions], positions, blocks[np.arange(count), self._page(positions)]
        )
        inputs["logits_indices"][:] = np.arange(bucket.seqs)
        return bucket, inputs

    def prefill(self, requests: Requests, row: int, start: int, count: int) -> tuple[Bucket, Inputs]:
        """``count`` tokens of the request ``row`` from position ``start``."""
        bucket = self.table.prefill(count)
        inputs = self._staging[bucket]
        blocks = inputs["block_tables"]
        blocks[0] = requests.block_tables[row, : blocks.shape[1]]
        positions = np.arange(start, start + count)
        self._fill(inputs, requests.token_ids[row, start : start + count], positions, blocks[0, self._page(positions)])
        inputs["logits_indices"][0] = count - 1
        return bucket, inputs

    def _page(self, positions: Ints) -> Ints:
        page: Ints = positions // self.block_size
        return page

    def _fill(self, inputs: Inputs, token_ids: Ints, positions: Ints, pages: Ints) -> None:
        slots = pages * self.block_size + positions % self.block_size
        for name, values in (("input_ids", token_ids), ("positions", positions), ("slot_mapping", slots)):
            inputs[name][: len(values)] = values
            inputs[name][len(values) :] = 0
