"""Copy insertion, and what else is there for IREE 3.13, each by a program that is wrong without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch.aot_autograd import aot_module_simplified
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_neuron.lowering.canonical import canonicalize
from vllm_neuron.lowering.decompositions.table import decomposition_table
from vllm_neuron.lowering.native.lower import lower


def run(function: Callable[..., Any], *arguments: Tensor) -> Any:
    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(function, backend="neuron_native", fullgraph=True, dynamic=False)(*arguments)


def assert_as_eager(function: Callable[..., Any], *arguments: Tensor) -> None:
    """Equal results, equal inputs afterwards, and no storage shared that eager PyTorch keeps apart."""
    mine, eager = [[argument.clone() for argument in arguments] for _ in range(2)]
    with torch.no_grad():
        expected = list(function(*eager))
    actual = list(run(function, *mine))
    for result, reference in zip([*actual, *mine], [*expected, *eager], strict=True):
        torch.testing.assert_close(result, reference, rtol=0, atol=0, equal_nan=True)
    addresses = [tensor.untyped_storage().data_ptr() for tensor in (*actual, *mine)]
    assert len(set(addresses)) == len(addresses)


def cache() -> Tensor:
    return torch.arange(512 * 64).reshape(512, 64).remainder(61).float()


SLOTS = torch.tensor([3, 300, 7, 1])
UPDATE = -torch.ones(4, 64)


def write(kv: Tensor, slots: Tensor, update: Tensor) -> Tensor:
    return kv.index_put_((slots,), update)


class TestInputsThatAreOnlyRead:
    """IREE runs scatters and sorts in place, on the caller's memory too."""

    def test_scatter(self) -> None:
        assert_as_eager(lambda kv, s, u: [kv.index_put((s,), u).sum()], cache(), SLOTS, UPDATE)

    def test_scatter_into_a_view(self) -> None:
        assert_as_eager(
            lambda kv, s, u: [kv.view(256, 2, 64)[:, 0].index_put((s % 256,), u).sum()], cache(), SLOTS, UPDATE
        )

    def test_scatter_into_what_arithmetic_leaves_as_it_is(self) -> None:
        assert_as_eager(lambda kv, s, u: [(kv * 1.0).index_put((s,), u).sum()], cache(), SLOTS, UPDATE)

    def test_sort(self) -> None:
        assert_as_eager(lambda x: [torch.sort(x, 0)[0].sum(0)], cache().flip(0))

    def test_slice_scatter(self) -> None:
        assert_as_eager(lambda kv, u: [torch.slice_scatter(kv, u, 0, 3, 7).sum()], cache(), UPDATE)


class TestOldValues:
    """With an aliased output, IREE may write the input before its last reader has read it."""

    def test_old_and_new_are_returned(self) -> None:
        def function(kv: Tensor, s: Tensor, u: Tensor) -> list[Tensor]:
            old = kv.clone()
            return [old, write(kv, s, u).clone()]

        assert_as_eager(function, cache(), SLOTS, UPDATE)

    def test_old_is_read_after_two_writes(self) -> None:
        def function(x: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
            old = x.clone()
            x.copy_(x.flip(0))
            y.copy_(y * 2)
            return [old, z.clone()]

        assert_as_eager(function, *(cache()[6 * part : 6 * part + 6].clone() for part in range(3)))

    def test_a_reader_that_the_write_does_not_need(self) -> None:
        def function(x: Tensor, s: Tensor, y: Tensor) -> list[Tensor]:
            total = x[s].sum(0)
            x[s] = 5.0
            y.add_(1)
            y.copy_(y.index_put((s,), y[:4]))
            return [total]

        assert_as_eager(function, cache()[:6].clone(), torch.tensor([2, -1, 0, 1]), cache().view(-1)[:384].clone())

    def test_a_reader_of_a_value_that_is_overwritten_in_place(self) -> None:
        def function(x: Tensor, s: Tensor, y: Tensor) -> list[Tensor]:
            value = x + y
            total = value[s].sum(0)
            written = value.index_put((s,), y[:4])
            return [total, written, (y * y + 1).index_put((s,), y[:4])]

        assert_as_eager(function, cache()[:6].clone(), torch.tensor([2, -1, 0, 1]), cache()[6:12].clone())

    def test_old_is_read_after_the_write(self) -> None:
        def function(kv: Tensor, s: Tensor, u: Tensor) -> list[Tensor]:
            old = kv.clone()
            total = write(kv, s, u).sum()
            return [old.t() * 2 + total, old[3:9] + total]

        assert_as_eager(function, cache(), SLOTS, UPDATE)

    def test_elementwise(self) -> None:
        def function(x: Tensor) -> list[Tensor]:
            old = x.clone()
            x.add_(1)
            return [old * 2]

        assert_as_eager(function, cache())

    def test_reversal(self) -> None:
        def function(x: Tensor) -> list[Tensor]:
            x.copy_(x.flip(0))
            return [x.sum()]

        assert_as_eager(function, cache())

    def test_swap(self) -> None:
        def function(x: Tensor, y: Tensor) -> list[Tensor]:
            old = x.clone()
            x.copy_(y)
            y.copy_(old)
            return [x + y]

        assert_as_eager(function, cache(), -cache())

    def test_overlapping_move(self) -> None:
        def function(x: Tensor, s: Tensor) -> list[Tensor]:
            x[torch.arange(100, 400)] = x[:300].clone()
            return [x.sum()]

        assert_as_eager(function, cache(), SLOTS)

    def test_one_input_becomes_the_scatter_of_another(self) -> None:
        def function(x: Tensor, y: Tensor, s: Tensor, u: Tensor) -> list[Tensor]:
            x.copy_(y.index_put((s,), u))
            return [y + 1]

        assert_as_eager(function, cache(), -cache(), SLOTS, UPDATE)


class TestResultsInFreshStorage:
    """IREE exports one buffer as often as it is returned, be it an input's."""

    def test_copies_of_an_input(self) -> None:
        assert_as_eager(lambda x: [x.clone(), x.clone(), x * 1.0, x.reshape(-1).clone()], cache())

    def test_copies_of_truth_values(self) -> None:
        assert_as_eager(lambda x: [x.clone(), ~~x, x.clone()], cache() > 30)

    def test_copies_of_a_result(self) -> None:
        def function(x: Tensor) -> list[Tensor]:
            y = x + 1
            return [y, y.clone(), y.view(-1).clone()]

        assert_as_eager(function, cache())

    def test_copy_of_a_mutated_input(self) -> None:
        assert_as_eager(lambda kv, s, u: [write(kv, s, u).clone()], cache(), SLOTS, UPDATE)


class TestIndices:
    """StableHLO leaves negative and wild indices undefined: IREE reads and writes whatever is there."""

    def test_negative(self) -> None:
        indices = torch.tensor([-1, -512, 5, -3])
        assert_as_eager(lambda kv, i, u: [kv[i], kv.index_put((i,), u)], cache(), indices, UPDATE)

    @pytest.mark.parametrize("wild", [10_000_000, -10_000_000, 2**40, -(2**62)])
    def test_out_of_range_writes_and_reads_the_nearest_row(self, wild: int) -> None:
        kv = cache()
        expected = cache()
        row = 511 if wild > 0 else 0
        expected[row] = -1
        read = run(lambda kv, i, u: write(kv, i, u)[i.flip(0)], kv, torch.tensor([wild]), UPDATE[:1])
        torch.testing.assert_close(kv, expected, rtol=0, atol=0)
        torch.testing.assert_close(read, expected[[row]], rtol=0, atol=0)

    @pytest.mark.parametrize("wild", [10_000_000, -10_000_000])
    def test_out_of_range_in_every_kind_of_lookup(self, wild: int) -> None:
        def function(x: Tensor, i: Tensor) -> list[Tensor]:
            wide = i[:, None].expand(1, 64)
            return [
                torch.nn.functional.embedding(i, x),
                x.gather(0, wide),
                x.index_select(0, i),
                x.scatter(0, wide, -1.0),
                x.scatter_add(0, wide, torch.ones(1, 64)),
                x.index_add(0, i, torch.ones(1, 64)),
                x.index_copy(0, i, torch.ones(1, 64)),
                x.take(i * 64),
            ]

        row = 511 if wild > 0 else 0
        actual = run(function, cache(), torch.tensor([wild]))
        expected = function(cache(), torch.tensor([row]))
        expected[-1] = cache().reshape(-1)[[-1 if wild > 0 else 0]]
        for result, reference in zip(actual, expected, strict=True):
            torch.testing.assert_close(result, reference, rtol=0, atol=0)

    def test_64_bit_slots_that_were_reshaped(self) -> None:
        slots = torch.arange(128).reshape(64, 2)
        update = torch.randn(128, 64)
        assert_as_eager(lambda kv, s, u: [write(kv, s.reshape(-1), u).sum()], cache(), slots, update.round())


class TestNumbers:
    def test_long_bfloat16_products_are_as_exact_as_torch(self) -> None:
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randn(8, 4096, generator=generator).bfloat16() for _ in range(2))
        exact = a.double() @ b.double().t()
        mine = run(lambda a, b: a @ b.t(), a, b)
        rounding = exact.bfloat16().double()
        assert (mine.double() - exact).abs().max() <= 2 * (rounding - exact).abs().max()

    def test_sort_is_stable_and_puts_nan_last(self) -> None:
        keys = torch.tensor([2.0, float("nan"), 1.0, 2.0, 1.0, float("nan"), -0.0, 0.0] * 8)
        assert_as_eager(
            lambda k: [*torch.sort(k, stable=True), *torch.sort(k, stable=True, descending=True)],
            keys,
        )

    def test_top_k_with_64_bit_positions(self) -> None:
        assert_as_eager(lambda x: [*torch.topk(x, 5)], torch.randperm(64).float())

    def test_float64_stays_float64(self) -> None:
        assert_as_eager(lambda x: [x + 1e-12, x * 0.1], torch.tensor([1.0, 3.0], dtype=torch.float64))


def text_of(function: Callable[..., Any], *arguments: Tensor) -> str:
    """The module that ``function`` is lowered to."""
    captured = []

    def compile_graph(graph: torch.fx.GraphModule, _: Any) -> Any:
        captured.append(graph)
        return graph

    class Module(torch.nn.Module):
        def forward(self, *arguments: Tensor) -> Any:
            return function(*arguments)

    mode = FakeTensorMode()
    with torch.no_grad(), torch._guards.tracing(torch._guards.TracingContext(mode)):
        aot_module_simplified(
            Module(),
            [mode.from_tensor(argument) for argument in arguments],
            fw_compiler=compile_graph,
            inference_compiler=compile_graph,
            decompositions=decomposition_table(),
            keep_inference_input_mutations=True,
        )
    names = [f"input{index}" for index in range(len(arguments))]
    return lower(canonicalize(captured[0], names)).data.decode()


@pytest.mark.parametrize(
    ("function", "copies"),
    [
        (lambda x, s, u: (x.clone(), x.clone(), x.view(-1)), 3),
        (lambda x, s, u: (x + x, (x + x).clone()), 1),
        (lambda x, s, u: (x + x, x * x), 0),
        (lambda x, s, u: (write(x, s, u).clone(),), 1),
    ],
    ids=["inputs", "a result twice", "results", "a mutated input"],
)
def test_results_are_copied_inside_the_module(function: Callable[..., Any], copies: int) -> None:
    """IREE exports one buffer as often as it is returned; the runtime's own check of addresses is a second line."""
    assert text_of(function, cache(), SLOTS, UPDATE).count("stablehlo.or ") == copies


def test_a_cache_write_is_one_scatter_on_the_input_itself() -> None:
    """No copy where none is needed: that is what keeps a decode step fast."""
    text = text_of(lambda kv, s, u: (write(kv, s, u)[s] * 2,), cache(), SLOTS, UPDATE)
    assert text.count("stablehlo.scatter") == 2  # the operation and its dimension numbers
    assert "stablehlo.or" not in text
    assert '"stablehlo.scatter"(%arg0' in text
    assert "tf.aliasing_output = 0 : i32" in text


def test_a_model_of_another_dtype_has_no_double_precision_left() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        normal = torch.nn.functional.rms_norm(x * 0.1, (64,), w, 1e-5)
        return (torch.nn.functional.silu(normal).masked_fill(normal > 0.5, -1e30).softmax(-1) / 3.0,)

    assert "f64" not in text_of(function, cache().bfloat16(), torch.ones(64).bfloat16())
