"""Which architectures of GGUF files are read, and what their tensors are called in a Hugging Face checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

from quire.base.errors import UnsupportedError
from quire.base.suggestions import did_you_mean

_PRE_NORM = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH = {
    **_PRE_NORM,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = {**_PRE_NORM, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_POST_NORM = {**_PRE_NORM, "post_attention_norm": "post_attention_layernorm"}
_GLM4 = {
    **_PRE_NORM,
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
_HUNYUAN = {**_PRE_NORM, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_STARCODER2 = {**_PRE_NORM, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_PHI2 = {
    **_PRE_NORM,
    "attn_output": "self_attn.dense",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_GPT_NEOX = {
    **_PRE_NORM,
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_FALCON = {
    **_PRE_NORM,
    "attn_norm_2": "ln_attn",
    "attn_qkv": "self_attention.qkv",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_AFMOE = {
    **_PRE_NORM,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "attn_gate": "self_attn.gate_proj",
}
_DEEPSEEK2 = {
    **_PRE_NORM,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}

_INDEXED = {
    **_DEEPSEEK2,
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}
_PER_LAYER = {
    **_SANDWICH,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_GEMMA3N = {
    **_PER_LAYER,
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_GEMMA4 = {
    **_PER_LAYER,
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}


def _recurrent(module: str, step_bias: str = "dt_bias") -> dict[str, str]:
    """Return the names of a Mamba or Mamba 2 mixer, or of what a gated delta net shares with them."""
    names = {"in": "in_proj", "x": "x_proj", "dt": "dt_proj", "norm": "norm", "out": "out_proj", "conv1d": "conv1d"}
    norms = {f"{name}_norm": f"{name}_layernorm" for name in ("dt", "b", "c")}
    bare = {"a": "A_log", "d": "D", "dt.bias": step_bias}
    return {f"ssm_{ours}": f"{module}.{theirs}" for ours, theirs in {**names, **norms, **bare}.items()}


_FEED_FORWARD = {
    **_PRE_NORM,
    "ffn_norm": "pre_ff_layernorm",
    **{f"ffn_{which}": f"feed_forward.{which}_proj" for which in ("gate", "up", "down")},
}
_LFM2 = {
    **_PRE_NORM,
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    **{f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")},
}
_NEMOTRON_H = {
    **_recurrent("mixer"),
    "attn_norm": "norm",
    "attn_output": "mixer.o_proj",
    **{f"attn_{one}": f"mixer.{one}_proj" for one in "qkv"},
    **{f"ffn_{which}": f"mixer.{which}_proj" for which in ("up", "down")},
    **{f"ffn_{which}_shexp": f"mixer.shared_experts.{which}_proj" for which in ("up", "down")},
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
}
_GATED_DELTA = {
    **_PRE_NORM,
    **_recurrent("linear_attn"),
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_KIMI_LINEAR = {
    **_DEEPSEEK2,
    **{f"ssm_conv1d_{one}": f"self_attn.{one}_conv1d" for one in "qkv"},
    **{f"ssm_{one}_{part}": f"self_attn.{one}_{part}_proj" for one in "fg" for part in "ab"},
    **{f"ffn_{which}_shexp": f"block_sparse_moe.shared_experts.{which}_proj" for which in ("gate", "up", "down")},
    "ssm_a": "self_attn.A_log",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_beta": "self_attn.b_proj",
    "ssm_norm": "self_attn.o_norm",
    "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias",
}
_GPT_OSS = {**_SANDWICH, "attn_sinks.weight": "self_attn.sinks"}
_TOP = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_PER_LAYER_TOP = {
    **_TOP,
    "per_layer_token_embd": "embed_tokens_per_layer",
    "per_layer_model_proj": "per_layer_model_projection",
    "per_layer_proj_norm": "per_layer_projection_norm",
}
_FEED_FORWARD_TOP = {**_TOP, "output_norm": "final_layernorm"}
_LFM2_TOP = {**_TOP, "output_norm": "embedding_norm", "token_embd_norm": "embedding_norm"}
_BACKBONE_TOP = {"token_embd": "embeddings", "output_norm": "norm_f", "output": "lm_head"}
_PHI2_TOP = {**_TOP, "output_norm": "final_layernorm"}
_GPT_NEOX_TOP = {"token_embd": "embed_in", "output_norm": "final_layer_norm", "output": "lm_head"}
_FALCON_TOP = {
    **{"token_embd": "word_embeddings", "token_embd_norm": "word_embeddings_layernorm", "output_norm": "ln_f"},
    "output": "lm_head",
}
_GPT2_TOP = {"token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f", "output": "lm_head"}
_MIXTRAL_EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}
_QWEN_EXPERT = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}

ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that are read with the metadata: divisors of the rotary frequencies."""

_LAYER_TENSOR = re.compile(r"blk\.(\d{1,6})\.((?:shortconv\.|indexer\.)?\w+)\.(weight|bias|scale)")
_BARE_TENSOR = re.compile(r"blk\.(\d{1,6})\.(ssm_[ad]|exp_probs_b)")
_BARE_NORM = re.compile(r"blk\.\d{1,6}\.ffn_norm")
"""As files of Falcon-H1 name it."""
_STACKED_EXPERTS = re.compile(r"blk\.(\d{1,6})\.ffn_(gate|up|down|gate_up)_exps\.weight")
_EXPERT_BIASES = re.compile(r"ffn_(gate|up|down)_exps\.bias")
_ONE_EXPERT = re.compile(r"blk\.(\d{1,6})\.ffn_(gate|up|down)\.(\d{1,6})\.weight")


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """An architecture: the family page that reads its config, and how its tensors differ from a Hugging Face checkpoint.

    layer, top        name in the file -> name in the checkpoint, of what is in a layer (below `layers`) and outside; a whole
                      name, with .weight, where the checkpoint's has none
    expert            of the three matrices of an expert, for mixtures; experts and their `router` lie below `expert_block`
    is_permuted       rows of q and k are ordered for rotating neighbours instead of halves
    has_norm_offset   norms are stored as w + 1
    is_transposed     the checkpoint stores linear weights [in, out]
    is_qkv_by_head    rows of q, k and v are those of the first head, then of the next, in the checkpoint, unlike in the file
    rows              vectors that are one row of a matrix in the checkpoint
    also              further model types whose files have this name: `model_type` runs them, or the metadata say which it is
    is_value_tiled    value heads of a gated delta net are ordered by their number under a key head first, and not by key head
    """

    model_type: str
    layer: Mapping[str, str] = field(default_factory=lambda: _PRE_NORM)
    top: Mapping[str, str] = field(default_factory=lambda: _TOP)
    layers: str = "layers"
    expert: Mapping[str, str] = field(default_factory=dict[str, str])
    expert_block: str = "mlp"
    router: str = "gate"
    is_permuted: bool = False
    has_norm_offset: bool = False
    is_transposed: bool = False
    is_qkv_by_head: bool = False
    rows: tuple[str, ...] = ()
    is_value_tiled: bool = False
    also: tuple[str, ...] = ()

    @property
    def is_qkv_split(self) -> bool:
        """Whether q, k and v are apart in the checkpoint; they may still be joined in the file."""
        return "attn_qkv" not in self.layer

    def rename(self, name: str) -> str:
        """Return the checkpoint's name of a tensor that is not stacked experts; an unknown name stays as it is."""
        found = _LAYER_TENSOR.fullmatch(f"{name}.weight" if _BARE_NORM.fullmatch(name) else name)
        if found is not None:
            index, module, kind = found.groups()
            renamed = self._in_layer(module, kind)
            return name if renamed is None else f"{self.layers}.{int(index)}.{renamed}"
        found = _ONE_EXPERT.fullmatch(name)
        if found is not None and self.expert:
            return self._expert(int(found[1]), found[2], int(found[3]))
        found = _BARE_TENSOR.fullmatch(name)
        if found is not None and found[2] in self.layer:
            return f"{self.layers}.{int(found[1])}.{self.layer[found[2]]}"
        module, _, kind = name.rpartition(".")
        return f"{self.top[module]}.{kind}" if module in self.top else name

    def expert_names(self, name: str, num_experts: int) -> list[str] | None:
        """Return the checkpoint's names of the experts stacked in a tensor, or None where it is no such tensor.

        They are in the order of the rows: where a matrix holds gate and up, two names follow for each expert.
        """
        found = _STACKED_EXPERTS.fullmatch(name)
        if found is None or not self.expert:
            return None
        matrices = found[2].split("_")
        return [self._expert(int(found[1]), matrix, expert) for expert in range(num_experts) for matrix in matrices]

    def _in_layer(self, module: str, kind: str) -> str | None:
        if f"{module}.{kind}" in self.layer:
            return self.layer[f"{module}.{kind}"]
        if module == "ffn_gate_inp" and self.expert:
            return f"{self.expert_block}.{self.router}.{kind}"
        found = _EXPERT_BIASES.fullmatch(f"{module}.{kind}")
        if found is not None and self.expert:
            return f"{self.expert_block}.experts.{self.expert[found[1]]}.bias"
        return f"{self.layer[module]}.{kind}" if module in self.layer else None

    def _expert(self, index: int, matrix: str, expert: int) -> str:
        return f"{self.layers}.{index}.{self.expert_block}.experts.{expert}.{self.expert[matrix]}.weight"


def _moe(model_type: str, layer: Mapping[str, str], shared: str = "shared_experts", correction: str = "") -> GgufArchitecture:
    """Return a mixture below `mlp` whose experts have the modules of Qwen's."""
    modules = {f"ffn_{which}_shexp": f"mlp.{shared}.{module}" for which, module in _QWEN_EXPERT.items()}
    names = {**layer, **modules, "exp_probs_b.bias": correction or "mlp.gate.e_score_correction_bias"}
    return GgufArchitecture(model_type, names, expert=_QWEN_EXPERT, rows=("exp_probs_b",) if correction else ())


_GRANITE_MOE = GgufArchitecture(
    "granitemoe",
    {**_PRE_NORM, **{f"ffn_{which}_shexp": f"shared_mlp.{module}" for which, module in _QWEN_EXPERT.items()}},
    expert=_QWEN_EXPERT,
    expert_block="block_sparse_moe",
    router="router.layer",
    is_permuted=True,
    also=("granitemoeshared",),
)
_QWEN2_MOE = replace(
    _moe("qwen2_moe", {**_PRE_NORM, "ffn_gate_inp_shexp": "mlp.shared_expert_gate"}, "shared_expert"),
    rows=("ffn_gate_inp_shexp",),
)
_MINIMAX = GgufArchitecture(
    "minimax_m2",
    {**_PRE_NORM, "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
    expert=_MIXTRAL_EXPERT,
    expert_block="block_sparse_moe",
)
_ERNIE_MOE = _moe("ernie4_5_moe", _PRE_NORM, correction="mlp.moe_statics.e_score_correction_bias")
_HUNYUAN_MOE = replace(_moe("hunyuan_v1_moe", _HUNYUAN, "shared_mlp"), router="gate.wg")
_LLAMA4 = GgufArchitecture(
    "llama4_text",
    {
        **_PRE_NORM,
        **{f"ffn_{which}": f"feed_forward.{module}" for which, module in _QWEN_EXPERT.items()},
        **{f"ffn_{which}_shexp": f"feed_forward.shared_expert.{module}" for which, module in _QWEN_EXPERT.items()},
    },
    expert=_QWEN_EXPERT,
    expert_block="feed_forward",
    router="router",
)
_GRANITE_HYBRID = replace(
    _GRANITE_MOE, model_type="granitemoehybrid", layer={**_GRANITE_MOE.layer, **_recurrent("mamba")}, also=()
)
_NEMOTRON_H_MOE = GgufArchitecture("nemotron_h", _NEMOTRON_H, _BACKBONE_TOP, expert=_QWEN_EXPERT, expert_block="mixer")
_QWEN3_NEXT = replace(_moe("qwen3_next", _GATED_DELTA, "shared_expert"), has_norm_offset=True, rows=("ffn_gate_inp_shexp",))
_LFM2_MOE = GgufArchitecture("lfm2_moe", _LFM2, _LFM2_TOP, expert=_MIXTRAL_EXPERT, expert_block="feed_forward")
_JAMBA = GgufArchitecture(
    "jamba",
    {**_FEED_FORWARD, **_recurrent("mamba", "dt_proj.bias")},
    _FEED_FORWARD_TOP,
    expert=_QWEN_EXPERT,
    expert_block="feed_forward",
    router="router",
)
_MAMBA = GgufArchitecture(
    "mamba", {"attn_norm": "norm", **_recurrent("mixer", "dt_proj.bias")}, _BACKBONE_TOP, also=("falcon_mamba",)
)
_MAMBA2 = GgufArchitecture("mamba2", {"attn_norm": "norm", **_recurrent("mixer")}, _BACKBONE_TOP)
_FALCON_H1 = GgufArchitecture("falcon_h1", {**_FEED_FORWARD, **_recurrent("mamba")}, _FEED_FORWARD_TOP)
_MIXTRAL = GgufArchitecture("mixtral", expert=_MIXTRAL_EXPERT, expert_block="block_sparse_moe", is_permuted=True)
_APERTUS = {**_PRE_NORM, "attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}
_GEMMA4_MOE = GgufArchitecture(
    "gemma4_text", _GEMMA4, _PER_LAYER_TOP, expert=_QWEN_EXPERT, expert_block="moe", also=("gemma4_unified_text",)
)
_KIMI = GgufArchitecture("kimi_linear", _KIMI_LINEAR, expert=_MIXTRAL_EXPERT, expert_block="block_sparse_moe")
_PHIMOE = GgufArchitecture("phimoe", expert=_MIXTRAL_EXPERT, expert_block="block_sparse_moe")
_BLOOM = {**_FALCON, "attn_qkv": "self_attention.query_key_value"}
ARCHITECTURES: dict[str, GgufArchitecture] = {
    "afmoe": replace(_moe("afmoe", _AFMOE, correction="mlp.expert_bias"), router="router.gate", rows=()),
    "apertus": GgufArchitecture("apertus", _APERTUS),
    "arcee": GgufArchitecture("arcee", is_permuted=True),
    "baichuan": GgufArchitecture("llama", is_permuted=True, also=("baichuan",)),
    "bloom": GgufArchitecture("bloom", _BLOOM, _FALCON_TOP, layers="h", is_qkv_by_head=True),
    "chatglm": GgufArchitecture("glm", {**_PRE_NORM, "ffn_up": "mlp.gate_up_proj"}),
    "cohere2": GgufArchitecture("cohere2"),
    "cohere2moe": _moe("cohere2_moe", _PRE_NORM),
    "command-r": GgufArchitecture("cohere"),
    "deepseek2": replace(_moe("deepseek_v3", _DEEPSEEK2), also=("deepseek_v2", "glm4_moe_lite", "kimi_k2", "youtu")),
    "deepseek32": _moe("deepseek_v32", _INDEXED),
    "dots1": _moe("dots1", _PRE_NORM),
    "ernie4_5": GgufArchitecture("ernie4_5"),
    "ernie4_5-moe": _ERNIE_MOE,
    "exaone": GgufArchitecture("llama", also=("exaone",)),
    "exaone4": GgufArchitecture("exaone4", _SANDWICH),
    "exaone-moe": _moe("exaone_moe", _PRE_NORM),
    "falcon": GgufArchitecture("falcon", _FALCON, _FALCON_TOP, layers="h"),
    "falcon-h1": _FALCON_H1,
    "gemma": GgufArchitecture("gemma", has_norm_offset=True),
    "gemma2": GgufArchitecture("gemma2", _SANDWICH, has_norm_offset=True),
    "gemma3": GgufArchitecture("gemma3_text", _SANDWICH, has_norm_offset=True),
    "gemma3n": GgufArchitecture("gemma3n_text", _GEMMA3N, _PER_LAYER_TOP),
    "gemma4": _GEMMA4_MOE,
    "glm-dsa": _moe("glm_moe_dsa", _INDEXED),
    "glm4": GgufArchitecture("glm4", _GLM4),
    "glm4moe": replace(_moe("glm4_moe", _POST_NORM), also=("solar_open",)),
    "gpt-oss": GgufArchitecture("gpt_oss", _GPT_OSS, expert=_QWEN_EXPERT, router="router"),
    "gpt2": GgufArchitecture("gpt2", _GPT2, _GPT2_TOP, layers="h", is_transposed=True),
    "gptneox": GgufArchitecture("gpt_neox", _GPT_NEOX, _GPT_NEOX_TOP, is_qkv_by_head=True),
    "granite": GgufArchitecture("granite", is_permuted=True),
    "granite_swa": GgufArchitecture("granite_swa", {**_PRE_NORM, "attn_sinks.weight": "self_attn.sinks"}, is_permuted=True),
    "granitehybrid": _GRANITE_HYBRID,
    "granitemoe": _GRANITE_MOE,
    "hunyuan-dense": GgufArchitecture("hunyuan_v1_dense", _HUNYUAN),
    "hunyuan-moe": _HUNYUAN_MOE,
    "hy_v3": replace(_moe("hy_v3", {**_PRE_NORM, "exp_probs_b": "mlp.expert_bias"}, "shared_mlp"), router="router.gate"),
    "internlm2": GgufArchitecture("llama", is_permuted=True, also=("internlm2",)),
    "jais2": GgufArchitecture("jais2"),
    "jamba": _JAMBA,
    "kimi-linear": _KIMI,
    "lfm2": GgufArchitecture("lfm2", _LFM2, _LFM2_TOP),
    "lfm2moe": _LFM2_MOE,
    "llama": GgufArchitecture("llama", is_permuted=True, also=("internlm3", "iquestcoder", "mistral")),
    "llama4": _LLAMA4,
    "mamba": _MAMBA,
    "mamba2": _MAMBA2,
    "mellum": GgufArchitecture("mellum", expert=_QWEN_EXPERT),
    "minicpm": GgufArchitecture("granite", is_permuted=True),
    "minicpm3": GgufArchitecture("minicpm3", _DEEPSEEK2),
    "minimax-m2": _MINIMAX,
    "mistral3": GgufArchitecture("ministral3", is_permuted=True, also=("mistral",)),
    "mistral4": _moe("mistral4", _DEEPSEEK2),
    "nemotron": GgufArchitecture("nemotron", has_norm_offset=True),
    "nemotron_h": _NEMOTRON_H_MOE,
    "nemotron_h_moe": _NEMOTRON_H_MOE,
    "olmo": GgufArchitecture("olmo", is_permuted=True),
    "olmo2": GgufArchitecture("olmo2", _SANDWICH, also=("olmo3",)),
    "olmoe": GgufArchitecture("olmoe", expert=_QWEN_EXPERT),
    "phi2": GgufArchitecture("phi", _PHI2, _PHI2_TOP),
    "phi3": GgufArchitecture("phi3", _PHI3),
    "phimoe": _PHIMOE,
    "qwen2": GgufArchitecture("qwen2"),
    "qwen2moe": _QWEN2_MOE,
    "qwen2vl": GgufArchitecture("qwen2"),
    "qwen35": replace(_QWEN3_NEXT, model_type="qwen3_5_text", is_value_tiled=True),
    "qwen35moe": replace(_QWEN3_NEXT, model_type="qwen3_5_moe_text", is_value_tiled=True),
    "qwen3": GgufArchitecture("qwen3"),
    "qwen3moe": GgufArchitecture("qwen3_moe", expert=_QWEN_EXPERT),
    "qwen3next": _QWEN3_NEXT,
    "qwen3vl": GgufArchitecture("qwen3", also=("qwen3_vl_text",)),
    "qwen3vlmoe": GgufArchitecture("qwen3_moe", expert=_QWEN_EXPERT, also=("qwen3_vl_moe_text",)),
    "seed_oss": GgufArchitecture("seed_oss", _POST_NORM),
    "smollm3": GgufArchitecture("smollm3", is_permuted=True),
    "stablelm": GgufArchitecture("stablelm"),
    "starcoder": GgufArchitecture("gpt_bigcode", _GPT2, _GPT2_TOP, layers="h"),
    "starcoder2": GgufArchitecture("starcoder2", _STARCODER2),
}


def find_architecture(name: str, num_experts: int) -> GgufArchitecture:
    """Return what is known of a general.architecture. Raises UnsupportedError with what is supported."""
    if name not in ARCHITECTURES:
        close = did_you_mean(get_close_matches(name, ARCHITECTURES, 2, 0.6))
        raise UnsupportedError(f"general.architecture {name!r}{close} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return _MIXTRAL if name == "llama" and num_experts else ARCHITECTURES[name]
