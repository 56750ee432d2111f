"""Random programs of views, arithmetic and in-place writes, as source text that runs eagerly and compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

PARAMETERS = "x, y, z, index"
WIDTH = 256  # elements of a row: enough for IREE to split the work on a tensor among threads


def inputs() -> list[Tensor]:
    """Fresh inputs of every program. Whole numbers, so that results are exact however they are computed."""
    generator = torch.Generator().manual_seed(7)
    shapes = [(6, WIDTH), (6, WIDTH), (6 * WIDTH,)]
    values = [torch.randint(-9, 10, shape, generator=generator).float() for shape in shapes]
    return [*values, torch.tensor([2, -1, 0])]


@dataclass
class _Builder:
    draw: Callable[[st.SearchStrategy[Any]], Any]
    lines: list[str] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=lambda: dict(zip(PARAMETERS.split(", "), inputs(), strict=True)))

    def pick(self, accepts: Callable[[Tensor], bool] = lambda _: True) -> str:
        names = [name for name, value in self.values.items() if name != "index" and accepts(value)]
        # Half of the time the newest, so that steps build on one another; else the inputs have their turn.
        return names[-1] if self.draw(st.booleans()) else self.draw(st.sampled_from(names))

    def like(self, shape: torch.Size) -> str:
        return self.pick(lambda value: value.shape == shape)

    def bind(self, expression: str) -> None:
        self.run(f"v{len(self.lines)} = {expression}")

    def run(self, line: str) -> None:
        exec(line, {"torch": torch}, self.values)
        self.lines.append(line)

    def step(self) -> None:
        name = self.pick()
        value = self.values[name]
        kinds = [self.view, self.arithmetic, self.write, self.write] + [self.indexed, self.indexed] * (value.dim() > 0)
        self.draw(st.sampled_from(kinds))(name, value)

    def view(self, name: str, value: Tensor) -> None:
        views = ["reshape(-1)", "unsqueeze(0)", "view_as({name})"]
        if value.numel() == 6 * WIDTH:
            views += [f"reshape(4, {3 * WIDTH // 2})", f"reshape({WIDTH}, 6)", f"reshape({6 * WIDTH})"]
        if value.dim() > 1:
            views += ["transpose(0, 1)", "select(0, 0)", "select(1, -1)", "narrow(1, 0, 1)"]
        if value.dim() and len(value) > 2:
            views += ["narrow(0, 1, 2)", "narrow(0, 0, 1)", "unfold(0, 2, 2).clone()", "flip(0)"]
        self.bind(f"{name}." + self.draw(st.sampled_from(views)).format(name=name))

    def arithmetic(self, name: str, value: Tensor) -> None:
        other = self.like(value.shape)
        forms = ["{a} + 1", "{a} * 1.0", "-{a}", "{a} + {b}", "{a}.clone()", "{a} - {b}", "{a}.clamp(-4, 4)", "{a} + 0"]
        forms += ["torch.where({a} > 0, {a}, {b})", "{a}.sum()", "{a}.double().float()", "torch.maximum({a}, {b})"]
        if value.dim():
            forms += ["torch.sort({a}, 0)[0]", "{a}.cumsum(0)", "torch.cat([{a}, {b}])", "{a}.sum(0)", "{a}.amax(-1)"]
        self.bind(self.draw(st.sampled_from(forms)).format(a=name, b=other))

    def write(self, name: str, value: Tensor) -> None:
        if any(stride == 0 for stride in value.stride()):
            return
        other = self.like(value.shape)
        forms = ["{a}.add_(1)", "{a}.neg_()", "{a}.zero_()", "{a}.copy_({b}.clone())", "{a}.add_({b}.clone())"]
        forms += ["{a}.masked_fill_({a} > 2, -3)", "{a}.copy_(({a} + {b}).clone())"]
        if value.dim():
            forms += ["{a}.copy_({a}.flip(0))", "{a}.copy_(torch.sort({a}, 0)[0])", "{a}.cumsum_(0)"]
        self.run(self.draw(st.sampled_from(forms)).format(a=name, b=other))

    def indexed(self, name: str, value: Tensor) -> None:
        if len(value) < 3:
            return
        forms = ["v{n} = {a}[index]", "v{n} = {a}.index_select(0, index.abs())"]
        if all(value.stride()):
            forms += [
                "{a}[index] = {a}[index.flip(0)]",
                "{a}[index] = 5.0",
                "{a}[index] += 1",
                "{a}[1:3] = {a}[:2].clone()",
            ]
            forms += [
                "{a}.index_copy_(0, index % 3, {a}[:3].clone())",
                "{a}[index] = {a}[:3] * 2",
                "{a}[0] = {a}[1].clone()",
            ]
        forms += ["v{n} = {a}.index_put((index,), {a}[:3])", "v{n} = torch.slice_scatter({a}, {a}[:2], 0, 1, 3)"]
        self.run(self.draw(st.sampled_from(forms)).format(a=name, n=len(self.lines)))

    def source(self) -> str:
        names = list(self.values)[:-1] if list(self.values)[-1] == "index" else list(self.values)
        results = self.draw(st.lists(st.sampled_from([*names, *names[-3:]]), min_size=1, max_size=4))
        body = "\n".join(f"    {line}" for line in [*self.lines, f"return [{', '.join(results)}]"])
        return f"def program({PARAMETERS}):\n{body}\n"


@st.composite
def programs(draw: Callable[[st.SearchStrategy[Any]], Any]) -> str:
    """The source of a function of :func:`inputs`, which returns a list of tensors."""
    builder = _Builder(draw)
    for _ in range(draw(st.integers(1, 9))):
        builder.step()
    return builder.source()


def load(source: str) -> Callable[..., list[Tensor]]:
    """The function that ``source`` defines."""
    scope: dict[str, Any] = {"torch": torch}
    exec(source, scope)
    function: Callable[..., list[Tensor]] = scope["program"]
    return function
