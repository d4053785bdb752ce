"""Cases of models with a recurrent state next to their KV."""

from __future__ import annotations

Options = dict[str, object]

_DELTA: Options = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 12, "linear_value_head_dim": 20},
    **{"head_dim": 16, "num_hidden_layers": 4},
}
_EXPERTS: Options = {
    **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
}
_LFM2_LAYERS = ["conv", "full_attention", "conv", "conv"]
_LFM2: Options = {"num_hidden_layers": 4, "layer_types": _LFM2_LAYERS, "block_multiple_of": 16}

CASES: dict[str, tuple[str, Options]] = {
    "qwen3-next": ("qwen3_next", {**_DELTA, **_EXPERTS}),
    "qwen3-next-dense": (
        "qwen3_next",
        {
            **{**_DELTA, **_EXPERTS, "mlp_only_layers": [1], "decoder_sparse_step": 2, "norm_topk_prob": False},
            **{"attention_bias": True, "linear_conv_kernel_dim": 3, "linear_num_value_heads": 2, "tie_word_embeddings": True},
        },
    ),
    "qwen3-5": ("qwen3_5_text", _DELTA),
    "qwen3-5-moe": ("qwen3_5_moe_text", {**_DELTA, **_EXPERTS}),
    "lfm2": ("lfm2", _LFM2),
    "lfm2-plain": ("lfm2", {**_LFM2, "block_auto_adjust_ff_dim": False, "conv_bias": True, "conv_L_cache": 4}),
    "lfm2-moe": ("lfm2_moe", {**_LFM2, **_EXPERTS, "num_dense_layers": 1, "routed_scaling_factor": 1.5}),
    "lfm2-moe-plain": ("lfm2_moe", {**_LFM2, **_EXPERTS, "use_expert_bias": False, "norm_topk_prob": False}),
}
MODEL_TYPES: tuple[str, ...] = tuple(dict.fromkeys(model_type for model_type, _ in CASES.values()))

_VISION: Options = {
    **{"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4, "out_hidden_size": 48},
    **{"num_position_embeddings": 16},
}
_ROPE: Options = {
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        **{"mrope_section": [1, 1, 0], "mrope_interleaved": True},
    }
}
WRAPPED: dict[str, tuple[str, str, Options, Options]] = {
    "qwen3-5-wrapped": ("qwen3_5", "qwen3_5_text", {**_DELTA, **_ROPE}, _VISION),
    "qwen3-5-moe-wrapped": ("qwen3_5_moe", "qwen3_5_moe_text", {**_DELTA, **_EXPERTS, **_ROPE}, _VISION),
}
"""As dense_cases.WRAPPED."""
