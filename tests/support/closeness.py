"""Results of a compiled function beside those of eager PyTorch."""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_flatten


def assert_equal_to_eager(name: str, actual: object, expected: object, tolerances: dict[torch.dtype, float]) -> None:
    """Every tensor of ``actual`` has the dtype of its counterpart, and its values within the tolerance of that dtype.

    A dtype that ``tolerances`` does not list is compared exactly. NaN equals NaN.
    """
    pairs = zip(tree_flatten(actual)[0], tree_flatten(expected)[0], strict=True)
    for index, (result, reference) in enumerate(pairs):
        where = f"{name}, result {index}"
        assert result.dtype == reference.dtype, where
        tolerance = tolerances.get(reference.dtype, 0)
        if reference.dtype.itemsize == 1 and reference.dtype.is_floating_point:
            result, reference = result.float(), reference.float()
        torch.testing.assert_close(
            result,
            reference,
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda text, where=where: f"{where}: {text}",
        )
