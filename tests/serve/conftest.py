"""Tiny models, and the modes in which they are served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.models import make_tiny


@pytest.fixture(params=["eager", pytest.param("compiled", marks=pytest.mark.slow)], scope="session")
def mode(request: pytest.FixtureRequest) -> str:
    """``eager`` is CPU mode, ``compiled`` runs artifacts."""
    found: str = request.param
    return found


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a tiny checkpoint of an architecture, once."""
    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = make_tiny(tmp_path_factory.mktemp("models") / architecture, architecture)
        return made[architecture]

    return make


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint's configuration and tokenizer, without weights."""
    return make_tiny(tmp_path_factory.mktemp("models") / "config-only", "llama", weights=False)
