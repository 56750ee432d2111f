"""Makers of tiny random models with a real tokenizer, offline, the same in every run."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path
from typing import Any

ARCHITECTURES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "phi3",
    "gpt2",
    "opt",
    "mixtral",
    "qwen3_moe",
    "qwen2_moe",
)
MAX_POSITIONS = 512
SLIDING_WINDOW = 24

_SPECIAL = ["<|begin|>", "<|end|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny(folder: Path, architecture: str = "llama", dtype: str = "float32", weights: bool = True) -> Path:
    """Write a checkpoint of one of ``ARCHITECTURES``; without ``weights``, its configuration and tokenizer only.

    Two layers, 4 heads of 32 over 2 key-value heads where the architecture can, a vocabulary of 1024.
    """
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    config = _config(architecture, tokenizer)
    config.dtype = dtype
    if not weights:
        config.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
        config.save_pretrained(folder)
        return folder
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.rand_like(buffer))
    if architecture == "gemma2":
        # Its embeddings are scaled up and also the output head: unless they are small, it repeats its input.
        model.get_input_embeddings().weight.data.mul_(0.05)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    return folder


@functools.cache
def _tokenizer() -> Any:
    """Byte-level BPE, trained on some of Python's own library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:10]
    tokenizer.train([str(file) for file in files], trainer)
    begin = (_SPECIAL[0], tokenizer.token_to_id(_SPECIAL[0]))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin[0]} $A", pair=f"{begin[0]} $A $B", special_tokens=[begin]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=_SPECIAL[0],
        eos_token=_SPECIAL[1],
        pad_token=_SPECIAL[2],
        model_max_length=MAX_POSITIONS,
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast


def _config(architecture: str, tokenizer: Any) -> Any:
    import transformers

    common = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "max_position_embeddings": MAX_POSITIONS,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    # Wide enough weights that greedy text does not fall into one token.
    decoder = {**common, "intermediate_size": 256, "num_key_value_heads": 2, "initializer_range": 0.15}
    headed = {**decoder, "head_dim": 32}
    window = {"sliding_window": SLIDING_WINDOW}
    mixture = {"num_experts_per_tok": 2, "moe_intermediate_size": 96, "num_experts": 4}
    makers: dict[str, Any] = {
        "llama": lambda: transformers.LlamaConfig(**headed, tie_word_embeddings=False),
        "qwen2": lambda: transformers.Qwen2Config(**decoder, tie_word_embeddings=True),
        "qwen3": lambda: transformers.Qwen3Config(**headed, tie_word_embeddings=True),
        "mistral": lambda: transformers.MistralConfig(**headed, **window),
        "gemma2": lambda: transformers.Gemma2Config(**headed, **window, query_pre_attn_scalar=32),
        "phi3": lambda: transformers.Phi3Config(**decoder, tie_word_embeddings=False),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=len(tokenizer), n_positions=MAX_POSITIONS, n_embd=128, n_layer=2, n_head=4,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, initializer_range=0.15,
        ),
        "mixtral": lambda: transformers.MixtralConfig(
            **headed, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
        ),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**headed, **mixture, norm_topk_prob=True),
        "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**decoder, **mixture, shared_expert_intermediate_size=64),
        # Enough experts that a step of one token gathers the weights of those that it chose.
        "glm4_moe": lambda: transformers.Glm4MoeConfig(
            **headed, num_experts_per_tok=2, moe_intermediate_size=96, n_routed_experts=16, n_shared_experts=1,
            n_group=4, topk_group=2, routed_scaling_factor=2.5, first_k_dense_replace=1,
        ),
        "opt": lambda: transformers.OPTConfig(**common, ffn_dim=256, word_embed_proj_dim=128, init_std=0.15),
    }  # fmt: skip
    return makers[architecture]()
