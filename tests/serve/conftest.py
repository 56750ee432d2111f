"""One server for all tests that only ask: in CPU mode, in development mode, of a model with few rows."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.engine import MODES
from tools.server import Server, serving

ROWS = 1000
BEYOND = 1010  # Of the tokenizer, and not of the model.


@pytest.fixture(scope="session")
def few_rows(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 1000 rows, with a tokenizer of 1024, and with end tokens that it has no row for."""
    import transformers

    made = tmp_path_factory.mktemp("models") / "few-rows"
    transformers.AutoTokenizer.from_pretrained(tiny("llama")).save_pretrained(made)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny("llama"))
    model.resize_token_embeddings(ROWS)
    model.generation_config.eos_token_id = [1, BEYOND, -1]
    model.save_pretrained(made)
    return made


@pytest.fixture(scope="session")
def beyond_text(few_rows: Path) -> str:
    """The text of the token that has no row."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(few_rows)
    text: str = tokenizer.decode([BEYOND])
    assert tokenizer.encode(text, add_special_tokens=False) == [BEYOND]
    return text


@pytest.fixture(scope="session")
def dev_server(few_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serves ``few_rows`` as ``tiny``. Whoever changes its state changes it back."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(few_rows), "--served-model-name", "tiny"]
    sizes = ["--dtype", "float32", "--max-model-len", "64", "--max-num-seqs", "2", "--enable-scale-out"]
    inherited = {name: value for name, value in os.environ.items() if name != "PROMETHEUS_MULTIPROC_DIR"}
    development = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    log = tmp_path_factory.mktemp("server") / "log"
    with serving([*command, *sizes], {**inherited, **MODES["eager"], **development}, log) as running:
        running.wait("a server in CPU mode", Console(quiet=True))
        yield running
