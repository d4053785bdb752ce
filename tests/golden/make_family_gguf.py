"""Convert checkpoints of further families into GGUF files in float32, as the converters of the format do.

Written from the facts of the format, independently of what quire reads them with; see make_gguf.py.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from tests.gguf_writer import write_gguf
from tests.golden.make_gguf import _rope_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ARCHITECTURES = {
    **{"arcee": "arcee", "cohere": "command-r", "cohere2": "cohere2", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2"},
    **{"dots1": "dots1", "ernie4_5": "ernie4_5", "ernie4_5_moe": "ernie4_5-moe", "exaone4": "exaone4", "glm4": "glm4"},
    **{"glm4_moe": "glm4moe", "gpt_neox": "gptneox", "granitemoe": "granitemoe", "granitemoeshared": "granitemoe"},
    **{"hunyuan_v1_dense": "hunyuan-dense", "hunyuan_v1_moe": "hunyuan-moe", "minimax_m2": "minimax-m2", "phi": "phi2"},
    **{"nemotron": "nemotron", "olmo3": "olmo2", "olmoe": "olmoe", "qwen2_moe": "qwen2moe", "seed_oss": "seed_oss"},
    **{"smollm3": "smollm3", "stablelm": "stablelm", "starcoder2": "starcoder2", "llama4_text": "llama4"},
    **{"glm": "chatglm", "apertus": "apertus", "gemma3n_text": "gemma3n", "gemma4_text": "gemma4", "olmo": "olmo"},
    **{"deepseek_v32": "deepseek32", "glm_moe_dsa": "glm-dsa", "glm4_moe_lite": "deepseek2", "mistral4": "mistral4"},
    **{"minicpm3": "minicpm3", "ministral3": "mistral3", "phimoe": "phimoe", "exaone_moe": "exaone-moe"},
    **{"solar_open": "glm4moe", "qwen3_moe": "qwen3vlmoe", "gpt_bigcode": "starcoder", "youtu": "deepseek2"},
    **{kind: kind.replace("cohere2_moe", "cohere2moe") for kind in ("afmoe", "bloom", "cohere2_moe", "falcon", "granite_swa")},
    **{kind: kind for kind in ("hy_v3", "jais2", "mellum")},
}
_ALIASES = {
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_embd": "hidden_size",
    "num_kv_heads": "num_key_value_heads",
}
_PERMUTED = ("granite_swa", "arcee", "granitemoe", "granitemoeshared", "smollm3", "olmo", "ministral3")
_LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "mistral4", "minicpm3", "youtu")
_FUSED_EXPERTS = ("gemma4_text", "mistral4")
_NAMES = {
    **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
    **{"self_attn.o_proj": "attn_output", "self_attn.dense": "attn_output", "attention.dense": "attn_output"},
    **{"self_attn.q_norm": "attn_q_norm", "self_attn.query_layernorm": "attn_q_norm", "self_attn.q_layernorm": "attn_q_norm"},
    **{"self_attn.k_norm": "attn_k_norm", "self_attn.key_layernorm": "attn_k_norm", "self_attn.k_layernorm": "attn_k_norm"},
    **{"attention.query_key_value": "attn_qkv", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
    **{f"feed_forward.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")},
    **{f"feed_forward.shared_expert.{one}_proj": f"ffn_{one}_shexp" for one in ("gate", "up", "down")},
    **{"feed_forward.router": "ffn_gate_inp"},
    **{"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up"},
    **{"mlp.c_fc": "ffn_up", "mlp.fc1": "ffn_up", "mlp.dense_h_to_4h": "ffn_up"},
    **{"mlp.c_proj": "ffn_down", "mlp.fc2": "ffn_down", "mlp.dense_4h_to_h": "ffn_down"},
    **{"attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm", "ln_1": "attn_norm", "ln_2": "ffn_norm"},
    **{"self_attention.query_key_value": "attn_qkv", "self_attention.dense": "attn_output", "attn.c_attn": "attn_qkv"},
    **{"attn.c_proj": "attn_output", "ln_mlp": "attn_norm", "ln_attn": "attn_norm_2", "self_attn.gate_proj": "attn_gate"},
    "mlp.router.gate": "ffn_gate_inp",
    **{"mlp.gate": "ffn_gate_inp", "mlp.gate.wg": "ffn_gate_inp", "block_sparse_moe.router": "ffn_gate_inp"},
    **{"mlp.shared_expert_gate": "ffn_gate_inp_shexp", "self_attn.q_a_proj": "attn_q_a", "self_attn.q_b_proj": "attn_q_b"},
    **{"self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_b_proj": "attn_kv_b"},
    **{"mlp.router": "ffn_gate_inp", "router.proj": "ffn_gate_inp", "pre_feedforward_layernorm": "ffn_norm"},
    **{"post_feedforward_layernorm": "post_ffw_norm", "pre_feedforward_layernorm_2": "pre_ffw_norm_2"},
    **{f"post_feedforward_layernorm_{one}": f"post_ffw_norm_{one}" for one in (1, 2)},
    **{"per_layer_input_gate": "inp_gate", "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm"},
    **{"altup.correction_coefs": "altup_correct_coef", "altup.prediction_coefs": "altup_predict_coef"},
    **{"altup.modality_router": "altup_router", "altup.router_norm": "altup_router_norm"},
    **{"laurel.linear_left": "laurel_l", "laurel.linear_right": "laurel_r", "laurel.post_laurel_norm": "laurel_post_norm"},
    **{"self_attn.indexer.wq_b": "indexer.attn_q_b", "self_attn.indexer.wk": "indexer.attn_k"},
    **{"self_attn.indexer.k_norm": "indexer.k_norm", "self_attn.indexer.weights_proj": "indexer.proj"},
    **{"self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.kv_a_layernorm": "attn_kv_a_norm"},
    **{
        f"mlp.{block}.{one}_proj": f"ffn_{one}_shexp"
        for block in ("shared_expert", "shared_experts", "shared_mlp")
        for one in ("gate", "up", "down")
    },
}
_RENAMED = {
    "afmoe": {
        "post_attention_layernorm": "post_attention_norm",
        **{"pre_mlp_layernorm": "ffn_norm", "post_mlp_layernorm": "post_ffw_norm"},
    },
    "exaone4": {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"},
    "olmo3": {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"},
    "glm4": {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
    "glm4_moe": {"post_attention_layernorm": "post_attention_norm"},
    **{
        kind: {"post_attention_layernorm": "post_attention_norm"}
        for kind in ("seed_oss", "solar_open", "gemma3n_text", "gemma4_text")
    },
}
_WHOLE = {
    "self_attn.sinks": "attn_sinks.weight",
    **{"layer_scalar": "layer_output_scale.weight", "router.scale": "ffn_gate_inp.scale"},
    **{"router.per_expert_scale": "ffn_down_exps.scale", "altup.correct_output_scale": "altup_correct_scale.weight"},
}
_STACKS = {"altup_projections": "altup_proj.weight", "altup_unembed_projections": "altup_unembd_proj.weight"}
_TOP = {
    **{"embed_tokens": "token_embd", "embed_in": "token_embd", "lm_head": "output", "norm": "output_norm"},
    **{"word_embeddings": "token_embd", "word_embeddings_layernorm": "token_embd_norm", "ln_f": "output_norm"},
    **{"wte": "token_embd", "wpe": "position_embd"},
    **{"final_layernorm": "output_norm", "final_layer_norm": "output_norm"},
    **{"embed_tokens_per_layer": "per_layer_token_embd", "per_layer_model_projection": "per_layer_model_proj"},
    "per_layer_projection_norm": "per_layer_proj_norm",
}
_COUNTS = {
    **{"num_hidden_layers": "block_count", "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length"},
    **{"max_position_embeddings": "context_length", "num_attention_heads": "attention.head_count"},
    **{"num_key_value_heads": "attention.head_count_kv", "sliding_window": "attention.sliding_window"},
    **{"num_local_experts": "expert_count", "num_experts": "expert_count", "n_routed_experts": "expert_count"},
    **{"moe_num_experts": "expert_count", "num_experts_per_tok": "expert_used_count", "moe_k": "expert_used_count"},
    **{"moe_topk": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length"},
    **{"n_shared_experts": "expert_shared_count", "moe_num_shared_experts": "expert_shared_count"},
    **{"shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
    **{"shared_intermediate_size": "expert_shared_feed_forward_length", "n_group": "expert_group_count"},
    **{"topk_group": "expert_group_used_count", "first_k_dense_replace": "leading_dense_block_count"},
    "num_dense_layers": "leading_dense_block_count",
    **{"moe_layer_start_index": "leading_dense_block_count", "moe_layer_interval": "interleave_moe_layer_step"},
    **{"kv_lora_rank": "attention.kv_lora_rank", "q_lora_rank": "attention.q_lora_rank"},
    **{"num_shared_experts": "expert_shared_count", "index_n_heads": "attention.indexer.head_count"},
    **{"index_head_dim": "attention.indexer.key_length", "index_topk": "attention.indexer.top_k"},
    **{"altup_active_idx": "altup.active_idx", "altup_num_inputs": "altup.num_inputs"},
    **{"hidden_size_per_layer_input": "embedding_length_per_layer_input", "top_k_experts": "expert_used_count"},
    "num_kv_shared_layers": "attention.shared_kv_layers",
}
_NUMBERS = {
    **{"rms_norm_eps": "attention.layer_norm_rms_epsilon", "routed_scaling_factor": "expert_weights_scale"},
    **{"router_scaling_factor": "expert_weights_scale", "route_scale": "expert_weights_scale"},
    **dict.fromkeys(("layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon"), "attention.layer_norm_epsilon"),
    **{"rope_theta": "rope.freq_base", "rotary_emb_base": "rope.freq_base", "logit_scale": "logit_scale"},
    **{"attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale"},
    **{"residual_multiplier": "residual_scale", "logits_scaling": "logit_scale", "clip_qkv": "attention.clamp_kqv"},
    **{"final_logit_softcapping": "final_logit_softcapping", "rope_local_base_freq": "rope.freq_base_swa"},
}
_SIGMOID = (
    *("glm4_moe", "dots1", "deepseek_v3", "minimax_m2", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite"),
    *("solar_open", "exaone_moe", "afmoe", "hy_v3"),
)


def convert(folder: Path, model: PreTrainedModel, path: Path, *, splits_kv_b: bool = False) -> Path:
    """Write the GGUF file of a checkpoint whose config.json is in the style of transformers 4; returns `path`."""
    return write_gguf(path, *parts_of(folder, model, splits_kv_b=splits_kv_b))


def parts_of(folder: Path, model: PreTrainedModel, *, splits_kv_b: bool = False):
    """Return the metadata and the tensors of the file.

    splits_kv_b  as files with multi-head latent attention have it: keys transposed, and values
    """
    config = json.loads((folder / "config.json").read_text())
    config |= {name: config[alias] for alias, name in _ALIASES.items() if config.get(alias)}
    if config["model_type"] == "mellum":
        full, near = (config["rope_parameters"][f"{one}_attention"] for one in ("full", "sliding"))
        config |= {"rope_theta": full["rope_theta"], "rope_local_base_freq": near["rope_theta"], "rope_scaling": full}
    tensors = {} if config["model_type"] in _LATENT else _rope_tensors({"head_dim": _head_dim(config), **config})
    if config["model_type"] == "gemma4_text":
        tensors = {"rope_freqs.weight": _proportional(config)}
    xielu: dict[str, tuple[str, list[float]]] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name, parameter in model.state_dict().items():
        if ".act_fn." in name:
            xielu.setdefault(f"xielu.{name.rpartition('.')[2]}", ("f32[]", []))[1].append(parameter.float().item())
        elif (stack := name.removeprefix("model.").partition(".")[0]) in _STACKS:
            stacks.setdefault(_STACKS[stack], []).append(parameter.float().numpy())
        elif name != "lm_head.weight" or not config.get("tie_word_embeddings"):
            tensors |= convert_tensor(name, parameter.float().numpy(), config)
    tensors |= {name: np.stack(matrices) for name, matrices in stacks.items()}
    if splits_kv_b:
        for name in [name for name in tensors if name.endswith("attn_kv_b.weight")]:
            both = tensors.pop(name).reshape(config["num_attention_heads"], -1, config["kv_lora_rank"])
            nope = config["qk_nope_head_dim"]
            tensors[name.replace("kv_b", "k_b")] = np.ascontiguousarray(both[:, :nope].swapaxes(1, 2))
            tensors[name.replace("kv_b", "v_b")] = np.ascontiguousarray(both[:, nope:])
    return metadata_of(config, with_mla=splits_kv_b) | xielu, tensors


def _proportional(config):
    """Return the divisors of frequencies in layers of full attention: 1, and of those that stand still 1e30."""
    half = config["global_head_dim"] // 2
    rotated = int(half * config["rope_parameters"]["full_attention"]["partial_rotary_factor"])
    return np.repeat(np.float32([1, 1e30]), [rotated, half - rotated])


def _head_dim(config):
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def metadata_of(config, *, with_mla=False):
    """Return the metadata of a config.json in the style of transformers 4."""
    kind = config["model_type"]
    arch, head_dim = ARCHITECTURES[kind], _head_dim(config)
    found = {key: _count(config[name]) for name, key in _COUNTS.items() if config.get(name) is not None}
    found |= {key: ("f32", config[name]) for name, key in _NUMBERS.items() if config.get(name) is not None}
    found |= {"attention.key_length": ("u32", head_dim), "attention.value_length": ("u32", head_dim)}
    partial = config.get("partial_rotary_factor", config.get("rotary_pct", config.get("rope_pct", 1)))
    found["rope.dimension_count"] = ("u32", int(head_dim * partial))
    found |= _own(kind, config)
    if "indexer_types" in config:
        found["attention.indexer.types"] = ("bool[]", [name == "full" for name in config["indexer_types"]])
    if kind in ("minimax_m2", "hunyuan_v1_moe"):
        found["expert_feed_forward_length"] = ("u32", config["intermediate_size"])
    if kind == "llama4_text":
        found["feed_forward_length"] = ("u32", config["intermediate_size_mlp"])
        found["expert_feed_forward_length"] = ("u32", config["intermediate_size"])
        found["interleave_moe_layer_step"] = ("u32", config["interleave_moe_layer_step"])
    if kind in ("qwen2_moe", "smollm3", "dots1", "qwen3_moe", "ministral3"):
        found.pop("attention.sliding_window", None)
    if kind in _SIGMOID:
        found["expert_gating_func"] = ("u32", 2)
    if "norm_topk_prob" in config and kind != "qwen2_moe":
        found["expert_weights_norm"] = ("bool", config["norm_topk_prob"])
    if "use_parallel_residual" in config:
        found["use_parallel_residual"] = ("bool", config["use_parallel_residual"])
    if kind in _LATENT:
        found |= _latent_sizes(config, with_mla)
    if kind == "minicpm3":
        del found["attention.value_length"]
    found |= _scaling(config, head_dim)
    return {"general.architecture": ("string", arch), **{f"{arch}.{key}": value for key, value in found.items()}}


def _count(value):
    return ("i32[]", value) if isinstance(value, list) else ("u32", value)


def _own(kind, config):
    """Return what files of one architecture say in their own way."""
    if kind == "olmo":
        return {"attention.layer_norm_epsilon": ("f32", 1e-5)}
    if kind == "ministral3":
        scaling = config["rope_scaling"]
        return {
            "rope.scaling.yarn_log_multiplier": ("f32", scaling["mscale_all_dim"]),
            "attention.temperature_scale": ("f32", scaling["llama_4_scaling_beta"]),
        }
    if kind == "phimoe":
        return {"rope.scaling.original_context_length": ("u32", config["original_max_position_embeddings"])}
    if kind in ("falcon", "bloom", "gpt_bigcode"):
        hidden = config["hidden_size"]
        heads = {"attention.head_count_kv": ("u32", 1)} if kind == "gpt_bigcode" else {}
        return {
            **heads,
            "embedding_length": ("u32", hidden),
            "feed_forward_length": ("u32", 4 * hidden),
            "context_length": ("u32", 128),
        }
    if kind == "cohere2_moe":
        inner, shared = config["intermediate_size"], config["num_shared_experts"]
        first, period = config["first_k_dense_replace"], config["sliding_window_pattern"]
        slides = [index >= first and (index - first + 1) % period != 0 for index in range(config["num_hidden_layers"])]
        return {
            **{"feed_forward_length": ("u32", config["prefix_dense_intermediate_size"]), "expert_gating_func": ("u32", 1)},
            "attention.sliding_window_pattern": ("bool[]", slides),
            **{"expert_feed_forward_length": ("u32", inner), "expert_shared_feed_forward_length": ("u32", shared * inner)},
        }
    if kind == "mellum":
        slides = [one == "sliding_attention" for one in config["layer_types"]]
        return {"attention.sliding_window_pattern": ("bool[]", slides)}
    if kind == "exaone_moe":
        shared = config["moe_intermediate_size"] * config["num_shared_experts"]
        pattern = [(index + 1) % config["sliding_window_pattern"] != 0 for index in range(config["num_hidden_layers"])]
        return {
            "expert_shared_feed_forward_length": ("u32", shared),
            "attention.sliding_window_pattern": ("bool[]", pattern),
        }
    return _own_of_gemma(kind, config) if kind.startswith("gemma") else {}


def _own_of_gemma(kind, config):
    slides = [one == "sliding_attention" for one in config["layer_types"]]
    own = {"attention.sliding_window_pattern": ("bool[]", slides)}
    if kind == "gemma3n_text":
        shares = config["activation_sparsity_pattern"]
        scales = [NormalDist().inv_cdf(share) if share else -math.inf for share in shares]
        return {**own, "activation_sparsity_scale": ("f32[]", scales)}
    full, head_dim, num_layers = config["global_head_dim"], config["head_dim"], config["num_hidden_layers"]
    few = config["num_global_key_value_heads"] or config["num_key_value_heads"]
    ropes, shared = config["rope_parameters"], config["num_kv_shared_layers"]
    sizes = [config["intermediate_size"]] * (num_layers - shared) + [2 * config["intermediate_size"]] * shared
    return {
        **own,
        **{f"attention.{what}_length": ("u32", full) for what in ("key", "value")},
        **{f"attention.{what}_length_swa": ("u32", head_dim) for what in ("key", "value")},
        **({"feed_forward_length": ("i32[]", sizes)} if config["use_double_wide_mlp"] else {}),
        "attention.head_count_kv": ("i32[]", [config["num_key_value_heads"] if one else few for one in slides]),
        "rope.dimension_count": ("u32", full),
        "rope.dimension_count_swa": ("u32", head_dim),
        "rope.freq_base": ("f32", ropes["full_attention"]["rope_theta"]),
        "rope.freq_base_swa": ("f32", ropes["sliding_attention"]["rope_theta"]),
    }


def _latent_sizes(config, with_mla):
    rope, nope, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
    sizes = {"rope.dimension_count": ("u32", rope)}
    if not with_mla:
        return {**sizes, "attention.key_length": ("u32", nope + rope), "attention.value_length": ("u32", value)}
    return {
        **sizes,
        "attention.head_count_kv": ("u32", 1),
        "attention.key_length": ("u32", config["kv_lora_rank"] + rope),
        "attention.value_length": ("u32", config["kv_lora_rank"]),
        "attention.key_length_mla": ("u32", nope + rope),
        "attention.value_length_mla": ("u32", value),
    }


def _scaling(config, head_dim):
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "dynamic" and scaling.get("alpha"):
        return {"rope.freq_base": ("f32", config["rope_theta"] * scaling["alpha"] ** (head_dim / (head_dim - 2)))}
    if kind != "yarn":
        return {}
    found = {
        "rope.scaling.type": ("string", "yarn"),
        "rope.scaling.factor": ("f32", scaling["factor"]),
        "rope.scaling.original_context_length": ("u32", scaling["original_max_position_embeddings"]),
    }
    if scaling.get("mscale_all_dim") and config["model_type"] != "ministral3":
        found["rope.scaling.yarn_log_multiplier"] = ("f32", 0.1 * scaling["mscale_all_dim"])
    return found


def convert_tensor(name, values, config):
    """Return name in the file -> array, of one parameter [out, in] as a state_dict has it."""
    kind = config["model_type"]
    name = re.sub(r"^(model|gpt_neox|transformer)\.", "", name)
    layer = re.fullmatch(r"(?:layers|h)\.(\d+)\.(.+)", name)
    if layer is None:
        module, _, suffix = name.rpartition(".")
        values = values + 1 if kind == "nemotron" and module == "norm" and suffix == "weight" else values
        return {f"{_TOP[module]}.{suffix}": values}
    index, rest = layer.groups()
    prefix = f"blk.{index}"
    if rest in _WHOLE:
        return {f"{prefix}.{_WHOLE[rest]}": values}
    if kind == "hy_v3" and rest.endswith("e_score_correction_bias"):
        return {f"{prefix}.exp_probs_b": values}
    if rest.endswith(("e_score_correction_bias", "mlp.expert_bias")):
        return {f"{prefix}.exp_probs_b.bias": values.reshape(-1)}
    if kind == "llama4_text" and ".experts." in rest:
        values = values.swapaxes(1, 2)
    if rest.endswith("experts.gate_up_proj") and kind in _FUSED_EXPERTS:
        return {f"{prefix}.ffn_gate_up_exps.weight": values}
    if rest.endswith("experts.gate_up_proj"):
        half = values.shape[1] // 2
        pairs = (("gate", values[:, :half]), ("up", values[:, half:]))
        return {f"{prefix}.ffn_{which}_exps.weight": np.ascontiguousarray(part) for which, part in pairs}
    if rest.endswith("experts.down_proj"):
        return {f"{prefix}.ffn_down_exps.weight": np.ascontiguousarray(values)}
    if rest == "shared_mlp.input_linear.weight":
        gate, up = np.split(values, 2)
        return {f"{prefix}.ffn_gate_shexp.weight": gate, f"{prefix}.ffn_up_shexp.weight": up}
    if rest == "shared_mlp.output_linear.weight":
        return {f"{prefix}.ffn_down_shexp.weight": values}
    module, _, suffix = rest.rpartition(".")
    short = _RENAMED.get(kind, {}).get(module) or _NAMES[module]
    if kind in _PERMUTED and short in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if short == "attn_q" else "num_key_value_heads"]
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        values = halves.swapaxes(1, 2).reshape(values.shape)
    if kind == "falcon" and short == "attn_qkv":
        groups = values.reshape(config["num_kv_heads"], -1, _head_dim(config), *values.shape[1:])
        parts = (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])
        values = np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])
    elif short == "attn_qkv" and kind != "gpt_bigcode":
        by_head = values.reshape(config["num_attention_heads"], 3, -1, *values.shape[1:])
        values = by_head.swapaxes(0, 1).reshape(values.shape)
    if kind == "nemotron" and short.endswith("norm") and suffix == "weight":
        values = values + 1
    return {f"{prefix}.{short}.{suffix}": np.ascontiguousarray(values)}
