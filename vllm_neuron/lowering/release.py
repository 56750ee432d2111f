"""Which torch-mlir the lowering is built for, and whether it is here. Importing this imports neither it nor torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util

PACKAGE = "torch-mlir"
RELEASE = "20261001"
"""What an environment without the package looks traces up with."""


def version() -> str:
    """The installed version; where there is none, the release that this package is built for."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return RELEASE


def installed() -> bool:
    """Whether graphs can be lowered in this environment."""
    return importlib.util.find_spec("torch_mlir") is not None
