"""The cases of the sweep: sample inputs of torch's own operator tests, and the tolerances that those tests allow."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.common_device_type import toleranceOverride
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import DecorateInfo
from torch.utils._pytree import tree_map_only

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)
_CONSIDERED = 48  # samples of one dtype that are drawn, to choose from

# What torch itself leaves undefined: the contents of fresh memory.
UNDEFINED = frozenset(
    {
        "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
        "resize_", "resize_as_",
    }
)  # fmt: skip
# And which of equals is meant by the places that are a second result, and their order unless it is asked for.
ANY_OF_EQUALS = frozenset({"topk", "kthvalue", "mode", "median", "nanmedian"})
_UNSTABLE = frozenset({"sort", "argsort"})


@dataclass(frozen=True)
class Case:
    """One call of one operator: ``function(*arguments, **options)``, all tensors of ``dtype`` or what goes with it."""

    name: str
    dtype: torch.dtype
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    rtol: float
    atol: float

    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments and options, with tensors that the operator may write to."""
        arguments, options = tree_map_only(torch.Tensor, torch.Tensor.clone, (self.arguments, self.options))
        return arguments, options


@functools.cache
def operators() -> dict[str, Any]:
    """Every operator of torch's table, by a name that is its own."""
    return {".".join(filter(None, (op.name, op.variant_test_name))): op for op in op_db}


def cases(operator: str, limit: int) -> list[Case]:
    """At most ``limit`` cases of each dtype of the sweep that the operator has on the CPU, spread over its samples.

    The same in every process. What eager PyTorch itself refuses is left out.
    """
    op = operators()[operator]
    found: list[Case] = []
    for dtype in DTYPES:
        if dtype in op.supported_dtypes("cpu"):
            torch.manual_seed(0)
            random.seed(0)
            rtol, atol = _tolerance(op, dtype)
            samples = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), _CONSIDERED))
            step = max(1, len(samples) // limit)
            for index, sample in list(enumerate(samples))[::step][:limit]:
                name = f"{str(dtype).removeprefix('torch.')}/{index}"
                options = sample.kwargs | ({"stable": True} if operator in _UNSTABLE and not sample.args else {})
                case = Case(name, dtype, op.op, (sample.input, *sample.args), options, rtol, atol)
                if _runs_eagerly(case):
                    found.append(case)
    return found


def _runs_eagerly(case: Case) -> bool:
    arguments, options = case.inputs()
    try:
        with torch.no_grad():
            case.function(*arguments, **options)
    except Exception:
        return False
    return True


def _tolerance(op: Any, dtype: torch.dtype) -> tuple[float, float]:
    """The widest ``(rtol, atol)`` that torch's tests of the operator allow on a CPU."""
    rtol, atol = torch.testing._comparison.default_tolerances(dtype)
    for info in op.decorators or ():
        if isinstance(info, DecorateInfo) and info.device_type in (None, "cpu"):
            for override in info.decorators:
                if isinstance(override, toleranceOverride) and dtype in override.d:
                    rtol, atol = max(rtol, override.d[dtype].rtol), max(atol, override.d[dtype].atol)
    return rtol, atol
