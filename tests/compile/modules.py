"""Small modules in the form that lowering gives, different for every ``factor``."""

from __future__ import annotations

from vllm_neuron.abi import Abi, TensorSpec
from vllm_neuron.lowering.module import LoweredModule


def scale(factor: float) -> LoweredModule:
    """``x * factor`` for x: float32[4]."""
    text = f"""module {{
  func.func @main(%arg0: tensor<4xf32>) -> tensor<4xf32> {{
    %0 = stablehlo.constant dense<{factor:e}> : tensor<4xf32>
    %1 = stablehlo.multiply %arg0, %0 : tensor<4xf32>
    return %1 : tensor<4xf32>
  }}
}}
"""
    spec = TensorSpec("float32", (4,))
    return LoweredModule("stablehlo", text.encode(), Abi((spec,), (spec,)))


def total(count: int) -> LoweredModule:
    """The sum of ``count`` inputs float32[4], which IREE's runtime can't call with more than 31."""
    inputs = ", ".join(f"%arg{index}: tensor<4xf32>" for index in range(count))
    sums = "".join(
        f"    %{index} = stablehlo.add {'%arg0' if index == 1 else f'%{index - 1}'}, %arg{index} : tensor<4xf32>\n"
        for index in range(1, count)
    )
    text = (
        f"module {{\n  func.func @main({inputs}) -> tensor<4xf32> {{\n{sums}"
        f"    return %{count - 1} : tensor<4xf32>\n  }}\n}}\n"
    )
    spec = TensorSpec("float32", (4,))
    return LoweredModule("stablehlo", text.encode(), Abi((spec,) * count, (spec,)))


def broken() -> LoweredModule:
    """No compiler takes it."""
    spec = TensorSpec("float32", (4,))
    return LoweredModule("stablehlo", b"module { func.func @main( }", Abi((spec,), (spec,)))
