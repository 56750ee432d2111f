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


def broken() -> LoweredModule:
    """No compiler takes it."""
    spec = TensorSpec("float32", (4,))
    return LoweredModule("stablehlo", b"module { func.func @main( }", Abi((spec,), (spec,)))
