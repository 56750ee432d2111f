"""A stand-in for torchvision, where only an import of it is missed.

PyPI's torchvision does not load beside the torch that is built for CPUs alone ("operator torchvision::nms does not
exist"), and vLLM 0.32 and 0.33 import it, themselves or by way of transformers, for the image processors that share a
module with text models. No image is ever processed here. Checked on torch 2.13.0; can go when PyPI's torchvision loads
beside torch's CPU build, or when vLLM imports it only for models that take images.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "torchvision"


def stand_in_for_torchvision() -> None:
    """Let imports of torchvision and all below it succeed, if there is none; what is then called raises.

    transformers asks whether there is a torchvision, and remembers the answer: it has been asked before.
    """
    if PACKAGE in sys.modules or importlib.util.find_spec(PACKAGE) is not None:
        return
    from transformers.utils.import_utils import is_torchvision_available

    is_torchvision_available()
    sys.meta_path.append(_Finder())


class _Absent(type):
    """The type of whatever is taken from the stand-in: it can be named, subclassed and annotated with, not called."""

    def __getattr__(cls, name: str) -> Any:
        return _absent(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise ModuleNotFoundError(f"{cls.__name__} was called, and {PACKAGE} is not installed", name=PACKAGE)


def _absent(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent(name, (), {})


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _absent(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes after all others."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A module for every name below the package."""
        if fullname.partition(".")[0] != PACKAGE:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """One that has every attribute."""
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """It is complete."""
