"""An HLO module as StableHLO that IREE compiles soundly: rewritten as the modules of the native route are."""

from __future__ import annotations

from typing import Any

from vllm_neuron.lowering.module import LoweredModule
from vllm_neuron.lowering.stablehlo import copy_insertion, dispatches, rewrites

_SIMPLIFY = "func.func(stablehlo-aggressive-simplification)"
# Its last step takes CHLO apart; the others find nothing of torch's to do.
_WITHOUT_CHLO = "builtin.module(inline,symbol-dce,torch-backend-to-stablehlo-backend-pipeline{allow-non-finites=true})"
_CLEAN = f"builtin.module(inline,{_SIMPLIFY},canonicalize,cse,symbol-dce,strip-debuginfo)"


def hlo_to_stablehlo(module: LoweredModule) -> bytes:
    """StableHLO text of one function ``main``, for the calling convention ``module.abi``."""
    converted = _parse(_generic_text(module.data))
    _run(converted, _WITHOUT_CHLO)
    _run(converted, _CLEAN)
    rewrites.rewrite(converted)
    _run(converted, _CLEAN)
    dispatches.split_wide(converted)
    copy_insertion.insert_copies(converted, module.abi.aliases)
    text: str = converted.operation.get_asm(enable_debug_info=False)
    return text.encode()


def _generic_text(data: bytes) -> str:
    """JAX's bindings and torch-mlir's are two builds of MLIR: what goes from one to the other is plain text."""
    from jax._src.interpreters import mlir
    from jaxlib import _jax
    from jaxlib.mlir import ir

    with mlir.make_ir_context():
        parsed = ir.Module.parse(_jax.mlir.hlo_to_stablehlo(data))
        # They are of a dialect that torch-mlir does not know; aliases are marked anew.
        for name in [attribute for attribute in parsed.operation.attributes if attribute.startswith("mhlo.")]:
            del parsed.operation.attributes[name]
        text = str(parsed.operation.get_asm(print_generic_op_form=True, enable_debug_info=False))
    # HLO has instructions (``erf``, ``sinh``, ...) that StableHLO leaves to CHLO.
    return text.replace('"mhlo.', '"chlo.')


def _parse(text: str) -> Any:
    from torch_mlir import ir
    from torch_mlir.dialects import torch as torch_dialect

    with ir.Context() as context:
        torch_dialect.register_dialect(context)
        # A pass loads the dialects that it may create: nothing else would load StableHLO and CHLO.
        _run(ir.Module.parse("func.func @main() { return }"), _WITHOUT_CHLO)
        return ir.Module.parse(text)


def _run(module: Any, pipeline: str) -> None:
    from torch_mlir.passmanager import PassManager

    with module.context:
        PassManager.parse(pipeline).run(module.operation)
