"""How far a transfer has come: for those who wait for it, those who watch it, and those who give it up."""

from __future__ import annotations

import threading
from collections.abc import Callable

from vllm_neuron.errors import NeuronError


class Abandoned(NeuronError, OSError):
    """Nobody waits any more for this transfer."""

    code = "transfer-abandoned"


class Progress:
    """Bytes that have been moved so far, counted on any number of threads.

    ``on_bytes`` is called with each amount, one call at a time.
    """

    def __init__(self, on_bytes: Callable[[int], object] = lambda amount: None) -> None:
        self.bytes = 0
        self._on_bytes = on_bytes
        self._abandoned = False
        self._counting = threading.Lock()

    def add(self, amount: int) -> None:
        """Count ``amount`` bytes. Raises ``Abandoned`` where the transfer has been given up: stop it."""
        with self._counting:
            if self._abandoned:
                raise Abandoned("the transfer took too long, and was given up")
            self.bytes += amount
            self._on_bytes(amount)

    def abandon(self) -> None:
        """Let the transfer end at its next step."""
        self._abandoned = True
