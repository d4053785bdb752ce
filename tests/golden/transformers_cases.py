"""Tiny random checkpoints of types that run with model_impl "transformers", and of types that it refuses."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

VOCAB_SIZE, MAX_POSITIONS = 131, 128
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": MAX_POSITIONS,
    **_IDS,
}
_MULTI_HEAD = {**_LLAMA, "num_key_value_heads": 4}
_GPT = {"vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": MAX_POSITIONS, **_IDS}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_PATTERN = ["sliding_attention", "full_attention", "sliding_attention"]
_WINDOW = {"sliding_window": 11, "layer_types": _PATTERN}

_LATENT = {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}

OWN_TYPES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "gemma3_text": {**_LLAMA, **_WINDOW, "head_dim": 16, "query_pre_attn_scalar": 16},
    "gpt_oss": {**_LLAMA, **_EXPERTS, **_WINDOW, "head_dim": 16},
    "persimmon": _MULTI_HEAD,
    "vaultgemma": {**_LLAMA, **_WINDOW, "head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
}
"""Types that quire has an implementation of, too."""

OTHER_TYPES: dict[str, dict[str, Any]] = {
    "diffllama": _LLAMA,
    "jetmoe": {**_LLAMA, **_EXPERTS, "kv_channels": 16},
    "bitnet": _LLAMA,
    "ctrl": {**_GPT, "dff": 96},
    "longcat_flash": {
        **_MULTI_HEAD,
        **_LATENT,
        "head_dim": 8,
        "num_layers": 2,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "n_routed_experts": 4,
        "moe_topk": 2,
        "zero_expert_num": 2,
    },
}
"""Types that run on the paged cache by way of the library only."""


def make_model(model_type: str, folder: Path, **changes: Any) -> PreTrainedModel:
    """Write a random checkpoint of a type; return the model, in float32."""
    options = {**OWN_TYPES, **OTHER_TYPES}.get(model_type, _LLAMA)
    config = CONFIG_MAPPING[model_type](**{**options, **changes})
    torch.manual_seed(zlib.crc32(model_type.encode()))
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases are random too, so that a forgotten one shows.
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.12)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model
