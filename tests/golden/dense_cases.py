"""Cases of families of dense models, and how models whose code lives outside of transformers are stored."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.golden.published_files import MINIMAX_M3

Options = dict[str, object]


def _rope(kind: str, **values: object) -> Options:
    return {"rope_type": kind, "rope_theta": 10000.0, **values}


def _partial(factor: float) -> Options:
    return {"rope_parameters": _rope("default", partial_rotary_factor=factor)}


_LLAMA3 = _rope("llama3", factor=8.0, original_max_position_embeddings=32, low_freq_factor=1.0, high_freq_factor=4.0)
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=16)
_MINISTRAL3 = {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
_OLMO3_ROPES = {
    "full_attention": {**_YARN, "rope_theta": 500000.0},
    "sliding_attention": _rope("default", rope_theta=500000.0),
}
_LAGUNA_ROPES = {
    "full_attention": {**_YARN, "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": _rope("default"),
}
_GPTJ = {"n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 128, "vocab_size": 131, "n_inner": None, "rotary_dim": 8}
_GPT = {name: value for name, value in _GPTJ.items() if name != "rotary_dim"}
_OPT = {"ffn_dim": 80, "word_embed_proj_dim": 48}
_LLAMA4 = {
    "intermediate_size_mlp": 80,
    "moe_layers": [],
    "num_hidden_layers": 4,
    "head_dim": 16,
    "floor_scale": 8,
    "attn_scale": 0.3,
    "attention_chunk_size": 128,
    "rope_parameters": _LLAMA3,
}

_LLAMA4_MOE = {**_LLAMA4, "intermediate_size": 40, "moe_layers": [1, 3], "num_local_experts": 5, "num_experts_per_tok": 2}
_KIMI = {
    **{"q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
}

SHARED_CHOICE: Options = {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "shared", "full"]}
_GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.11, "logits_scaling": 7.0}
_LATENT = {name: _KIMI[name] for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
_LATENT["num_key_value_heads"] = 4
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "head_dim": 16, "num_hidden_layers": 3}

CASES: dict[str, tuple[str, Options]] = {
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "smollm3-window": (
        "smollm3",
        {
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 11,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": _YARN,
        },
    ),
    "olmo3": ("olmo3", {"num_hidden_layers": 4, "sliding_window": 11, "rope_parameters": _OLMO3_ROPES}),
    "olmo": ("olmo", {}),
    "olmo-clip": ("olmo", {"clip_qkv": 0.8, "attention_bias": True, "tie_word_embeddings": True}),
    "cohere2": ("cohere2", {"num_hidden_layers": 4, "sliding_window": 11, "logit_scale": 0.25}),
    "cohere": ("cohere", {"use_qk_norm": True, "logit_scale": 0.5}),
    "cohere-bias": ("cohere", {"attention_bias": True, "tie_word_embeddings": False}),
    "glm4": ("glm4", {"head_dim": 20, **_partial(0.5)}),
    "glm": ("glm", {"head_dim": 16, "attention_bias": False, **_partial(0.5)}),
    "exaone4": ("exaone4", {"num_hidden_layers": 4, "sliding_window": 11, "rope_parameters": _LLAMA3}),
    "exaone4-full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True}),
    "seed-oss": ("seed_oss", {"head_dim": 20, "attention_bias": True, "attention_out_bias": False, "mlp_bias": True}),
    "ministral3": ("ministral3", {"head_dim": 16, "rope_parameters": _MINISTRAL3}),
    "ministral": ("ministral", {"head_dim": 12, "sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"]}),
    "ernie4-5": ("ernie4_5", {"head_dim": 16, "use_bias": True}),
    "hunyuan-dense": (
        "hunyuan_v1_dense",
        {"head_dim": 16, "attention_bias": True, "rope_parameters": _rope("dynamic", alpha=50.0, factor=1.0)},
    ),
    "nemotron": ("nemotron", {"head_dim": 12, "attention_bias": True, "mlp_bias": True, **_partial(0.5)}),
    "starcoder2": ("starcoder2", {"sliding_window": 11}),
    "starcoder2-no-bias": ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "phi": ("phi", _partial(0.5)),
    "phi-qk-norm": ("phi", {"qk_layernorm": True, "head_dim": 12, **_partial(0.5)}),
    "gpt-neox": ("gpt_neox", _partial(0.5)),
    "gpt-neox-sequential": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False, **_partial(0.5)}),
    "gpt-neox-japanese": ("gpt_neox_japanese", {**_partial(0.5), "tie_word_embeddings": False}),
    "gptj": ("gptj", _GPTJ),
    "opt": ("opt", _OPT),
    "biogpt": ("biogpt", {"tie_word_embeddings": False}),
    "openai-gpt": ("openai-gpt", {"n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 128}),
    "opt-350m": ("opt", {**_OPT, "word_embed_proj_dim": 20, "do_layer_norm_before": False}),
    "opt-no-bias": ("opt", {**_OPT, "enable_bias": False, "activation_function": "gelu"}),
    "stablelm": ("stablelm", {"use_qkv_bias": True, **_partial(0.5)}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True, **_partial(0.5)}),
    "arcee": ("arcee", {"head_dim": 12, "mlp_bias": True, "attention_bias": True, "rope_parameters": _YARN}),
    "apertus": ("apertus", {"rope_parameters": _LLAMA3}),
    "helium": ("helium", {"head_dim": 12, "attention_bias": True, "mlp_bias": True}),
    "cwm": ("cwm", {"head_dim": 16, "num_hidden_layers": 3, "sliding_window": 11, "rope_parameters": _LLAMA3}),
    "nanochat": ("nanochat", {"final_logit_softcapping": 3.0, "attention_bias": True}),
    "llama4-dense": ("llama4_text", _LLAMA4),
    "llama4-moe": ("llama4_text", _LLAMA4_MOE),
    "jais2": ("jais2", {}),
    "iquestcoder": ("iquestcoder", {"head_dim": 16, "attention_bias": True}),
    "exaone": ("exaone", {"head_dim": 16, "rope_parameters": _LLAMA3}),
    "vaultgemma": ("vaultgemma", {"head_dim": 20, "sliding_window": 11, "query_pre_attn_scalar": 24}),
    "hyperclovax": ("hyperclovax", {**_GRANITE, "mlp_bias": True}),
    "granite-swa": ("granite_swa", {**_GRANITE, "sliding_window": 11, "layer_rope_theta": [0, 5000.0]}),
    "falcon": ("falcon", {"ffn_hidden_size": 72}),
    "falcon-new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon-one-norm": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    "falcon-rw": ("falcon", {"alibi": True, "parallel_attn": False, "multi_query": False, "bias": True}),
    "falcon-sequential": ("falcon", {"parallel_attn": False, "multi_query": False, "bias": True}),
    "gpt-bigcode": ("gpt_bigcode", _GPT),
    "gpt-bigcode-heads": ("gpt_bigcode", {**_GPT, "multi_query": False, "n_inner": 72}),
    "codegen": ("codegen", _GPTJ),
    "gpt-neo": ("gpt_neo", {"window_size": 11, "attention_types": [[["global", "local"], 1]]}),
    "persimmon": ("persimmon", _partial(0.5)),
    "bloom": ("bloom", {"n_head": 6}),
    "mpt": ("mpt", {"d_model": 48, "n_heads": 6, "n_layers": 2, "attn_config": {"clip_qkv": 0.9}}),
    "youtu": ("youtu", {**_LATENT, "pad_token_id": None}),
}

MIXTURES: dict[str, tuple[str, Options]] = {
    "afmoe": (
        "afmoe",
        {**_EXPERTS, "num_shared_experts": 1, "route_scale": 1.7, "mup_enabled": True, "sliding_window": 11}
        | {"global_attn_every_n_layers": 3},
    ),
    "hy-v3": ("hy_v3", {**_EXPERTS, "mlp_bias": True}),
    "granitemoe-swa": (
        "granitemoe_swa",
        {**_GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 24, "sliding_window": 11},
    ),
    "cohere2-moe": (
        "cohere2_moe",
        {**_EXPERTS, "sliding_window": 11, "sliding_window_pattern": 2, "num_shared_experts": 1, "logit_scale": 0.25}
        | {"prefix_dense_intermediate_size": 56, "first_k_dense_replace": 1},
    ),
    "cohere2-moe-sigmoid": (
        "cohere2_moe",
        {**_EXPERTS, "expert_selection_fn": "sigmoid", "rms_norm_eps": 1e-5, "num_shared_experts": 1}
        | {"shared_expert_combination_strategy": "sum"},
    ),
    "mellum": (
        "mellum",
        {**_EXPERTS, "sliding_window": 11, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"rope_parameters": {**_OLMO3_ROPES, "sliding_attention": _rope("default")}},
    ),
    "laguna": (
        "laguna",
        {**_EXPERTS, "sliding_window": 11, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
        | {"num_attention_heads_per_layer": [4, 6, 2], "shared_expert_intermediate_size": 24}
        | {"moe_routed_scaling_factor": 2.0, "rope_parameters": _LAGUNA_ROPES},
    ),
    "dbrx": (
        "dbrx",
        {"d_model": 48, "n_layers": 2, "n_heads": 4, "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.9, "rope_theta": 400.0}}
        | {
            "max_seq_len": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 400.0},
            "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 5, "moe_top_k": 2},
        },
    ),
    "sarvam-moe": ("sarvam_moe", {**_EXPERTS, "first_k_dense_replace": 1}),
    "sarvam-mla": ("sarvam_mla", {**_KIMI, "q_lora_rank": None, "num_hidden_layers": 2}),
}
"""Mixtures of families that are put together from what others have."""

TORCH_CASES = ("falcon-rw", "openai-gpt", "opt-350m")
"""Which torch runs on a CPU, and nothing on a GPU."""
COMPOSED = (
    *TORCH_CASES,
    *("bloom", "mpt", "biogpt", "gpt-neox-japanese"),
    *("jais2", "iquestcoder", "exaone", "vaultgemma", "hyperclovax", "granite-swa", "falcon", "falcon-one-norm"),
    *("falcon-sequential", "gpt-bigcode-heads", "codegen", "gpt-neo", "persimmon", "youtu"),
    *("hy-v3", "granitemoe-swa", "cohere2-moe-sigmoid", "mellum", "sarvam-moe", "sarvam-mla", "dbrx"),
)
"""Cases whose layers have nothing that layers of other cases do not have."""

_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_QWEN3_VISION: Options = {
    **{"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4, "out_hidden_size": 48},
    **{"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
}
_KIMI_VISION: Options = {**_VISION, "patch_size": 4, "pos_emb_height": 8, "pos_emb_width": 8}
_PIXTRAL = {"model_type": "pixtral", **_VISION, "image_size": 28, "patch_size": 14}

WRAPPED: dict[str, tuple[str, str, Options, Options]] = {
    "mistral3-mistral": ("mistral3", "mistral", {"head_dim": 16, "sliding_window": None}, _PIXTRAL),
    "mistral3-ministral3": ("mistral3", "ministral3", {"head_dim": 16, "rope_parameters": _MINISTRAL3}, _PIXTRAL),
    "qwen3-vl": (
        "qwen3_vl",
        "qwen3_vl_text",
        {"head_dim": 16, "rope_parameters": _rope("default", mrope_section=[4, 2, 2], mrope_interleaved=True)},
        _QWEN3_VISION,
    ),
    "qwen3-vl-moe": (
        "qwen3_vl_moe",
        "qwen3_vl_moe_text",
        {
            **{"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
            **{"num_hidden_layers": 3, "mlp_only_layers": [1]},
            "rope_parameters": _rope("default", mrope_section=[4, 2, 2], mrope_interleaved=True),
        },
        _QWEN3_VISION,
    ),
    "mistral3-mistral4": ("mistral3", "mistral4", {**_KIMI, "rope_parameters": _MINISTRAL3}, _PIXTRAL),
    "kimi-k25": ("kimi_k25", "deepseek_v3", _KIMI, _KIMI_VISION),
    "minimax-m3": ("minimax_m3_vl", "minimax_m3_vl_text", MINIMAX_M3, {**_VISION, "image_size": 28, "patch_size": 14}),
    "internvl": (
        "internvl",
        "qwen3",
        {"head_dim": 16},
        {"model_type": "internvl_vision", **_VISION, "image_size": [28, 28], "patch_size": [14, 14]},
    ),
    "llama4": (
        "llama4",
        "llama4_text",
        _LLAMA4,
        {
            **_VISION,
            "image_size": 28,
            "patch_size": 14,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "vision_output_dim": 32,
        },
    ),
}
"""Case -> wrapper, model type and options of its text, options of its vision encoder."""


def _rename(names: dict[str, str], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in tensors.items():
        for pattern, new in names.items():
            name = re.sub(pattern, new, name)
        found[name] = tensor
    return found


def _pack(tensors: dict[str, torch.Tensor], packed: str, num_kv_heads: int | None) -> dict[str, torch.Tensor]:
    """Join q, k and v of each layer; num_kv_heads: group by group, None: one after the other."""
    found = {}
    for name, tensor in tensors.items():
        if "k_proj" in name or "v_proj" in name:
            continue
        if "q_proj" not in name:
            found[name] = tensor
            continue
        parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
        if num_kv_heads is not None:
            parts = [torch.cat([part.view(num_kv_heads, -1, *part.shape[1:]) for part in parts], 1).flatten(0, 1)]
        found[name.replace("q_proj", packed)] = torch.cat(parts)
    return found


def _as_internlm2(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = {
        **{"embed_tokens": "tok_embeddings", "lm_head": "output", "input_layernorm": "attention_norm"},
        **{"post_attention_layernorm": "ffn_norm", r"self_attn\.o_proj": "attention.wo", "self_attn": "attention"},
        **{r"mlp\.gate_proj": "feed_forward.w1", r"mlp\.up_proj": "feed_forward.w3", r"mlp\.down_proj": "feed_forward.w2"},
    }
    return _rename(names, _pack(tensors, "wqkv", 2))


def _as_mimo(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**tensors, "model.mtp_layers.0.input_proj.weight": torch.zeros(3, 3)}


Convert = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
CONVERTED: dict[str, tuple[str, Options, Options, Convert]] = {
    "internlm2": (
        "llama",
        {"num_key_value_heads": 2},
        {"model_type": "internlm2", "architectures": ["InternLM2ForCausalLM"], "bias": False},
        _as_internlm2,
    ),
    "internlm3": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
        {"model_type": "internlm3", "architectures": ["InternLM3ForCausalLM"], "bias": True, "qkv_bias": True},
        dict,
    ),
    "baichuan": (
        "llama",
        {"num_key_value_heads": 4},
        {"model_type": "baichuan", "architectures": ["BaichuanForCausalLM"]},
        lambda tensors: _pack(tensors, "W_pack", None),
    ),
    "mimo": ("qwen2", {}, {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}, _as_mimo),
}
"""Case -> the model type and options of the model in transformers that it is, what its config.json says, and its tensors."""

ORIGINAL = "original"


def restore_layer_names(folder: Path) -> None:
    """Undo what transformers 5.24 does when it saves Kimi K2.5: it gives layers of text the names of those of images."""
    file = folder / "model.safetensors"
    save_file(_rename({r"^(language_model\.model\.)blocks\.": r"\1layers."}, load_file(file)), file)


def transpose_experts(folder: Path) -> None:
    """Store experts as stacks of [in, out], as the files of Qwen3-VL have them; transformers reads both layouts."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({n: x.transpose(1, 2).contiguous() if ".experts." in n else x for n, x in tensors.items()}, file)


def convert(folder: Path, case: str) -> None:
    """Store a model of transformers as the code of its own does; the original stays in a folder below."""
    _, _, keys, change = CONVERTED[case]
    shutil.copytree(folder, folder / ORIGINAL)
    save_file(
        {name: x.contiguous() for name, x in change(load_file(folder / "model.safetensors")).items()},
        folder / "model.safetensors",
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))
