"""What a preparation of graphs holds against removal from the local tier. The one place that asks the cache for it."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from vllm_neuron.cache.local.pins import Pin
from vllm_neuron.cache.local.tier import LocalTier


class Hold(enum.Enum):
    """Which entries are held until :meth:`Pins.restrict`."""

    NOTHING = enum.auto()
    """Nothing is written into the tier for it."""
    NOTED = enum.auto()
    """Those that have been noted: what else is removed meanwhile can be made again."""
    EVERYTHING = enum.auto()
    """A strict start that misses an entry fails, and it can't tell which it needs before all graphs are captured."""


class Pins:
    """Entries of ``local`` that are not to be removed under this process, until it closes this or ends."""

    def __init__(self, local: LocalTier, hold: Hold) -> None:
        self._pin = None if hold is Hold.NOTHING else Pin(local)
        self._hold = hold
        self._keys: set[str] = set()
        if self._pin is not None and hold is Hold.NOTED:
            self._pin.restrict(self._keys)

    def note(self, key: str) -> None:
        """This process is going to look for ``key``."""
        if self._pin is not None and self._hold is Hold.NOTED:
            self._keys.add(key)
            self._pin.restrict(self._keys)

    def restrict(self, keys: Iterable[str]) -> None:
        """This process uses ``keys`` from here on, and no others."""
        if self._pin is not None:
            self._pin.restrict(keys)

    def close(self) -> None:
        """This process uses nothing any more."""
        if self._pin is not None:
            self._pin.close()
