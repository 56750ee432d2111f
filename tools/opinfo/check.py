"""Cases through one route, many in one compiled graph: equal to eager PyTorch, refused by name, or neither."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from tools.opinfo.samples import UNDEFINED, Case
from vllm_neuron.errors import CompileError, NeuronError

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
        if operator in UNDEFINED and isinstance(reference, torch.Tensor):
            one, reference = torch.zeros_like(one), torch.zeros_like(reference)
        try:
            if isinstance(reference, torch.Tensor):
                rtol, atol = (case.rtol, case.atol) if reference.dtype.is_floating_point else (None, None)
                torch.testing.assert_close(one, reference, rtol=rtol, atol=atol, equal_nan=True)
            else:
                assert one == reference, f"{one} where eager has {reference}"
        except AssertionError as error:
            return Outcome(Kind.WRONG, f"result {index}: {' '.join(str(error).split())}"[:400])
    return Outcome(Kind.EQUAL)


def _failure(error: Exception) -> Outcome:
    cause = getattr(error, "inner_exception", error)
    text = str(cause)
    one_line = isinstance(cause, NeuronError) and "\n" not in text
    if isinstance(cause, CompileError) or ("iree" in f"{type(cause).__module__} {text}".lower() and not one_line):
        kind = Kind.COMPILER
    elif one_line and re.search(r"\b(aten|prims)\.\w+", text):
        kind = Kind.REFUSED
    elif type(cause).__module__ == "torch._dynamo.exc":
        kind = Kind.UNCAPTURED
    else:
        kind = Kind.ERROR
    return Outcome(kind, f"{type(cause).__name__}: {text}"[:1000])
