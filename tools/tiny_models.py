"""Tiny random checkpoints of any causal language model that transformers has, from its configuration class alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 512
LAYERS = 2
HEADS = 4
KEY_VALUE_HEADS = 2

# What makes a model small, by each of the names that configurations give it.
_SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size", "emb_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), KEY_VALUE_HEADS),
    **dict.fromkeys(("head_dim", "global_head_dim", "attention_head_dim", "v_head_dim", "kv_channels"), 16),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("moe_intermediate_size", "expert_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "experts_per_token", "moe_topk", "moe_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "num_expert_group"), 4),
    "topk_group": 2,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 256),
    **dict.fromkeys(("sliding_window", "sliding_window_size"), 24),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"), 32),
    "qk_rope_head_dim": 16,
    "hidden_size_per_layer_input": 16,
    "rotary_dim": 8,
    "first_k_dense_replace": 1,
    "num_kv_shared_layers": 0,
}  # fmt: skip
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def tiny_config(model_type: str) -> Any:
    """The configuration of ``model_type``, with every size that it knows made small. Raises what transformers does."""
    import transformers

    made: type = transformers.CONFIG_MAPPING[model_type]
    default = made()
    text = default.get_text_config(decoder=True)
    known = text.to_dict()
    changes: dict[str, Any] = {name: size for name, size in _SIZES.items() if isinstance(known.get(name), int)}
    changes |= {name: token for name, token in _TOKENS.items() if name in known}
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(known.get(name), list):
            changes[name] = _both_ends(known[name])
    parts = [name for name, value in vars(default).items() if value is text]
    config: Any = type(text)(**changes)
    return made(**{parts[0]: config}) if parts else config


def make_tiny(folder: Path, model_type: str, dtype: str = "float32", seed: int = 0) -> Path:
    """Write a checkpoint with random weights, biases and norms among them, and no tokenizer."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = tiny_config(model_type)
    config.dtype = dtype
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))  # type: ignore[no-untyped-call]
    with torch.no_grad():
        # A mixture's correction of its scores is a buffer.
        biases = [buffer for name, buffer in model.named_buffers() if name.endswith("bias")]
        for parameter in [*model.parameters(), *biases]:
            # Not zeros and ones, under which a bias or a norm that is left out would change nothing.
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return folder


def _both_ends(kinds: list[Any]) -> list[Any]:
    """``LAYERS`` of a model's layer types: the first, and the last."""
    return [*kinds[: LAYERS - 1], kinds[-1]]
