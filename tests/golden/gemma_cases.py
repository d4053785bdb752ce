"""Cases of Gemma 3n and 4: layers that read the keys and values of others, per-layer inputs, several residual streams."""

from __future__ import annotations

Options = dict[str, object]

_SLIDING, _FULL = "sliding_attention", "full_attention"
_GEMMA4: Options = {
    **{"head_dim": 12, "global_head_dim": 24, "sliding_window": 11, "hidden_size_per_layer_input": 0},
    **{"num_hidden_layers": 4, "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL]},
}
_SHARED: Options = {
    **{"num_hidden_layers": 6, "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _SLIDING, _FULL]},
    **{"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 20, "sliding_window": 11},
}
_EXPERTS: Options = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 24}
_GEMMA3N: Options = {
    **{**_SHARED, "head_dim": 16, "vocab_size_per_layer_input": 120, "laurel_rank": 12, "altup_num_inputs": 3},
    **{"altup_active_idx": 1, "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0, 0.0, 0.0]},
    **{"intermediate_size": [80, 80, 72, 80, 64, 80]},
}

_UNIFIED = {name: value for name, value in _GEMMA4.items() if name != "hidden_size_per_layer_input"}

CASES: dict[str, tuple[str, Options]] = {
    "gemma4": (
        "gemma4_text",
        {
            **{**_GEMMA4, **_SHARED, "use_double_wide_mlp": True, "vocab_size_per_layer_input": 131},
            **{"final_logit_softcapping": 3.0},
        },
    ),
    "gemma4-dense": (
        "gemma4_text",
        {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "attention_bias": True},
    ),
    "gemma4-unified": (
        "gemma4_unified_text",
        {**_UNIFIED, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "use_bidirectional_attention": "vision"},
    ),
    "gemma4-moe": ("gemma4_text", {**_GEMMA4, **_EXPERTS, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4-moe-shared": (
        "gemma4_text",
        {**_GEMMA4, **_EXPERTS, **_SHARED, "vocab_size_per_layer_input": 131, "tie_word_embeddings": False},
    ),
    "gemma3n": ("gemma3n_text", _GEMMA3N),
    "gemma3n-plain": (
        "gemma3n_text",
        {
            **{**_GEMMA3N, "num_kv_shared_layers": 0, "altup_correct_scale": False, "altup_num_inputs": 2},
            **{"altup_active_idx": 0, "attention_bias": True, "activation_sparsity_pattern": None},
            **{"intermediate_size": 80, "vocab_size_per_layer_input": 131},
        },
    ),
}

_VISION: Options = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2},
    **{"head_dim": 16, "patch_size": 4, "position_embedding_size": 64},
}
_UNIFIED_VISION: Options = {"patch_size": 4, "mm_embed_dim": 32}
WRAPPED: dict[str, tuple[str, str, Options, Options]] = {
    "gemma4-wrapped": ("gemma4", *CASES["gemma4"], _VISION),
    "gemma4-moe-wrapped": ("gemma4", *CASES["gemma4-moe"], _VISION),
    "gemma4-unified-wrapped": ("gemma4_unified", *CASES["gemma4-unified"], _UNIFIED_VISION),
}
"""As dense_cases.WRAPPED. Gemma 3n's wrapper is missing: transformers makes its vision encoder with timm."""
