"""A logits processor that fails a step when a request asks for it."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor


class FailingProcessor(LogitsProcessor):
    """Raises while a request with ``extra_args={"fail": True}`` joins the batch."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        pass

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        for _, params, *_ in batch_update.added if batch_update else ():
            if (params.extra_args or {}).get("fail"):
                raise RuntimeError("a fault of the test")

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits
