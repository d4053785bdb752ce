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
_LFM3: Options = {
    **{"num_hidden_layers": 5, "head_dim": 16, "sliding_window": 11, "conv_L_cache": 4},
    "layer_types": ["conv", "conv", "full_attention", "conv", "sliding_attention"],
}
_MAMBA2: Options = {
    **{"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 20, "mamba_expand": 2, "mamba_n_groups": 2},
    **{"mamba_chunk_size": 16, "num_hidden_layers": 4},
}
_NEMOTRON: Options = {
    **{"mamba_num_heads": 6, "mamba_head_dim": 12, "ssm_state_size": 20, "n_groups": 2, "chunk_size": 16, "head_dim": 16},
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1},
    **{"moe_shared_expert_intermediate_size": 40, "layer_norm_epsilon": 1e-5},
}
_NEMOTRON_LAYERS = ["linear_attention", "mlp", "linear_attention", "full_attention", "moe"]
_GRANITE: Options = {
    **{**_MAMBA2, "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]},
    **{"num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 40, "attention_multiplier": 0.2},
    **{"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "logits_scaling": 4.0},
}
_FALCON: Options = {
    **{**_MAMBA2, "mamba_d_ssm": 96, "num_hidden_layers": 2, "head_dim": 16, "key_multiplier": 0.6},
    **{"embedding_multiplier": 2.5, "lm_head_multiplier": 0.4, "attention_in_multiplier": 1.3, "attention_out_multiplier": 0.7},
    **{"ssm_in_multiplier": 0.8, "ssm_out_multiplier": 1.2, "ssm_multipliers": [0.9, 1.1, 0.8, 1.3, 0.7]},
    **{"mlp_multipliers": [0.9, 1.4]},
}
_JAMBA: Options = {
    **{"num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 10, "mamba_dt_rank": 5},
    **{"num_experts": 6, "num_experts_per_tok": 3, "use_mamba_kernels": False},
}
_MAMBA1: Options = {"state_size": 10, "time_step_rank": 5, "expand": 2, "num_hidden_layers": 3}
_MAMBA2_ALONE: Options = {
    **{"num_heads": 6, "head_dim": 16, "state_size": 20, "expand": 2, "n_groups": 2, "chunk_size": 16, "num_hidden_layers": 3},
}
_KIMI: Options = {
    **{"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]},
    **{"linear_num_heads": 3, "linear_head_dim": 20, "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_rope_head_dim": 8},
    **{"qk_nope_head_dim": 12, "v_head_dim": 14, "num_experts_per_tok": 3, "num_local_experts": 8},
    **{"moe_intermediate_size": 24},
}
_ZAMBA2: Options = {
    **{
        "n_mamba_heads": 6,
        "mamba_d_state": 20,
        "mamba_ngroups": 2,
        "chunk_size": 16,
        "num_hidden_layers": 4,
        "adapter_rank": 6,
    },
    **{"layers_block_type": ["hybrid", "linear_attention", "hybrid", "hybrid"], "num_mem_blocks": 2},
}

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
    "lfm3": ("lfm3", _LFM3),
    "lfm3-plain": (
        "lfm3",
        {**_LFM3, "use_sandwich_norm": False, "use_attention_gate": False, "conv_bias": True, "tie_word_embeddings": False},
    ),
    "olmo-hybrid": ("olmo_hybrid", {"num_hidden_layers": 4, "rope_parameters": {"rope_type": "default", "rope_theta": None}}),
    "olmo-hybrid-options": (
        "olmo_hybrid",
        {
            **{"num_hidden_layers": 3, "linear_allow_neg_eigval": False, "attention_bias": True, "linear_num_key_heads": 2},
            **{"linear_num_value_heads": 2, "linear_key_head_dim": 12, "linear_value_head_dim": 20},
            **{"linear_conv_kernel_dim": 3},
        },
    ),
    "bamba": ("bamba", {**_MAMBA2, "attn_layer_indices": [1]}),
    "bamba-options": (
        "bamba",
        {
            **{**_MAMBA2, "attn_layer_indices": [0, 3], "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True},
            **{"mamba_conv_bias": False, "mamba_d_conv": 3, "time_step_limit": [0.01, 0.6], "tie_word_embeddings": True},
        },
    ),
    "nemotron-h": ("nemotron_h", {**_NEMOTRON, "layers_block_type": _NEMOTRON_LAYERS}),
    "nemotron-h-options": (
        "nemotron_h",
        {
            **{**_NEMOTRON, "layers_block_type": ["moe", "full_attention", "linear_attention", "mlp"], "n_group": 4},
            **{"topk_group": 2, "moe_latent_size": 20, "mlp_bias": True, "use_bias": True, "use_conv_bias": False},
            **{"time_step_min": 0.3, "routed_scaling_factor": 2.5, "norm_topk_prob": False, "conv_kernel": 3},
        },
    ),
    "granite-hybrid": ("granitemoehybrid", _GRANITE),
    "granite-hybrid-dense": (
        "granitemoehybrid",
        {
            **_GRANITE,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "attention_bias": True,
            "mamba_proj_bias": True,
        },
    ),
    "falcon-h1": ("falcon_h1", _FALCON),
    "falcon-h1-norm": (
        "falcon_h1",
        {
            **{**_FALCON, "mamba_rms_norm": True, "attention_bias": True, "mlp_bias": True, "projectors_bias": True},
            **{"mamba_proj_bias": True, "mamba_d_ssm": None, "mamba_conv_bias": False, "tie_word_embeddings": True},
        },
    ),
    "falcon-h1-gate": ("falcon_h1", {**_FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "jamba": ("jamba", _JAMBA),
    "jamba-dense": (
        "jamba",
        {**_JAMBA, "num_experts": 1, "mamba_conv_bias": False, "mamba_proj_bias": True, "mamba_d_conv": 3},
    ),
    "mamba": ("mamba", _MAMBA1),
    "mamba-options": (
        "mamba",
        {**_MAMBA1, "use_bias": True, "use_conv_bias": False, "conv_kernel": 3, "tie_word_embeddings": False},
    ),
    "falcon-mamba": ("falcon_mamba", _MAMBA1),
    "mamba2": ("mamba2", _MAMBA2_ALONE),
    "mamba2-options": (
        "mamba2",
        {
            **{**_MAMBA2_ALONE, "use_bias": True, "use_conv_bias": False, "conv_kernel": 3, "tie_word_embeddings": True},
            **{"time_step_limit": [0.01, 0.6]},
        },
    ),
    "zamba2": ("zamba2", {**_ZAMBA2, "use_shared_attention_adapter": True, "use_mem_rope": True, "num_key_value_heads": 4}),
    "zamba2-options": (
        "zamba2",
        {
            **{**_ZAMBA2, "num_mem_blocks": 1, "add_bias_linear": True, "time_step_min": 0.3, "tie_word_embeddings": False},
            **{"mamba_d_conv": 3, "use_long_context": True, "hidden_act": "silu"},
        },
    ),
    "minimax": (
        "minimax",
        {
            **{"num_hidden_layers": 4, "head_dim": 16, "intermediate_size": 24, "num_local_experts": 6},
            **{"num_experts_per_tok": 3, "full_attn_alpha_factor": 1.2, "full_attn_beta_factor": 0.8, "mlp_alpha_factor": 1.1},
            **{"linear_attn_alpha_factor": 1.4, "linear_attn_beta_factor": 0.9, "mlp_beta_factor": 1.3},
        },
    ),
    "kimi-linear": ("kimi_linear", _KIMI),
    "kimi-linear-latent": (
        "kimi_linear",
        {**_KIMI, "q_lora_rank": 24, "attention_bias": True, "n_group": 4, "topk_group": 2, "mlp_layer_types": ["sparse"] * 4},
    ),
}
MIXED_CASES = (
    "nemotron-h",
    "qwen3-next",
    "jamba",
    "kimi-linear-latent",
    "lfm2-plain",
    "falcon-h1-norm",
    "nemotron-h-options",
    "zamba2",
)
"""One of each kind of mixer, and of each place of one."""
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
