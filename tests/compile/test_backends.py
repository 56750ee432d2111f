"""``torch.compile(backend="neuron_native")`` and the capture-only backend, as a user meets them."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils._pytree import tree_flatten

from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.compile.specialize import Specializer
from vllm_neuron.envs import get_neuron_compile_cache_dir
from vllm_neuron.errors import ConfigError, UnsupportedError, UnsupportedOpError

X = torch.arange(24.0).reshape(6, 4)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_as_eager(function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """The same structure, values, dtypes, strides and sharing of storage; the same inputs afterwards."""
    mine, eager = copy.deepcopy(arguments), copy.deepcopy(arguments)
    with torch.no_grad():
        expected = function(*eager)
        actual = torch.compile(function, backend="neuron_native", **options)(*mine)
    mine_flat, mine_tree = tree_flatten((actual, mine))
    eager_flat, eager_tree = tree_flatten((expected, eager))
    assert mine_tree == eager_tree
    for value, reference in zip(mine_flat, eager_flat, strict=True):
        if isinstance(reference, Tensor):
            torch.testing.assert_close(value, reference, rtol=1e-6, atol=1e-6, check_stride=True, equal_nan=True)
        else:
            assert value == reference
    assert shared(mine_flat) == shared(eager_flat)


def shared(values: list[Any]) -> set[tuple[int, int]]:
    tensors = [value.untyped_storage().data_ptr() if isinstance(value, Tensor) else None for value in values]
    return {(i, j) for i, a in enumerate(tensors) for j, b in enumerate(tensors) if i < j and a is not None and a == b}


def caught(function: Callable[..., Any], *arguments: Any, backend: str = "neuron_native", **options: Any) -> Exception:
    """What the backend raised, which Dynamo wraps."""
    with pytest.raises(BackendCompilerFailed) as error:
        torch.compile(function, backend=backend, **options)(*arguments)
    inner: Exception = error.value.inner_exception
    assert "\n" not in str(inner)
    return inner


class TestOutputs:
    def test_inputs_views_and_duplicates(self) -> None:
        def function(x: Tensor) -> Any:
            y = x * 2
            return x, x.t(), x[1:3], x.view(-1), {"y": y, "again": (y, y.t()), "none": None, "int": 3, "text": "s"}

        assert_as_eager(function, X)

    def test_nothing_but_views(self) -> None:
        assert_as_eager(lambda x: (x.t(), x[1:]), X)

    def test_constants(self) -> None:
        offsets = torch.tensor([1.0, 2.0, 3.0, 4.0])
        assert_as_eager(lambda x: (torch.arange(4), torch.ones(2), x + offsets + torch.tensor([4.0, 3.0, 2.0, 1.0])), X)

    def test_layout_of_results(self) -> None:
        assert_as_eager(lambda x: ((x * 2).t(), (x * 2)[:, None].expand(6, 3, 4), (x + 1).view(4, 6)), X)

    def test_parts_of_results(self) -> None:
        assert_as_eager(lambda x: ((x + 1).chunk(2, 1), (x + 2).unbind(1), (x * 2).split(4)[1]), X)

    def test_parts_of_a_mutated_input(self) -> None:
        assert_as_eager(lambda x: [part.mul_(2) for part in x.split(2)], X)

    def test_scalars_and_empty_tensors(self) -> None:
        assert_as_eager(lambda s, e: (s + 1, s * s, e + 1, e.sum(), torch.cat([e, e + 1])), X[0, 1], X[:0])

    def test_results_outlive_the_next_call(self) -> None:
        compiled = torch.compile(lambda x: x + 1, backend="neuron_native")
        with torch.no_grad():
            first = compiled(X)
            compiled(X * 0)
        torch.testing.assert_close(first, X + 1)

    @pytest.mark.parametrize(
        "dtype", ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
    )
    def test_dtypes(self, dtype: str) -> None:
        def function(x: Tensor, y: Tensor) -> Any:
            y.copy_(x)
            return x + y, x.clone(), x == y, x[1:].sum()

        values = (X % 5).to(getattr(torch, dtype))
        assert_as_eager(function, values, values.flip(0))


class TestMutation:
    def test_input_that_is_returned(self) -> None:
        def function(x: Tensor) -> Any:
            x.add_(1)
            return x, x * 2

        assert_as_eager(function, X)

    def test_view_of_an_input(self) -> None:
        def function(x: Tensor) -> Any:
            part = x[1:3]
            part.mul_(3)
            x[:, 0] = 7
            return x.sum(), part

        assert_as_eager(function, X)

    @pytest.mark.parametrize(
        "make",
        [
            lambda: X.clone().t(),
            lambda: torch.arange(100.0)[1:25].view(6, 4),
            lambda: torch.arange(100.0).view(10, 10)[2:8, 3:7],
        ],
        ids=["transposed", "unaligned", "with gaps"],
    )
    def test_input_that_has_to_be_staged(self, make: Callable[[], Tensor]) -> None:
        def function(x: Tensor) -> Tensor:
            x.mul_(2)
            return x.sum(1)

        mine, eager = make(), make()
        with torch.no_grad():
            actual = torch.compile(function, backend="neuron_native")(mine)
        torch.testing.assert_close(actual, function(eager))
        torch.testing.assert_close(mine, eager)

    @pytest.mark.parametrize(
        "parts",
        [
            lambda base: (base[0:10], base[5:15]),
            lambda base: (base[10:20], base[10:20]),
            lambda base: (base.view(10, 10)[:, 3], base.view(10, 10)[2]),
            lambda base: (base.view(10, 10).t()[1:3, 3:5], base.view(10, 10)[2:4, 1:3]),
        ],
        ids=["shifted", "same", "crossing", "transposed"],
    )
    def test_inputs_that_overlap(self, parts: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        def function(a: Tensor, b: Tensor) -> Tensor:
            a.add_(1)
            b.mul_(2)
            return a * 3 + b

        mine, eager = torch.arange(100.0), torch.arange(100.0)
        with torch.no_grad():
            actual = torch.compile(function, backend="neuron_native")(*parts(mine))
            torch.testing.assert_close(actual, function(*parts(eager)))
        torch.testing.assert_close(mine, eager)

    @pytest.mark.parametrize(
        "parts",
        [
            lambda base: (base[2:4], base),
            lambda base: (base[::2, 1::3], base),
            lambda base: (base[:, 2:5], base[:, 4:7]),
        ],
        ids=["rows", "with gaps", "both within"],
    )
    def test_a_returned_part_of_inputs_that_overlap(self, parts: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        """It is where it was: who writes to it writes to the input."""

        def function(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            return a.add_(1), b * 1

        mine, eager = torch.arange(48.0).view(6, 8), torch.arange(48.0).view(6, 8)
        with torch.no_grad():
            actual = torch.compile(function, backend="neuron_native")(*parts(mine))
            expected = function(*parts(eager))
        torch.testing.assert_close(actual, expected)
        for returned in (actual[0], expected[0]):
            returned.mul_(-1)
        torch.testing.assert_close(mine, eager)

    def test_cache_is_written_where_it_is(self) -> None:
        cache = torch.zeros(64, 4)
        address = cache.data_ptr()
        compiled = torch.compile(lambda c, s, v: c.index_put_((s,), v).sum(), backend="neuron_native")
        with torch.no_grad():
            for slot in range(3):
                compiled(cache, torch.tensor([slot]), torch.full((1, 4), slot + 1.0))
        assert cache.data_ptr() == address
        assert cache[:4, 0].tolist() == [1.0, 2.0, 3.0, 0.0]

    def test_buffers_of_a_module(self) -> None:
        class Counted(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = torch.nn.BatchNorm1d(4)
                self.linear = torch.nn.Linear(4, 3)
                self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

            def forward(self, x: Tensor) -> Tensor:
                self.calls.add_(1)
                return self.linear(self.norm(x)) * self.calls

        torch.manual_seed(0)
        eager = Counted()
        mine = copy.deepcopy(eager)
        compiled = torch.compile(mine, backend="neuron_native")
        with torch.no_grad():
            for factor in (1.0, 2.0, 3.0):
                torch.testing.assert_close(compiled(X * factor), eager(X * factor), rtol=1e-5, atol=1e-5)
        for name, buffer in eager.named_buffers():
            torch.testing.assert_close(mine.get_buffer(name), buffer)


class TestShapes:
    def test_graph_break(self) -> None:
        def function(x: Tensor) -> Tensor:
            y = x * 2
            torch._dynamo.graph_break()
            return y + y.sum().item()

        assert_as_eager(function, X)

    def test_each_shape_of_a_dynamic_graph(self) -> None:
        def function(x: Tensor, n: int) -> Any:
            return x.t() @ x, x[1:] * n, x.shape[0] * 2, x.reshape(-1)

        compiled = torch.compile(function, backend="neuron_native", dynamic=True)
        with torch.inference_mode():
            for rows, n in ((3, 2), (5, 2), (3, 4), (1, 4), (0, 1), (5, 2)):
                x = torch.arange(rows * 4.0).view(rows, 4)
                actual, expected = compiled(x, n), function(x, n)
                assert actual[2] == expected[2]
                for index in (0, 1, 3):
                    torch.testing.assert_close(actual[index], expected[index])

    @pytest.mark.parametrize("dynamic", [True, None])
    def test_each_python_float_of_a_dynamic_graph(self, dynamic: bool | None) -> None:
        def function(x: Tensor, n: float) -> Any:
            return x * n, x.clamp(max=n) / n, torch.full((2,), n), n, n * x.shape[0], x * math.atan(n)

        compiled = torch.compile(function, backend="neuron_native", dynamic=dynamic)
        with torch.no_grad():
            for rows, n in ((3, 1.5), (4, 2.5), (4, 0.1), (5, 0.0), (5, -0.0), (5, math.inf), (5, 2)):
                x = torch.arange(1, rows * 4 + 1.0).view(rows, 4)
                torch.testing.assert_close(compiled(x, n), function(x, n), equal_nan=True)

    def test_threads_that_meet_new_shapes_together(self) -> None:
        def function(x: Tensor) -> Tensor:
            return torch.softmax((x @ x.t()).relu(), -1).cumsum(0) + x.sum()

        def right(rows: int) -> bool:
            x = torch.linspace(0, 1, rows * 4).view(rows, 4)
            with torch.no_grad():
                return torch.allclose(compiled(x), function(x), atol=1e-5)

        compiled = torch.compile(function, backend="neuron_native", dynamic=True)
        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(right, [3 + index % 7 for index in range(56)]))
        assert_as_eager(lambda x: x * 2, X)

    def test_shape_that_threads_meet_together_is_compiled_once(self) -> None:
        compiled: list[Any] = []
        together = Barrier(4)

        def compile_static(inputs: Any) -> Callable[..., Any]:
            sleep(0.1)
            compiled.append(inputs)
            return torch.neg

        specializer = Specializer(compile_static)
        with ThreadPoolExecutor(4) as threads:
            results = list(threads.map(lambda _: together.wait() >= 0 and specializer(X), range(4)))
        assert all(torch.equal(result, -X) for result in results)
        assert len(compiled) == 1

    def test_second_shape_of_a_static_graph_that_mutates(self) -> None:
        def function(x: Tensor) -> Tensor:
            x.add_(1)
            return x.sum(0)

        compiled = torch.compile(function, backend="neuron_native")
        with torch.no_grad():
            for rows in (3, 4, 5):
                mine, eager = torch.ones(rows, 2), torch.ones(rows, 2)
                torch.testing.assert_close(compiled(mine), function(eager))
                torch.testing.assert_close(mine, eager)

    def test_shape_that_depends_on_values_falls_back_outside_of_full_graphs(self) -> None:
        error = caught(lambda x: torch.nonzero(x), X, fullgraph=True)
        assert isinstance(error, UnsupportedOpError)
        assert "nonzero" in str(error)


class TestErrors:
    def test_inputs_that_require_grad(self) -> None:
        error = caught(lambda x: x * 2, X.clone().requires_grad_())
        assert isinstance(error, UnsupportedError)
        assert "torch.no_grad()" in str(error)
        assert "detach" in str(error)

    def test_parameters_are_fine_without_grad(self) -> None:
        linear = torch.nn.Linear(4, 3)
        with torch.inference_mode():
            torch.testing.assert_close(torch.compile(linear, backend="neuron_native")(X), linear(X))

    def test_parameters_are_fine_where_the_function_itself_turns_gradients_off(self) -> None:
        linear = torch.nn.Linear(4, 3)
        for context in (torch.no_grad, torch.inference_mode):

            def run(x: Tensor, context: Callable[[], Any] = context) -> Tensor:
                with context():
                    return linear(x)

            torch._dynamo.reset()
            result = torch.compile(run, backend="neuron_native", fullgraph=True)(X)
            torch.testing.assert_close(result, run(X))
            assert not result.requires_grad

    def test_complex(self) -> None:
        error = caught(lambda x: x.log() * 2, torch.ones(3, dtype=torch.complex64))
        assert isinstance(error, UnsupportedOpError)
        assert "aten.log.default(complex64[3])" in str(error)

    def test_options(self) -> None:
        error = caught(lambda x: x * 2, X, options={"level": 3})
        assert isinstance(error, ConfigError)
        assert "level" in str(error)

    def test_target_that_does_not_run_here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
        error = caught(lambda x: x * 2, X)
        assert isinstance(error, ConfigError)
        assert "trn2" in str(error)
        assert "neuron_libtorch_graph_capture" in str(error)


def keys() -> set[str]:
    """The keys in this process's local cache."""
    return set(LocalTier(Path(get_neuron_compile_cache_dir())).keys())


class TestCapture:
    def test_compiles_and_does_not_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))

        def function(x: Tensor, y: Tensor) -> Any:
            y.add_(1)
            return (x @ x.t()).t() + 1, x.sum(0)

        y = torch.zeros(3)
        with torch.no_grad():
            product, total = torch.compile(function, backend="neuron_libtorch_graph_capture")(X, y)
        assert product.shape == (6, 6)
        assert not product.any()
        assert total.tolist() == [0.0] * 4
        assert y.tolist() == [0.0] * 3
        captured = keys()
        assert len(captured) == 1

        torch._dynamo.reset()
        monkeypatch.setenv("VLLM_NEURON_DISABLE_WARMUP_COMPILE", "1")
        with torch.no_grad():
            product, total = torch.compile(function, backend="neuron_native")(X, y)
        torch.testing.assert_close(product, (X @ X.t()).t() + 1)
        assert y.tolist() == [1.0] * 3
        assert keys() == captured

    def test_native_backend_in_compile_only_mode(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_NEURON_CPU_COMPILE", "1")
        monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "cpu")
        with torch.no_grad():
            assert not torch.compile(lambda x: x + 41, backend="neuron_native")(X).any()

    def test_native_backend_in_eager_mode(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "1")
        monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
        with torch.no_grad():
            torch.testing.assert_close(torch.compile(lambda x: x + 43, backend="neuron_native")(X), X + 43)
        assert not list(tmp_path.iterdir())


KEY_PROGRAM = """
import torch
from pathlib import Path
from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.compile.specialize import Specializer
from vllm_neuron.envs import get_neuron_compile_cache_dir

def function(x, cache, slots):
    cache.index_put_((slots,), x * 0.5)
    return {name: torch.softmax(cache @ x.t(), -1) for name in {"a", "b", "c"}}

with torch.no_grad():
    torch.compile(function, backend="neuron_libtorch_graph_capture")(
        torch.ones(3, 4), torch.ones(8, 4), torch.tensor([1, 2, 3])
    )
print(*LocalTier(Path(get_neuron_compile_cache_dir())).keys())
"""


def test_keys_agree_over_processes_hash_seeds_and_folders(tmp_path: Path) -> None:
    found = []
    for seed in ("0", "777"):
        folder = tmp_path / f"folder{seed}"
        folder.mkdir()
        script = folder / f"program{seed}.py"
        script.write_text(KEY_PROGRAM)
        environment = {**os.environ, "PYTHONHASHSEED": seed, "VLLM_CACHE_ROOT": str(folder / "cache")}
        command: list[str | os.PathLike[str]] = [sys.executable, script]
        result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
        found.append(result.stdout.split())
    assert len(found[0]) == 1
    assert found[0] == found[1]


def test_forked_children_call_what_their_parent_compiled() -> None:
    """As a worker pool does, also after its parent has gone to another folder."""
    code = """
import multiprocessing, os, torch
compiled = torch.compile(lambda x: x * 2 + 1, backend="neuron_native")
def right(_=None):
    return torch.equal(compiled(torch.ones(64)), torch.full((64,), 3.0))
def in_child():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(right)
assert right()
os.chdir("/")
print(in_child(), in_child(), right())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "True True True\n"), done.stderr[-3000:]


def test_names_are_registered() -> None:
    assert {"neuron", "neuron_native", "neuron_libtorch_graph_capture"} <= set(torch._dynamo.list_backends())
