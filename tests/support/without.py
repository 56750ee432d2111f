"""An environment that lacks the compilers, as far as Python's imports can tell."""

from __future__ import annotations

from pathlib import Path

COMPILERS = ("torch_mlir", "jax", "jaxlib", "iree.compiler")
_DISTRIBUTIONS = ("torch-mlir", "jax", "jaxlib", "iree-base-compiler")

_SITE = f"""
import sys
from importlib.machinery import PathFinder

HIDDEN = {COMPILERS!r}


class Without:
    invalidate_caches = PathFinder.invalidate_caches

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in HIDDEN or name.startswith(tuple(hidden + "." for hidden in HIDDEN)):
            return None
        return PathFinder.find_spec(name, path, target)

    @staticmethod
    def find_distributions(*args, **kwargs):
        for found in PathFinder.find_distributions(*args, **kwargs):
            if (found.metadata["Name"] or "").lower().replace("_", "-") not in {_DISTRIBUTIONS!r}:
                yield found


sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
"""


def without_compilers(folder: Path) -> Path:
    """A folder for PYTHONPATH that hides the compilers' packages from a process and its children."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_SITE)
    return folder
