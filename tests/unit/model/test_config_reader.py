"""config.json -> ModelSpec: real files, what absent and null mean, and what is refused."""

import copy
import json
import random
import shutil
import subprocess
import sys

import pytest

from quire.base.errors import ConfigError, ModelFormatError, QuireError, UnsupportedError
from quire.contracts.model_spec import GateClamp, MlpSpec, MoeSpec, NormSpec
from quire.model.config_reader import read_model_spec

REAL = ["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b", "qwen3-235b", "llama-3-8b"]


def _windows(spec):
    return [layer.attention.window for layer in spec.layers]


@pytest.mark.parametrize("name", REAL)
def test_real_configs_are_read(shared, tmp_path, name):
    source = shared / "tokenizers" / "configs" / f"{name}.config.json"
    shutil.copy(source, tmp_path / "config.json")
    config, spec = json.loads(source.read_text()), read_model_spec(tmp_path)
    assert len(spec.layers) == config["num_hidden_layers"]
    assert len({id(layer) for layer in spec.layers}) == 1
    assert spec.dtype == config["torch_dtype"]
    assert spec.layers[0].attention.rope.theta == config["rope_theta"]
    assert spec.layers[0].attention.head_dim == 128
    assert spec.layers[0].attention.num_kv_heads == config["num_key_value_heads"]
    assert (spec.layers[0].attention.qk_norm is not None) == name.startswith("qwen3")
    assert isinstance(spec.layers[0].mlp, MoeSpec if "num_experts" in config else MlpSpec)
    assert spec.eos_token_ids == {config["eos_token_id"]}
    assert spec.is_tied == config["tie_word_embeddings"]


def test_stories_config_is_read(shared):
    spec = read_model_spec(shared / "checkpoints" / "stories260K")
    attention = spec.layers[0].attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (8, 4, 8)
    assert (spec.hidden_size, spec.vocab_size, spec.max_positions, spec.is_tied) == (64, 512, 512, True)


@pytest.mark.parametrize(
    "model_type, changes, windows",
    [
        ("mistral", {"num_key_value_heads": 2}, [4096] * 4),
        ("mistral", {"num_key_value_heads": 2, "sliding_window": None}, [None] * 4),
        ("mixtral", {"num_key_value_heads": 2}, [None] * 4),
        ("phi3", {}, [None] * 4),
        ("qwen2", {"num_key_value_heads": 2, "sliding_window": 7, "max_window_layers": 1}, [None] * 4),
        ("qwen2", {"num_key_value_heads": 2, "use_sliding_window": True, "max_window_layers": 1}, [None] + [4096] * 3),
        ("qwen2", {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 7}, [None] * 4),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}, [7] * 4),
        ("gemma2", {}, [4096, None, 4096, None]),
        ("gemma3_text", {"sliding_window_pattern": 3, "sliding_window": 5}, [5, 5, None, 5]),
        ("gpt_oss", {}, [128, None, 128, None]),
        ("gpt_oss", {"layer_types": ["full_attention"] * 4, "sliding_window": None}, [None] * 4),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_window_of_each_layer(write_config, model_type, changes, windows):
    changes = {"num_key_value_heads": 4, **changes}
    assert _windows(read_model_spec(write_config(model_type, **changes))) == windows


def test_layer_types_win_over_the_rule(write_config):
    types = ["full_attention", "sliding_attention", "sliding_attention", "attention"]
    spec = read_model_spec(write_config("gemma2", layer_types=types, sliding_window=5))
    assert _windows(spec) == [None, 5, 5, None]


def test_soft_caps_absent_are_not_null(write_config):
    spec = read_model_spec(write_config("gemma2"))
    assert (spec.layers[0].attention.softcap, spec.final_softcap) == (50.0, 30.0)
    spec = read_model_spec(write_config("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None))
    assert (spec.layers[0].attention.softcap, spec.final_softcap) == (None, None)


@pytest.mark.parametrize(
    "model_type, changes, head_dim",
    [
        ("llama", {}, 8),
        ("llama", {"head_dim": None}, 8),
        ("llama", {"head_dim": 20}, 20),
        ("qwen3", {"num_key_value_heads": 2}, 128),
        ("qwen3", {"num_key_value_heads": 2, "head_dim": None}, 8),
        ("qwen3_moe", {}, 8),
        ("gemma", {"num_key_value_heads": 1}, 256),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_head_dim_when_absent_null_or_given(write_config, model_type, changes, head_dim):
    attention = read_model_spec(write_config(model_type, **changes)).layers[0].attention
    assert attention.head_dim == head_dim
    assert attention.scale == head_dim**-0.5


def test_defaults_that_differ_from_those_of_a_class_alike(write_config):
    assert read_model_spec(write_config("mellum")).layers[0].mlp.num_experts == 64
    assert read_model_spec(write_config("opt")).is_tied  # word_embed_proj_dim is hidden_size


def test_granite_scale_when_absent_is_one(write_config):
    assert read_model_spec(write_config("granite")).layers[0].attention.scale == 1.0


def test_gemma_gelu_means_tanh_and_llama_gelu_does_not(write_config):
    assert (
        read_model_spec(write_config("gemma", num_key_value_heads=1, hidden_act="gelu")).layers[0].mlp.activation == "gelu_tanh"
    )
    assert read_model_spec(write_config("llama", hidden_act="gelu")).layers[0].mlp.activation == "gelu"


def test_norms_of_each_kind(write_config):
    assert read_model_spec(write_config("llama", rms_norm_eps=1e-5)).final_norm == NormSpec("rms", 1e-5)
    assert read_model_spec(write_config("gemma2")).final_norm == NormSpec("rms", 1e-6, offset=1, late_cast=True)
    layer = read_model_spec(write_config("olmo2")).layers[0]
    assert (layer.attn_in, layer.mlp_in) == (None, None)
    assert layer.attn_out == layer.mlp_out == NormSpec("rms", 1e-5, late_cast=True)


def test_experts_on_the_layers_that_have_them(write_config):
    spec = read_model_spec(
        write_config("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[3], num_experts=6, num_experts_per_tok=2)
    )
    assert [isinstance(layer.mlp, MoeSpec) for layer in spec.layers] == [False, True, False, False]
    assert spec.layers[1].mlp.num_experts == 6
    assert not spec.layers[1].mlp.is_renormalized
    with pytest.raises(ModelFormatError, match="differ"):
        read_model_spec(write_config("qwen3_moe", num_experts=6, num_local_experts=7))


# config.json of a published gpt-oss, in the keys of transformers 4.
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 2,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "initial_context_length": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096},
        **{"rope_type": "yarn", "truncate": False},
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}


def test_gpt_oss_is_read(write_config):
    spec = read_model_spec(write_config("gpt_oss", **GPT_OSS))
    attention, moe = spec.layers[1].attention, spec.layers[1].mlp
    assert (attention.head_dim, attention.scale, attention.has_sinks, attention.is_softmax_f32) == (64, 0.125, True, False)
    assert (attention.has_qkv_bias, attention.has_o_bias) == (True, True)
    rope = attention.rope
    assert (rope.kind, rope.theta, rope.factor, rope.original_max, rope.truncate) == ("yarn", 150000.0, 32.0, 4096, False)
    assert rope.attention_factor == pytest.approx(1.34657, abs=1e-5)
    assert (moe.num_experts, moe.top_k, moe.is_renormalized, moe.has_router_bias) == (32, 4, True, True)
    assert moe.expert == MlpSpec(48, "silu", has_bias=True, clamp=GateClamp(7.0, 1.702))
    assert spec.final_norm == NormSpec("rms", 1e-5, late_cast=True)
    assert spec.max_positions == 131072
    assert len({id(layer) for layer in spec.layers}) == 2


def test_gpt_oss_defaults_are_those_of_its_class(write_config):
    bare = {key: value for key, value in GPT_OSS.items() if key in ("num_local_experts", "num_key_value_heads", "eos_token_id")}
    spec = read_model_spec(write_config("gpt_oss", **bare))
    assert spec == read_model_spec(write_config("gpt_oss", **{**GPT_OSS, "architectures": ...}))


@pytest.mark.parametrize(
    "changes, key",
    [
        ({"num_experts_per_tok": 33}, "num_experts_per_tok must be at most the number of experts"),
        ({"swiglu_limit": 0}, "swiglu_limit must be a positive number"),
        ({"swiglu_limit": "7"}, "swiglu_limit must be a positive number"),
        ({"swiglu_alpha": -1.0}, "swiglu_alpha must be a positive number"),
        ({"sliding_window": None}, "sliding_window must be an integer >= 1"),
        ({"sliding_window": 0}, "sliding_window must be"),
        ({"hidden_act": "relu"}, "hidden_act must be silu"),
        ({"num_local_experts": 0}, "num_local_experts must be"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must be a divisor"),
        ({"layer_types": ["full_attention"]}, "length of layer_types"),
    ],
    ids=str,
)
def test_wrong_values_of_gpt_oss_are_named(write_config, changes, key):
    with pytest.raises(ModelFormatError, match=key):
        read_model_spec(write_config("gpt_oss", **{**GPT_OSS, **changes}))


JUNK = [
    None,
    True,
    0,
    -1,
    1.5,
    2**31,
    10**400,
    float("nan"),
    float("inf"),
    "",
    "silu",
    [],
    [1],
    ["full_attention"],
    {},
    {"a": 1},
]


def test_gpt_oss_with_edited_values_is_read_or_refused(write_config):
    rng, messages = random.Random(0), []
    for _ in range(400):
        values = copy.deepcopy(GPT_OSS)
        for _ in range(rng.randint(1, 3)):
            table = values["rope_scaling"] if rng.random() < 0.3 and isinstance(values["rope_scaling"], dict) else values
            table[rng.choice(list(table) or ["factor"])] = copy.deepcopy(rng.choice(JUNK))
        try:
            read_model_spec(write_config("gpt_oss", **values))
        except QuireError as error:
            messages.append(str(error))
    assert 100 < len(messages) < 400
    assert max(map(len, messages)) < 2000


def test_dtype_names_and_override(write_config):
    assert read_model_spec(write_config("llama")).dtype == "float32"
    assert read_model_spec(write_config("llama", torch_dtype="bfloat16")).dtype == "bfloat16"
    folder = write_config("llama", torch_dtype="bfloat16", dtype="float16")
    assert read_model_spec(folder).dtype == "float16"
    assert read_model_spec(folder, "float32").dtype == "float32"
    with pytest.raises(ConfigError, match="dtype"):
        read_model_spec(folder, "int8")
    with pytest.raises(UnsupportedError, match="float8"):
        read_model_spec(write_config("llama", dtype="float8_e4m3fn"))


@pytest.mark.parametrize(
    "config, generation, eos, bos",
    [
        ({"eos_token_id": 5, "bos_token_id": 3}, {"eos_token_id": [5, 6]}, {5, 6}, 3),
        ({"eos_token_id": [5, 7]}, None, {5, 7}, 1),
        ({}, None, {2}, 1),
        ({}, {"eos_token_id": 9, "bos_token_id": 8}, {9}, 8),
        ({"eos_token_id": None, "bos_token_id": None}, None, set(), None),
    ],
    ids=["union", "list", "class default", "generation config alone", "null"],
)
def test_token_ids_of_both_files(write_config, config, generation, eos, bos):
    spec = read_model_spec(write_config("llama", generation, **config))
    assert (spec.eos_token_ids, spec.bos_token_id) == (eos, bos)


def test_multimodal_gemma3_is_its_text_model(write_config):
    text = {
        "hidden_size": 64,
        "num_hidden_layers": 7,
        "intermediate_size": 96,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    top = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "torch_dtype": "bfloat16"}
    spec = read_model_spec(write_config("gemma3", text_config=text, vision_config={"hidden_size": 9}, **top))
    # What text_config leaves out is Gemma 3's default, not the value beside it.
    assert (spec.model_type, spec.vocab_size, spec.hidden_size, spec.dtype) == ("gemma3_text", 262208, 64, "bfloat16")
    assert spec.layers[0].attention.num_heads == 8
    assert spec.eos_token_ids == {1, 106}
    assert [layer.attention.rope.kind for layer in spec.layers] == ["default"] * 5 + ["linear", "default"]
    assert [layer.attention.rope.theta for layer in spec.layers[4:6]] == [1e4, 1e6]
    assert len({id(layer) for layer in spec.layers}) == 2


@pytest.mark.parametrize(
    "changes, key, got",
    [
        ({"hidden_size": "32"}, "hidden_size", "'32'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers", "0"),
        ({"vocab_size": 10.5}, "vocab_size", "10.5"),
        ({"intermediate_size": True}, "intermediate_size", "True"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps", "'small'"),
        ({"num_attention_heads": 5}, "hidden_size", "32"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "3"),
        ({"head_dim": 7}, "head_dim", "7"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings", "'yes'"),
        ({"layer_types": ["full_attention"]}, "length of layer_types", "1"),
        ({"rope_scaling": [1]}, "rope_scaling", "[1]"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor", "None"),
        ({"eos_token_id": "</s>"}, "eos_token_id", "'</s>'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_values_are_named(write_config, changes, key, got):
    with pytest.raises(ModelFormatError) as caught:
        read_model_spec(write_config("llama", **changes))
    assert f"{key} must be " in str(caught.value)
    assert str(caught.value).endswith(f"got {got}")


@pytest.mark.parametrize(
    "model_type, changes, word",
    [
        ("rwkv", {}, "gpt2, .*gpt_oss, .*granite, .*llama"),
        ("llama", {"architectures": ["LlamaForQuestionAnswering"]}, "LlamaForCausalLM"),
        ("gemma3", {"text_config": {"model_type": "gemma3n_text"}}, "gemma3n_text"),
        ("llama", {"hidden_act": "relu6"}, "relu6"),
        ("llama", {"rope_scaling": {"type": "ntk", "factor": 2.0}}, "ntk"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ("llama", {"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("gemma2", {"layer_types": ["full_attention", "linear_attention"] * 2}, "linear_attention"),
        ("mistral", {"num_key_value_heads": 2, "layer_types": ["full_attention"] * 4}, "layer_types"),
        ("llama", {"pretraining_tp": 2}, "pretraining_tp"),
        ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("llama", {"quantization_config": {"quant_method": "hqq"}}, "hqq"),
        ("gemma3", {"text_config": {}, "quantization_config": {"quant_method": "quanto"}}, "quanto"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_implemented_is_refused(write_config, model_type, changes, word):
    with pytest.raises(UnsupportedError, match=word):
        read_model_spec(write_config(model_type, **changes))


def test_model_type_is_found_by_architecture(write_config):
    spec = read_model_spec(write_config(..., architectures=["MistralForCausalLM"], num_key_value_heads=2))
    assert spec.model_type == "mistral"


def test_ignored_keys_are_logged(write_config, caplog):
    with caplog.at_level("INFO", logger="quire"):
        read_model_spec(write_config("llama", use_cache=True, strange_option=3))
    assert "strange_option" in caplog.text
    assert "use_cache" not in caplog.text


@pytest.mark.parametrize(
    "model_type, inner, outer",
    [
        ("phi3", {"partial_rotary_factor": 0.5, "rope_theta": 7.0}, {"partial_rotary_factor": 0.5, "rope_theta": 7.0}),
        ("phi3", {"partial_rotary_factor": 0.5, "rope_theta": 7.0}, {"partial_rotary_factor": 0.25, "rope_theta": 9.0}),
        ("phi3", {}, {"partial_rotary_factor": 0.5, "rope_theta": 7.0}),
        ("phi3", {"partial_rotary_factor": 0.5, "rope_theta": 7.0}, {}),
        ("llama", {"rope_theta": 7.0}, {"rope_theta": 9.0}),
    ],
)
def test_rope_values_that_stand_twice_are_not_said_to_be_without_a_meaning(write_config, caplog, model_type, inner, outer):
    """Transformers 5 writes them into rope_parameters, whose values win; hub files have them outside, or in both places."""
    with caplog.at_level("INFO", logger="quire"):
        rope = {"rope_type": "default", **inner}
        spec = read_model_spec(write_config(model_type, head_dim=..., rope_parameters=rope, **outer))
    assert spec.layers[0].attention.rope.theta == 7.0
    assert spec.layers[0].attention.rope.dim == (4 if model_type == "phi3" else 8)
    assert "without a meaning" not in caplog.text
    assert ("which is used" in caplog.text) == any(inner.get(name, value) != value for name, value in outer.items())


@pytest.mark.covering(keep=False)
@pytest.mark.parametrize("value", [True, "0.5", [], 0, -0.5, 1.5, float("nan")])
@pytest.mark.parametrize("model_type", ["phi3", "llama"])
def test_partial_rotary_factor_of_a_wrong_type_is_refused(write_config, model_type, value):
    with pytest.raises(ModelFormatError, match=r"config\.json: partial_rotary_factor must be a number"):
        read_model_spec(write_config(model_type, partial_rotary_factor=value))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of strings"),
        ({"architectures": [1]}, "architectures must be a list of strings"),
        ({"model_type": 3}, "model_type must be a string, got 3"),
        ({"model_type": "gemma3", "text_config": [1]}, "text_config must be an object"),
    ],
)
def test_wrong_types_that_choose_the_family_are_refused(write_config, changes, words):
    values = {"model_type": "llama", **changes}
    with pytest.raises(ModelFormatError, match=rf"config\.json: {words}"):
        read_model_spec(write_config(**values))


@pytest.mark.parametrize("changes", [{"model_type": "x"}, {"hidden_act": "x"}, {"architectures": ["X"]}])
def test_every_refusal_names_the_file(write_config, changes):
    with pytest.raises(UnsupportedError, match=r"config\.json: "):
        read_model_spec(write_config(**{"model_type": "llama", **changes}))


@pytest.mark.parametrize("text", ["{", "[1]", "", "\x00"])
def test_broken_json_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelFormatError, match=r"config\.json"):
        read_model_spec(tmp_path)


def test_missing_folder_or_config_is_named(tmp_path):
    with pytest.raises(ModelFormatError, match=r"no config\.json"):
        read_model_spec(tmp_path)
    with pytest.raises(ModelFormatError, match="not a folder"):
        read_model_spec(tmp_path / "nowhere")


def test_reading_a_config_loads_no_torch():
    code = "import sys, quire.model.config_reader, quire.model.resolve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ({"indexer_types": ["full", "shared"] * 2, "index_topk_pattern": "FFFF"}, [1, 3]),
        ({"index_topk_pattern": "FSSF"}, [1, 2]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, [1, 3]),
        ({"index_topk_freq": 3}, [2, 3]),
    ],
)
def test_layers_that_share_an_indexer(write_config, changes, shared):
    spec = read_model_spec(write_config("glm_moe_dsa", num_key_value_heads=4, **changes))
    flags = [layer.attention.latent.indexer.is_shared for layer in spec.layers]
    assert [index for index, flag in enumerate(flags) if flag] == shared


@pytest.mark.parametrize(
    ("model_type", "changes", "error"),
    [
        ("glm_moe_dsa", {"index_topk_pattern": "SFFF"}, "index_topk_pattern must be 'full' or .* got 'SFFF'"),
        ("deepseek_v32", {"indexer_types": ["full", "shared"] * 2}, "indexer_types 'shared' is not supported in a 'deepseek"),
        (
            "mpt",
            {"attn_config": {"qk_ln": True}},
            "attn_config: qk_ln True is not supported in a 'mpt' model; supported: False",
        ),
        ("mpt", {"attn_config": {"clip_qkv": -1}}, "attn_config: clip_qkv must be a positive number, got -1"),
        ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": 2}}, "ffn_config: moe_normalize.* must be 1 or null, got 2.0"),
        ("dbrx", {"attn_config": {"rope_theta": 5e5}, "rope_theta": 2e4}, "rope_theta must be that of .* .20000., got 500000"),
        ("minimax", {"attn_type_list": [0]}, "the length of attn_type_list must be num_hidden_layers .4., got 1"),
        (
            "minimax",
            {"attn_type_list": [1, 0, 1, 1], "layer_types": ["full_attention", "linear_attention"] * 2},
            r"layer_types must be of the same kinds as attn_type_list, which differs in layers \[3\], got \['full_",
        ),
        (
            "lfm2",
            {"full_attn_idxs": [1], "layer_types": ["conv"] * 4},
            r"layer_types must be of the same kinds as full_attn_idxs, which differs in layers \[1\]",
        ),
        (
            "minimax_m3_vl_text",
            {"moe_layer_freq": [0, 1, 1, 1], "mlp_layer_types": ["sparse"] * 4},
            r"mlp_layer_types must be of the same kinds as moe_layer_freq: \['dense'",
        ),
    ],
)
def test_what_a_family_lacks_is_refused_with_what_was_given(write_config, model_type, changes, error):
    with pytest.raises((ModelFormatError, UnsupportedError), match=error):
        read_model_spec(write_config(model_type, num_key_value_heads=4, **changes))
