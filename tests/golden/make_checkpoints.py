"""Make tiny random checkpoints of every family with transformers, and load them there as the reference.

Each case exercises the options of its family; norms and biases are random, so that a forgotten one shows.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM

from tests.golden import dense_cases, gemma_cases, recurrent_cases
from tests.golden.dense_cases import CONVERTED, ORIGINAL, WRAPPED, convert, restore_layer_names, transpose_experts
from tests.golden.published_files import DEEPSEEK_V4, MIMO_V2_FLASH, publish, split_convolutions

_OWN_CLASSES = {"mistral4": Mistral4ForCausalLM}
"""Of types whose language model AutoModelForCausalLM does not know by itself."""
_ALL_WRAPPED = {**WRAPPED, **gemma_cases.WRAPPED, **recurrent_cases.WRAPPED}
Style = Literal["v5", "v4"]
MAX_POSITIONS = 128

_BASE = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _rope(kind: str, **values: object) -> dict[str, object]:
    return {"rope_type": kind, "rope_theta": 10000.0, **values}


_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=16)
_LONG_YARN = {**_YARN, "original_max_position_embeddings": 1024}  # long enough for beta_fast and truncate to matter
_LLAMA3 = _rope("llama3", factor=8.0, original_max_position_embeddings=32, low_freq_factor=1.0, high_freq_factor=4.0)
_GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.4],
    "long_factor": [1.5, 2.5, 4.0, 7.0],
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.5,
}
_PHI3_LONG = {
    "hidden_size": 64,
    "rope_parameters": _LONGROPE,
    "original_max_position_embeddings": 32,
}
_QWEN3_MOE = {
    "moe_intermediate_size": 40,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "head_dim": 16,
}
_GPT2 = {"n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": MAX_POSITIONS, "vocab_size": 131, "n_inner": None}
_GPT_OSS = {
    "head_dim": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 11,
    "swiglu_limit": 2.0,
    "rope_parameters": {**_LONG_YARN, "rope_theta": 150000.0, "truncate": False},
}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.11,
    "logits_scaling": 7.0,
}

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
_DEEPSEEK_MOE = {
    **_EXPERTS,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
    "num_hidden_layers": 3,
}
_LATENT = {
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "num_key_value_heads": 4,
}
# So many heads that one at least is above 0 for every key: keys with equal scores may be chosen in any order.
_INDEXER = {"index_head_dim": 12, "index_n_heads": 24, "index_topk": 9}
_MSCALE_YARN = {**_LONG_YARN, "mscale": 0.8, "mscale_all_dim": 1.2}
_MIXTURES: dict[str, tuple[str, dict[str, object]]] = {
    "qwen2-moe": (
        "qwen2_moe",
        {**_EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 56, "norm_topk_prob": True, "decoder_sparse_step": 1},
    ),
    "qwen2-moe-window": (
        "qwen2_moe",
        {
            **_EXPERTS,
            "num_experts": 5,
            "shared_expert_intermediate_size": 24,
            "use_sliding_window": True,
            "sliding_window": 11,
            "max_window_layers": 2,
            "mlp_only_layers": [1],
            "num_hidden_layers": 3,
            "qkv_bias": False,
        },
    ),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "olmoe-renorm": ("olmoe", {"num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True, "attention_bias": True}),
    "flex-olmo": ("flex_olmo", {"num_experts": 5, "num_experts_per_tok": 3}),
    "glm4-moe": ("glm4_moe", {**_DEEPSEEK_MOE, "head_dim": 16, "attention_bias": True, "use_qk_norm": True}),
    "glm4-moe-no-renorm": (
        "glm4_moe",
        {**_DEEPSEEK_MOE, "head_dim": 20, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
    ),
    "minimax-m2": (
        "minimax_m2",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 40,
            "head_dim": 16,
            "rope_parameters": _rope("default", partial_rotary_factor=0.5),
        },
    ),
    "ernie4-5-moe": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 40,
            "moe_layer_end_index": 2,
            "num_hidden_layers": 4,
            "tie_word_embeddings": False,
        },
    ),
    "ernie4-5-moe-bias": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 5,
            "moe_k": 2,
            "moe_intermediate_size": 40,
            "moe_layer_start_index": 0,
            "moe_layer_interval": 2,
            "moe_layer_end_index": -1,
            "moe_num_shared_experts": 1,
            "use_bias": True,
            "num_hidden_layers": 3,
            "tie_word_embeddings": False,
        },
    ),
    "hunyuan-moe": ("hunyuan_v1_moe", {"num_experts": 6, "moe_topk": [2, 3], "head_dim": 16}),
    "hunyuan-moe-alpha": (
        "hunyuan_v1_moe",
        {"num_experts": 4, "moe_topk": 2, "head_dim": 16, "rope_parameters": _rope("dynamic", alpha=50.0, factor=1.0)},
    ),
    "phimoe": (
        "phimoe",
        {
            "num_local_experts": 6,
            "attention_bias": True,
            "lm_head_bias": True,
            "router_jitter_noise": 0.2,
            "sliding_window": 11,
        },
    ),
    "phimoe-longrope": (
        "phimoe",
        {
            "num_local_experts": 5,
            "original_max_position_embeddings": 32,
            "hidden_size": 64,
            "rope_parameters": {
                **{key: value for key, value in _LONGROPE.items() if key != "partial_rotary_factor"},
                "short_factor": [1.0, 1.1, 1.2, 1.4, 1.5, 1.6, 1.8, 2.0],
                # transformers takes the short ones at every length (its forward asks for frequencies without one), the model's
                # authors and quire the long ones in longer sequences.
                "long_factor": [1.0, 1.1, 1.2, 1.4, 1.5, 1.6, 1.8, 2.0],
                "short_mscale": 1.2,
                "long_mscale": 1.2,
            },
        },
    ),
    "granitemoe": ("granitemoe", {**_GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "granitemoe-shared": (
        "granitemoeshared",
        {**_GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 24, "attention_bias": True},
    ),
    "dots1": ("dots1", {**_DEEPSEEK_MOE, "head_dim": 16, "sliding_window": None}),
    "dots1-window": ("dots1", {**_DEEPSEEK_MOE, "head_dim": 16, "sliding_window": 11, "max_window_layers": 1}),
    "solar-open": ("solar_open", {**_DEEPSEEK_MOE, "head_dim": 16, "num_hidden_layers": 2, "attention_bias": True}),
    "exaone-moe": (
        "exaone_moe",
        {
            **{key: value for key, value in _DEEPSEEK_MOE.items() if key not in ("n_routed_experts", "n_shared_experts")},
            "num_experts": 8,
            "num_shared_experts": 1,
            "head_dim": 16,
            "sliding_window": 11,
            "sliding_window_pattern": 3,
            "num_hidden_layers": 4,
        },
    ),
    "deepseek-v2": (
        "deepseek_v2",
        {
            **_DEEPSEEK_MOE,
            **_LATENT,
            "topk_method": "group_limited_greedy",
            "norm_topk_prob": False,
            "rope_parameters": _MSCALE_YARN,
        },
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        {**_DEEPSEEK_MOE, **_LATENT, "q_lora_rank": None, "norm_topk_prob": False, "attention_bias": True},
    ),
    "deepseek-v3": ("deepseek_v3", {**_DEEPSEEK_MOE, **_LATENT, "rope_parameters": _MSCALE_YARN}),
    "deepseek-v3-halves": (
        "deepseek_v3",
        {**_DEEPSEEK_MOE, **_LATENT, "rope_interleave": False, "q_lora_rank": None, "attention_bias": True},
    ),
    "glm4-moe-lite": (
        "glm4_moe_lite",
        {**_DEEPSEEK_MOE, **_LATENT, "mlp_layer_types": ["dense", "sparse", "sparse"], "n_group": 1, "topk_group": 1},
    ),
    "mistral4": (
        "mistral4",
        {
            **_DEEPSEEK_MOE,
            **_LATENT,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
    ),
    "deepseek-v32": ("deepseek_v32", {**_DEEPSEEK_MOE, **_LATENT, **_INDEXER, "rope_parameters": _MSCALE_YARN}),
    "glm-moe-dsa": ("glm_moe_dsa", {**_DEEPSEEK_MOE, **_LATENT, **_INDEXER, **dense_cases.SHARED_CHOICE}),
    "deepseek-v4": ("deepseek_v4", {**DEEPSEEK_V4, **_INDEXER, "index_topk": 5, "rope_parameters": _LONG_YARN}),
    "mimo-v2-flash": ("mimo_v2_flash", MIMO_V2_FLASH),
    "minicpm3": ("minicpm3", {**_LATENT, "scale_emb": 3.0, "scale_depth": 1.4, "dim_model_base": 16}),
}

_CONFIGS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 20, "tie_word_embeddings": True}),
    "llama-linear": ("llama", {"rope_parameters": _rope("linear", factor=3.0)}),
    "llama-dynamic": ("llama", {"rope_parameters": _rope("dynamic", factor=2.0), "max_position_embeddings": 32}),
    "llama-llama3": ("llama", {"rope_parameters": _LLAMA3, "head_dim": 16}),
    "llama-yarn": ("llama", {"rope_parameters": _YARN, "head_dim": 16}),
    "llama-yarn-factor": (
        "llama",
        {"rope_parameters": {**_LONG_YARN, "attention_factor": 0.9, "beta_fast": 8.0, "beta_slow": 2.0}, "head_dim": 16},
    ),
    "llama-yarn-mscale": (
        "llama",
        {"rope_parameters": {**_LONG_YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}, "head_dim": 16},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 11, "head_dim": 20}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 20, "tie_word_embeddings": True}),
    "qwen3-bias": ("qwen3", {"head_dim": 16, "attention_bias": True, "rope_parameters": _YARN}),
    "gemma": ("gemma", {"head_dim": 20, "num_key_value_heads": 1}),
    "gemma2": ("gemma2", {"head_dim": 20, "sliding_window": 11, "query_pre_attn_scalar": 24, "num_hidden_layers": 3}),
    "gemma2-no-cap": ("gemma2", {"head_dim": 20, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 20,
            "sliding_window": 11,
            "query_pre_attn_scalar": 24,
            "num_hidden_layers": 7,
            "rope_parameters": _GEMMA_ROPES,
        },
    ),
    "gemma3-multimodal": ("gemma3", {}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3-window": (
        "phi3",
        {"sliding_window": 11, "hidden_size": 64, "rope_parameters": _rope("default", partial_rotary_factor=0.75)},
    ),
    "phi3-longrope": ("phi3", _PHI3_LONG),
    "gpt2": ("gpt2", _GPT2),
    "gpt2-scaled": (
        "gpt2",
        {**_GPT2, "scale_attn_by_inverse_layer_idx": True, "n_inner": 72, "activation_function": "gelu_pytorch_tanh"},
    ),
    "olmo2": ("olmo2", {}),
    "olmo2-bias": ("olmo2", {"attention_bias": True, "rope_parameters": _rope("default", rope_theta=500000.0)}),
    "gpt-oss": ("gpt_oss", _GPT_OSS),
    "gpt-oss-no-bias": (
        "gpt_oss",
        {**_GPT_OSS, "attention_bias": False, "swiglu_limit": 1.25, "swiglu_alpha": 0.9, "head_dim": 20},
    ),
    "granite": ("granite", _GRANITE),
    "granite-bias": ("granite", {**_GRANITE, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None}),
    "mixtral-window": (
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 11, "head_dim": 20},
    ),
    "qwen3-moe": ("qwen3_moe", {**_QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3-moe-no-renorm": (
        "qwen3_moe",
        {**_QWEN3_MOE, "norm_topk_prob": False, "use_sliding_window": True, "sliding_window": 11},
    ),
    "qwen3-moe-sparse-step": (
        "qwen3_moe",
        {**_QWEN3_MOE, "norm_topk_prob": True, "decoder_sparse_step": 2, "num_hidden_layers": 4},
    ),
    "qwen3-moe-mlp-only": ("qwen3_moe", {**_QWEN3_MOE, "norm_topk_prob": True, "mlp_only_layers": [1], "num_hidden_layers": 3}),
}

_MIXTURES |= dense_cases.MIXTURES
_CONFIGS |= _MIXTURES

CASES: tuple[str, ...] = tuple(_CONFIGS)
DENSE_CASES: tuple[str, ...] = (*dense_cases.CASES, *WRAPPED, *CONVERTED)
"""Further families, of which the fast tests compare logits only; the others run with `-m slow`."""
ALL_CASES: tuple[str, ...] = (*CASES, *DENSE_CASES)
_LIKE_OTHERS = (
    *("llama-mha", "llama-head-dim", "llama-linear", "llama-dynamic", "llama-llama3", "llama-yarn-factor", "llama-yarn-mscale"),
    *("qwen2-window", "qwen2-moe-window", "dots1-window", "smollm3-window", "phi3-window", "mixtral-window", "gemma2-no-cap"),
    *("phimoe-longrope", "olmoe-renorm", "glm4-moe-no-renorm", "qwen3-moe-no-renorm", "hunyuan-moe-alpha"),
    *("deepseek-v3-halves", "olmo-clip", "exaone4-full", "gpt-oss-no-bias", "starcoder2-no-bias", "opt-no-bias"),
    *dense_cases.COMPOSED,
)
STRUCTURES: tuple[str, ...] = tuple(case for case in ALL_CASES if case not in _LIKE_OTHERS)
"""Without cases that differ from another of their family in rotations, windows or numbers only, or by having less."""
QUICK_MIXTURES = ("qwen2-moe", "glm4-moe", "phimoe", "deepseek-v3")
"""Those that the fast tests take of _MIXTURES: together they have most of what the others have."""
INDEXED_CASES: tuple[str, ...] = ("deepseek-v32", "glm-moe-dsa")
"""Whose keys are chosen by an indexer."""
TORCH_CASES: tuple[str, ...] = (*dense_cases.TORCH_CASES, "deepseek-v4", "minimax-m3")
"""Which no native kernel runs."""
LATENT_CASES: tuple[str, ...] = (
    *(name for name, (_, options) in {**_CONFIGS, **dense_cases.CASES}.items() if "kv_lora_rank" in options),
    *(name for name, (_, _, text, _) in WRAPPED.items() if "kv_lora_rank" in text),
)
"""With multi-head latent attention, which quire absorbs and transformers does not: in bfloat16 they round in other places."""


def cases_by_type() -> dict[str, list[str]]:
    """Return the cases of each model type; wrappers count for the type of their text."""
    plain = {**_CONFIGS, **dense_cases.CASES, **recurrent_cases.CASES, **gemma_cases.CASES}
    types = {name: case[0] for name, case in plain.items()} | {name: case[1] for name, case in _ALL_WRAPPED.items()}
    types |= {name: str(keys["model_type"]) for name, (_, _, keys, _) in CONVERTED.items()}
    found: dict[str, list[str]] = {}
    for name, model_type in types.items():
        found.setdefault("gemma3_text" if model_type == "gemma3" else model_type, []).append(name)
    return found


def case_params(cases: Iterable[str] = ALL_CASES) -> list[object]:
    """Return cases as parameters of a test; most mixtures are slow, and further dense families, which a fast test compares."""
    is_slow = {name: name in DENSE_CASES or (name in _MIXTURES and name not in QUICK_MIXTURES) for name in cases}
    return [pytest.param(name, marks=pytest.mark.slow) if slow else name for name, slow in is_slow.items()]


def make_checkpoint(name: str, folder: Path, style: Style = "v5") -> Path:
    """Write the checkpoint of a case into `folder`, made if need be, and return it.

    style  of config.json: "v5" as transformers 5 saves it, "v4" as hub files until 2025 are
    """
    config = _config_of(name)
    torch.manual_seed(0)
    model = _make_model(config, name)
    _randomise(model, name)
    model.save_pretrained(folder)
    if name in CONVERTED:
        convert(folder, name)
    if name == "kimi-k25":
        restore_layer_names(folder)
    if name.startswith("olmo-hybrid"):
        split_convolutions(folder)
    if name == "qwen3-vl-moe":
        transpose_experts(folder)
    if style == "v4":
        rewrite_as_v4(folder)
    return folder


def _make_model(config: PretrainedConfig, name: str) -> PreTrainedModel:
    if config.model_type in _OWN_CLASSES:
        return _class_of(config.model_type)._from_config(config)
    return (AutoModelForImageTextToText if name in _ALL_WRAPPED else AutoModelForCausalLM).from_config(config)


def _config_of(name: str) -> PretrainedConfig:
    if name in _ALL_WRAPPED:
        wrapper, text_type, options, vision = _ALL_WRAPPED[name]
        text = {"model_type": text_type, **_settings(text_type, options)}
        return AutoConfig.for_model(wrapper, text_config=text, vision_config=vision)
    model_type, options = (
        CONVERTED[name][:2]
        if name in CONVERTED
        else {**_CONFIGS, **dense_cases.CASES, **recurrent_cases.CASES, **gemma_cases.CASES}[name]
    )
    return (
        _multimodal_config() if model_type == "gemma3" else AutoConfig.for_model(model_type, **_settings(model_type, options))
    )


def copy_as_v4(source: Path, folder: Path) -> Path:
    """Copy a v5 checkpoint and rewrite its config.json in the v4 style; returns `folder`."""
    shutil.copytree(source, folder)
    rewrite_as_v4(folder)
    return folder


def reference_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the model in eval mode, with the plain attention (not where it adds ALiBi twice: Falcon) and loop over experts."""
    folder = folder / ORIGINAL if (folder / ORIGINAL).is_dir() else folder
    config = json.loads((folder / "config.json").read_text())
    model_type = config["model_type"]
    options: dict[str, str] = {"attn_implementation": "sdpa" if model_type == "falcon" and config.get("alibi") else "eager"}
    if model_type in {wrapper for wrapper, *_ in _ALL_WRAPPED.values()}:
        if model_type in ("gemma4", "qwen3_5_moe", "qwen3_vl_moe", "minimax_m3_vl"):
            options["experts_implementation"] = "eager"
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, **options).eval()
        # Without images Llama 4's own forward fails in transformers 5.24: it reads what only images have.
        return model.language_model if model_type == "llama4" else model
    if model_type in (
        "gpt_oss",
        "mixtral",
        "qwen3_moe",
        *(one for one, _ in _MIXTURES.values()),
        *recurrent_cases.MODEL_TYPES,
        "gemma4_text",
    ):
        options["experts_implementation"] = "eager"
    return _class_of(model_type).from_pretrained(folder, dtype=dtype, **options).eval()


def _class_of(model_type: str) -> type:
    """Return the class that makes and loads models of a type."""
    return _OWN_CLASSES.get(model_type, AutoModelForCausalLM)


def _settings(model_type: str, options: dict[str, object]) -> dict[str, object]:
    if model_type in ("gpt2", "gptj", "gpt_bigcode", "codegen"):
        return {**options, "bos_token_id": 1, "eos_token_id": 2}
    return deepcopy({**_BASE, **options})  # configs change their rope parameters in place


def _multimodal_config() -> object:
    text = {**_settings("gemma3_text", _CONFIGS["gemma3"][1]), "num_hidden_layers": 2, "sliding_window_pattern": 2}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    ids = {"image_token_index": 127, "boi_token_index": 128, "eoi_token_index": 129, "mm_tokens_per_image": 4}
    return AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, eos_token_id=[2, 3], **ids)


def _randomise(model: PreTrainedModel, name: str) -> None:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    randn: Callable[..., torch.Tensor] = partial(torch.randn, generator=generator)
    is_gemma = name in {**gemma_cases.CASES, **gemma_cases.WRAPPED}
    is_offset = name.startswith(("gemma", "vaultgemma", "nemotron", "qwen3-next", "qwen3-5")) and not is_gemma
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                values = 0.3 * randn(parameter.shape)
            elif key.endswith("A_log"):
                values = randn(parameter.shape) - 2.0  # so that states last
            elif parameter.dim() == 1:
                values = 0.3 * randn(parameter.shape) + (0.0 if is_offset else 1.0)
            elif ("embed" in key and "embed_out" not in key) or ".wte." in key or ".wpe." in key:
                # Gemma multiplies embeddings: where they are large, a tied head repeats the last token.
                values = (0.05 if is_gemma and key.endswith("embed_tokens.weight") else 0.5) * randn(parameter.shape)
            else:
                values = randn(parameter.shape) * parameter.shape[-1] ** -0.5
            parameter.copy_(values)
        for key, buffer in model.named_buffers():
            if key.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.3 * randn(buffer.shape))
            elif key.endswith("layer_scalar"):
                buffer.copy_(1.0 + 0.2 * randn(buffer.shape))
            elif key.endswith("tid2eid"):
                buffer.copy_(randn(len(buffer), 6).topk(buffer.shape[1]).indices)


def rewrite_as_v4(folder: Path) -> None:
    """Rewrite config.json of a folder with the keys of transformers 4."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["torch_dtype"] = config.pop("dtype")
    text = config.get("text_config", config)
    text.pop("dtype", None)
    publish(folder, text)
    _rewrite_rope(text)
    if text["model_type"].startswith("gemma4"):
        _rewrite_sizes(text)
    _rewrite_layer_kinds(text)
    if text["model_type"] not in (
        "granitemoehybrid",
        "ministral",
        "exaone4",
        "lfm2",
        "lfm2_moe",
        "gemma3n_text",
        "gemma4_text",
        "gemma4_unified_text",
        "mellum",
        "laguna",
    ):
        text.pop("layer_types", None)
    text.pop("mlp_layer_types", None)
    if "num_local_experts" in text and text["model_type"] == "qwen3_moe":
        text["num_experts"] = text.pop("num_local_experts")
    if "_sliding_window_pattern" in text:
        text["sliding_window_pattern"] = text.pop("_sliding_window_pattern")
    config["transformers_version"] = "4.51.0"
    file.write_text(json.dumps(config, indent=1))


def _rewrite_sizes(text: dict[str, object]) -> None:
    """Say the sizes of Gemma 4's layers of full attention as the first files did."""
    full = next(iter(text.pop("per_layer_config").values()))
    text["global_head_dim"] = full["head_dim"]
    text["num_global_key_value_heads"] = full.get("num_key_value_heads")


def _rewrite_layer_kinds(text: dict[str, Any]) -> None:
    """Say which layers are recurrent, or mixtures, as the files of the models' authors do."""
    if text["model_type"] == "granitemoehybrid":
        names = {"linear_attention": "mamba", "full_attention": "attention"}
        text["layer_types"] = [names[name] for name in text["layer_types"]]
    if text["model_type"] == "nemotron_h":
        letters = {"linear_attention": "M", "moe": "E", "full_attention": "*", "mlp": "-"}
        text["hybrid_override_pattern"] = "".join(letters[name] for name in text.pop("layers_block_type"))
    if text["model_type"] == "kimi_linear":
        kinds = text.pop("layer_types")
        numbers = {kind: [index + 1 for index, name in enumerate(kinds) if name == kind] for kind in kinds}
        text["linear_attn_config"] = {
            **{"full_attn_layers": numbers["full_attention"], "kda_layers": numbers["linear_attention"]},
            **{"head_dim": text.pop("linear_head_dim"), "num_heads": text.pop("linear_num_heads")},
            "short_conv_kernel_size": text.pop("linear_conv_kernel_dim"),
        }
    if text["model_type"] in ("kimi_linear", "cohere2_moe"):
        text["first_k_dense_replace"] = text["mlp_layer_types"].count("dense")


def _rewrite_rope(text: dict[str, object]) -> None:
    if text["model_type"].startswith(("gemma4", "lfm3", "mimo_v2", "olmo_hybrid", "mellum", "laguna")):
        return
    ropes = text.pop("rope_parameters", None)
    if ropes is None:
        return
    if "full_attention" in ropes:
        if text["model_type"] != "olmo3":
            text["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
        ropes = ropes["full_attention"]
    text["rope_theta"] = ropes.pop("rope_theta")
    if "partial_rotary_factor" in ropes:
        text["partial_rotary_factor"] = ropes.pop("partial_rotary_factor")
    kind = ropes.pop("rope_type")
    # Both spellings are about, "type" being the older one; transformers does not read that one in Gemma 3.
    if text["model_type"].startswith("gpt_neox"):
        text["rotary_emb_base"], text["rotary_pct"] = text.pop("rope_theta"), text.pop("partial_rotary_factor")
    is_old = kind in ("linear", "longrope") and not text["model_type"].startswith("gemma3")
    text["rope_scaling"] = None if kind == "default" else {"type" if is_old else "rope_type": kind, **ropes}
