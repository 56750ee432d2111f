"""What this package changes of torch in a process, for capture and for ``torch.compile``. Checked on torch 2.13.0."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def accept_recurrent_modules() -> None:
    """Let Dynamo trace LSTM, GRU and RNN modules, which it refuses by default, as torch.export lets it for itself.

    Dynamo asks before it calls a backend: this is to be called where the backends are looked up. Can go when Dynamo
    asks the backend, or allows them.
    """
    torch._dynamo.config.allow_rnn = True


def tracing_what_is_compiled() -> AbstractContextManager[None]:
    """Inside, a trace goes through what the model's code gives to ``torch.compile``: it is a part of the graph.

    By default torch raises there. Can go when ``make_fx`` has an option for it.
    """
    nested: AbstractContextManager[None] = torch._dynamo.config.patch(error_on_nested_fx_trace=False)
    return nested
