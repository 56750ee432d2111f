"""One layer of an LSTM, as a decomposition into its steps: torch leaves it to oneDNN."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear


def lstm_layer(
    x: Tensor,
    input_weight: Tensor,
    hidden_weight: Tensor,
    input_bias: Tensor,
    hidden_bias: Tensor,
    hidden: Tensor,
    cell: Tensor,
    reverse: bool,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``aten.mkldnn_rnn_layer`` of mode LSTM: ``x`` is [steps, batch, inputs], ``hidden`` and ``cell`` [1, batch, n].

    Gives the hidden state of each step, the last states, and no workspace. A layer that runs in reverse still gives the
    steps in their order.
    """
    shape, has_biases = hidden.shape, rest[4]
    gates = linear(x, input_weight, input_bias if has_biases else None)
    hidden, cell = hidden.view(shape[-2:]), cell.view(shape[-2:])
    outputs = []
    for step in reversed(gates.unbind(0)) if reverse else gates.unbind(0):
        sums = step + linear(hidden, hidden_weight, hidden_bias if has_biases else None)
        enter, forget, new, leave = sums.chunk(4, 1)
        cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
        hidden = leave.sigmoid() * cell.tanh()
        outputs.append(hidden)
    steps = torch.stack(outputs[::-1] if reverse else outputs)
    return steps, hidden.view(shape), cell.view(shape), x.new_empty(0)
