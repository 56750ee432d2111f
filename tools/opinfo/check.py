"""Cases through one route, many in one compiled graph: equal to eager PyTorch, refused by name, or neither."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from tools.opinfo.samples import ANY_OF_EQUALS, UNDEFINED, Case
from vllm_neuron.errors import CompileError, NeuronError

HALF = (torch.bfloat16, torch.float16)
BACKENDS = {"native": "neuron_native", "xla": "vllm_neuron"}


class Kind(StrEnum):
    """What became of one case. All but the first three are faults."""

    EQUAL = "equal"
    REFUSED = "refused"  # by one line of ours that names the operator
    UNCAPTURED = "uncaptured"  # torch's Dynamo makes no single graph of it; without fullgraph, PyTorch runs it
    WRONG = "wrong"
    COMPILER = "compiler"  # the device compiler's or the runtime's failure
    ERROR = "error"  # any other exception, and a refusal that names no operator
    CRASH = "crash"
    TIMEOUT = "timeout"


FAULTS = (Kind.WRONG, Kind.COMPILER, Kind.ERROR, Kind.CRASH, Kind.TIMEOUT)


class Outcome(NamedTuple):
    """``text`` is the message, or the first difference."""

    kind: Kind
    text: str = ""


# Told before a graph is compiled: its cases. And after: their outcomes.
Tell = Callable[[Sequence[str], Sequence[Outcome]], None]


def check(operator: str, batch: Sequence[Case], route: str, tell: Tell) -> None:
    """Compile all cases as one graph; where that fails those of each dtype, and then each by itself."""
    for part in _parts(operator, batch, route, tell):
        check(operator, part, route, tell)


def _parts(operator: str, batch: Sequence[Case], route: str, tell: Tell) -> list[list[Case]]:
    names = [case.name for case in batch]
    tell(names, [])
    try:
        actual, expected = _run(batch, route)
    except Exception as error:
        if len(batch) > 1:
            dtypes = list(dict.fromkeys(case.dtype for case in batch))
            if len(dtypes) > 1:
                return [[case for case in batch if case.dtype == dtype] for dtype in dtypes]
            return [[case] for case in batch]
        tell(names, [_failure(error)])
        return []
    tell(names, [_compare(operator, *triple) for triple in zip(batch, actual, expected, strict=True)])
    return []


def _run(batch: Sequence[Case], route: str) -> tuple[list[Any], list[Any]]:
    functions = [case.function for case in batch]

    def call(inputs: list[Any]) -> list[Any]:
        return [
            function(*arguments, **options) for function, (arguments, options) in zip(functions, inputs, strict=True)
        ]

    torch._dynamo.reset()
    with torch.no_grad():
        expected = call([case.inputs() for case in batch])
        compiled = torch.compile(call, backend=BACKENDS[route], fullgraph=True, dynamic=False)
        return compiled([case.inputs() for case in batch]), expected


def _compare(operator: str, case: Case, actual: Any, expected: Any) -> Outcome:
    mine, eager = tree_leaves(actual), tree_leaves(expected)
    if len(mine) != len(eager):
        return Outcome(Kind.WRONG, f"{len(mine)} results where eager has {len(eager)}")
    for index, (one, reference) in enumerate(zip(mine, eager, strict=True)):
        if not isinstance(reference, torch.Tensor):
            difference = "" if one == reference else f"{one} where eager has {reference}"
        elif operator in UNDEFINED or (operator in ANY_OF_EQUALS and index):
            difference = _difference(torch.zeros_like(one), torch.zeros_like(reference), case)
        else:
            difference = _difference(one, reference, case)
            if difference and reference.dtype in HALF and _is_as_exact(one, reference, case, index):
                difference = ""
        if difference:
            return Outcome(Kind.WRONG, f"result {index}: {difference}"[:400])
    return Outcome(Kind.EQUAL)


def _difference(one: torch.Tensor, reference: torch.Tensor, case: Case) -> str:
    rtol, atol = torch.testing._comparison.default_tolerances(reference.dtype)
    if reference.dtype.is_floating_point:
        rtol, atol = max(rtol, case.rtol), max(atol, case.atol)
    try:
        torch.testing.assert_close(one, reference, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())
    return ""


def _is_as_exact(one: torch.Tensor, reference: torch.Tensor, case: Case, index: int) -> bool:
    """Whether no element is farther from the result in 64 bits than twice what one of eager's is.

    Where 16-bit floats are rounded on the way to a result is not the same in the two, nor is it in torch's own kernels.
    """
    arguments, options = tree_map_only(
        torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, case.inputs()
    )
    try:
        with torch.no_grad():
            exact = tree_leaves(case.function(*arguments, **options))[index].double()
    except Exception:
        return False
    if one.dtype != reference.dtype or not one.shape == reference.shape == exact.shape:
        return False
    if not torch.equal(one.isnan(), reference.isnan()):
        return False
    ours, eagers = ((x.double() - exact).abs().nan_to_num(0.0, torch.inf) for x in (one, reference))
    return bool(ours.max() <= 2 * eagers.max())


def _failure(error: Exception) -> Outcome:
    cause = getattr(error, "inner_exception", error)
    text = str(cause)
    one_line = isinstance(cause, NeuronError) and "\n" not in text
    if isinstance(cause, CompileError) or ("iree" in f"{type(cause).__module__} {text}".lower() and not one_line):
        kind = Kind.COMPILER
    elif one_line and re.search(r"\b\w+\.\w+(\.\w+)?[(:]", text):
        kind = Kind.REFUSED
    elif type(cause).__module__ == "torch._dynamo.exc":
        kind = Kind.UNCAPTURED
    else:
        kind = Kind.ERROR
    return Outcome(kind, f"{type(cause).__name__}: {text}"[:1000])
