"""Calls of real compiled modules, against what torch computes; and what happens to memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from vllm_neuron.abi import Abi, TensorSpec
from vllm_neuron.errors import DamagedEntryError, IncompatibleHostError
from vllm_neuron.runtime.iree import IreeExecutable

Build = Callable[..., Path]

F32 = TensorSpec("float32", (64,))
MLIR_TYPES = {
    "float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16", "int8": "i8", "uint8": "ui8",
    "int16": "i16", "int32": "i32", "int64": "i64", "bool": "i1",
}  # fmt: skip

DOUBLE = """
func.func @main(%x: tensor<64xf32>) -> tensor<64xf32> {
  %0 = stablehlo.add %x, %x : tensor<64xf32>
  return %0 : tensor<64xf32>
}"""
DOUBLE_ABI = Abi((F32,), (F32,))

# Adds a row to a cache at an index, in place, and returns the row's sum with the old and the new values.
CACHE = """
func.func @main(%row: tensor<1x16xf32>, %cache: tensor<8x16xf32> {ALIAS}, %index: tensor<i32>)
    -> (tensor<8x16xf32>, tensor<f32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %none = stablehlo.constant dense<0.0> : tensor<f32>
  %old = stablehlo.dynamic_slice %cache, %index, %zero, sizes = [1, 16]
    : (tensor<8x16xf32>, tensor<i32>, tensor<i32>) -> tensor<1x16xf32>
  %new = stablehlo.add %old, %row : tensor<1x16xf32>
  %out = stablehlo.dynamic_update_slice %cache, %new, %index, %zero
    : (tensor<8x16xf32>, tensor<1x16xf32>, tensor<i32>, tensor<i32>) -> tensor<8x16xf32>
  %sum = stablehlo.reduce(%new init: %none) applies stablehlo.add across dimensions = [0, 1]
    : (tensor<1x16xf32>, tensor<f32>) -> tensor<f32>
  return %out, %sum : tensor<8x16xf32>, tensor<f32>
}"""
CACHE_SPEC = TensorSpec("float32", (8, 16))
CACHE_ABI = Abi(
    (TensorSpec("float32", (1, 16)), CACHE_SPEC, TensorSpec("int32", ())),
    (CACHE_SPEC, TensorSpec("float32", ())),
    aliases=(1,),
)


@pytest.fixture(scope="module")
def double(build: Build) -> IreeExecutable:
    return IreeExecutable(build(DOUBLE), DOUBLE_ABI)


@pytest.fixture(scope="module", params=["{tf.aliasing_output = 0 : i32}", ""], ids=["in-place", "copied"])
def cache(build: Build, request: pytest.FixtureRequest) -> IreeExecutable:
    return IreeExecutable(build(CACHE.replace("{ALIAS}", request.param)), CACHE_ABI)


@pytest.mark.parametrize("shape", [(5, 7), (), (0, 3)], ids=str)
def test_every_dtype_crosses_the_boundary_in_every_shape(build: Build, shape: tuple[int, ...]) -> None:
    types = ["tensor<" + "x".join([*map(str, shape), element]) + ">" for element in MLIR_TYPES.values()]
    arguments = ", ".join(f"%{side}{i}: {of}" for i, of in enumerate(types) for side in "ab")
    body = "\n".join(
        f"%{i} = stablehlo.{'xor' if of.endswith('i1>') else 'add'} %a{i}, %b{i} : {of}" for i, of in enumerate(types)
    )
    results = ", ".join(f"%{i}" for i in range(len(types)))
    outputs = ", ".join(types)
    text = f"func.func @main({arguments}) -> ({outputs}) {{\n{body}\nreturn {results} : {outputs}\n}}"
    specs = tuple(TensorSpec(dtype, shape) for dtype in MLIR_TYPES)
    executable = IreeExecutable(build(text), Abi(tuple(spec for spec in specs for _ in "ab"), specs))
    pairs = [[(torch.rand(shape) * 50).to(getattr(torch, dtype)) for _ in "ab"] for dtype in MLIR_TYPES]
    inputs = [tensor for pair in pairs for tensor in pair]
    for results_of in (executable(inputs), executable.bind(inputs)()):
        for (a, b), result in zip(pairs, results_of, strict=True):
            torch.testing.assert_close(result, a ^ b if a.dtype == torch.bool else a + b, rtol=0, atol=0)


def expected_cache(row: torch.Tensor, cache: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    new = cache.clone()
    new[index] += row[0]
    return new, new[index].sum()


@pytest.mark.parametrize("layout", ["plain", "unaligned", "transposed", "strided"])
def test_mutated_input_is_changed_in_its_own_storage(cache: IreeExecutable, layout: str) -> None:
    base = torch.randn(512)
    tensor = {
        "plain": base[:128].view(8, 16),
        "unaligned": base[1:129].view(8, 16),
        "transposed": base[:128].view(16, 8).t(),
        "strided": base[:512].view(8, 64)[:, ::4],
    }[layout]
    row = torch.randn(1, 16)
    for index in (3, 7, 3):
        expected, total = expected_cache(row, tensor, index)
        (result,) = cache([row, tensor, torch.tensor(index, dtype=torch.int32)])
        torch.testing.assert_close(tensor, expected)
        torch.testing.assert_close(result, total)


def test_what_surrounds_a_mutated_input_stays(cache: IreeExecutable) -> None:
    base = torch.zeros(512)
    cache([torch.ones(1, 16), base[1:129].view(8, 16), torch.tensor(0, dtype=torch.int32)])
    assert base.nonzero().flatten().tolist() == list(range(1, 17))


def test_bound_call_sees_what_its_inputs_hold_at_the_time(cache: IreeExecutable) -> None:
    row, tensor, index = torch.ones(1, 16), torch.zeros(8, 16), torch.tensor(0, dtype=torch.int32)
    address = tensor.data_ptr()
    call = cache.bind([row, tensor, index])
    earlier: list[torch.Tensor] = []
    for step in range(6):
        row.fill_(step)
        index.fill_(step % 2)
        expected, total = expected_cache(row, tensor, step % 2)
        (result,) = call()
        torch.testing.assert_close(tensor, expected)
        torch.testing.assert_close(result, total)
        earlier.append(result)
    assert tensor.data_ptr() == address
    assert [float(result) for result in earlier] == [0, 16, 32, 64, 96, 144]


def test_bound_call_keeps_its_inputs(double: IreeExecutable) -> None:
    call = double.bind([torch.full((64,), 3.0)])
    junk = [torch.full((64,), float("nan")) for _ in range(1000)]
    assert torch.equal(call()[0], torch.full((64,), 6.0))
    assert len(junk) == 1000


def test_results_are_of_storage_of_their_own(build: Build) -> None:
    text = """
    func.func @main(%x: tensor<64xf32>) -> (tensor<64xf32>, tensor<64xf32>, tensor<64xf32>) {
      %0 = stablehlo.add %x, %x : tensor<64xf32>
      return %x, %0, %0 : tensor<64xf32>, tensor<64xf32>, tensor<64xf32>
    }"""
    executable = IreeExecutable(build(text), Abi((F32,), (F32, F32, F32)))
    x = torch.arange(64.0)
    for results in (executable([x]), executable.bind([x])()):
        assert len({x.data_ptr(), *(result.data_ptr() for result in results)}) == 4
        for result in results:
            result.zero_()
        assert torch.equal(x, torch.arange(64.0))


def test_results_outlive_the_executable_and_its_file(build: Build) -> None:
    artifact = build(DOUBLE)
    executable = IreeExecutable(artifact, DOUBLE_ABI)
    call = executable.bind([torch.arange(64.0)])
    results = [call()[0] for _ in range(50)] + [executable([torch.arange(64.0)])[0] for _ in range(50)]
    del executable, call
    artifact.unlink()
    gc.collect()
    again = IreeExecutable(build(DOUBLE), DOUBLE_ABI)
    for _ in range(100):
        again([torch.zeros(64)])
    assert all(torch.equal(result, torch.arange(64.0) * 2) for result in results)
    results[0].add_(1)


def test_calls_do_not_pile_up_memory(build: Build) -> None:
    spec = TensorSpec("float32", (1 << 20,))
    executable = IreeExecutable(build(DOUBLE.replace("64xf32", "1048576xf32")), Abi((spec,), (spec,)))
    unaligned = torch.zeros((1 << 20) + 1)[1:]
    call = executable.bind([torch.zeros(1 << 20)])
    executable([unaligned]), call()
    before = psutil.Process().memory_info().rss
    for _ in range(100):
        executable([unaligned]), call()
    assert psutil.Process().memory_info().rss - before < 100 << 20


def test_takes_parameters(double: IreeExecutable) -> None:
    parameter = torch.nn.Parameter(torch.ones(64))
    assert torch.equal(double([parameter])[0], torch.full((64,), 2.0))
    assert not double.bind([parameter])()[0].requires_grad


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "takes 1 inputs, and 0 were given"),
        ([torch.zeros(64), torch.zeros(64)], "takes 1 inputs, and 2 were given"),
        ([torch.zeros(63)], r"input 0 is float32\[63\]; expected float32\[64\]"),
        ([torch.zeros(64, 1)], r"input 0 is float32\[64,1\]; expected float32\[64\]"),
        ([torch.zeros(64, dtype=torch.float64)], r"input 0 is float64\[64\]; expected float32\[64\]"),
        ([torch.zeros(64, device="meta")], r"input 0 is on meta; expected a tensor float32\[64\] on the CPU"),
        ([[0.0] * 64], r"input 0 is a list; expected a tensor float32\[64\]"),
    ],
)
def test_input_that_does_not_fit(double: IreeExecutable, inputs: list[torch.Tensor], message: str) -> None:
    for use in (double, double.bind):
        with pytest.raises((TypeError, ValueError), match=message):
            use(inputs)


def test_bind_refuses_what_it_would_have_to_copy(double: IreeExecutable) -> None:
    with pytest.raises(ValueError, match=r"input 0 \(float32\[64\]\) can't be bound.*a multiple and 4 bytes"):
        double.bind([torch.zeros(65)[1:]])
    with pytest.raises(ValueError, match=r"strides are \(2,\)"):
        double.bind([torch.zeros(128)[::2]])


def test_file_that_is_no_module(tmp_path: Path, build: Build) -> None:
    whole = build(DOUBLE).read_bytes()
    path = tmp_path / "graph.vmfb"
    with pytest.raises(DamagedEntryError, match=r"graph\.vmfb can't be loaded: no such file"):
        IreeExecutable(path, DOUBLE_ABI)
    for damaged in (b"", b"junk" * 1000, whole[: len(whole) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(DamagedEntryError, match=r"graph\.vmfb can't be loaded"):
            IreeExecutable(path, DOUBLE_ABI)


def test_module_without_main(build: Build) -> None:
    with pytest.raises(DamagedEntryError, match="it has no function main"):
        IreeExecutable(build(DOUBLE.replace("@main", "@other")), DOUBLE_ABI)


def test_artifact_for_another_kind_of_processor(build: Build) -> None:
    other = "cpu:x86-64-v2" if os.uname().machine == "aarch64" else "cpu:aarch64"
    with pytest.raises(IncompatibleHostError, match=r"can't be loaded: .*INCOMPATIBLE"):
        IreeExecutable(build(DOUBLE, other), DOUBLE_ABI)


def test_dtype_that_can_not_cross(build: Build) -> None:
    with pytest.raises(ValueError, match=r"can't be handed a tensor float8_e4m3fn\[64\]"):
        IreeExecutable(build(DOUBLE), Abi((TensorSpec("float8_e4m3fn", (64,)),), (F32,)))
    with pytest.raises(ValueError, match="'nonsense' is not a dtype"):
        IreeExecutable(build(DOUBLE), Abi((TensorSpec("nonsense", (64,)),), (F32,)))
