"""What every test stands on: no settings of the user's, a cache of its own, and real models."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.models import make_tiny
from vllm_neuron import envs

REPOSITORY = Path(__file__).resolve().parents[1]
MODELS = REPOSITORY / ".cache" / "models"


def pytest_configure(config: pytest.Config) -> None:
    """Give the whole run, and every process that it starts, the environment of a clean account."""
    for variable in envs.VARIABLES:
        for name in (variable.name, *variable.old_names):
            os.environ.pop(name, None)
    # A shell that starts the run in the background has it ignore SIGINT, and so would all that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    cache = tempfile.TemporaryDirectory(prefix="vllm-neuron-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(cache.cleanup)
    os.environ.update(
        VLLM_CACHE_ROOT=cache.name,
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
        TOKENIZERS_PARALLELISM="false",
        VLLM_NO_USAGE_STATS="1",
    )


def _smollm2(dtype: str) -> Path:
    folder = MODELS / f"smollm2-135m-{dtype}"
    command = [sys.executable, str(REPOSITORY / "tools" / "make_smollm2.py"), str(folder), "--dtype", dtype]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The packaged 135M chat model as a float32 checkpoint. Made once per clone (half a minute)."""
    return _smollm2("float32")


@pytest.fixture(scope="session")
def smollm2_bf16() -> Path:
    """The packaged 135M chat model as a bfloat16 checkpoint. Made once per clone (half a minute)."""
    return _smollm2("bfloat16")


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
