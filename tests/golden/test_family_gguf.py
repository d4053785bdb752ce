"""GGUF files of further families: the logits of checkpoints that are converted as the format's converters do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.model.build import whole_prompt_logits
from quire.model.checkpoint import load_parameters
from quire.model.config_reader import read_model_spec
from quire.model.decoder import Decoder
from tests.gguf_writer import write_gguf
from tests.golden import dense_cases, gemma_cases, make_checkpoints
from tests.golden.make_checkpoints import reference_model
from tests.golden.make_family_gguf import ARCHITECTURES, convert, parts_of
from tests.golden.make_gguf import quantize_q8_0

pytestmark = pytest.mark.golden

TOLERANCE = 5e-5
_MOE = make_checkpoints._DEEPSEEK_MOE
_LATENT = make_checkpoints._LATENT
_YARN = make_checkpoints._YARN
# Where files say less than a config.json does, what they leave out is as in the released models.
OWN_CASES = {
    "gguf-smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "gguf-smollm3-bias": ("smollm3", {"num_hidden_layers": 4, "attention_bias": True, "mlp_bias": True}),
    "gguf-olmo3": ("olmo3", {"num_hidden_layers": 4, "sliding_window": 11}),
    "gguf-qwen2-moe": (
        "qwen2_moe",
        {
            **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "decoder_sparse_step": 1},
            **{"shared_expert_intermediate_size": 56, "norm_topk_prob": False},
        },
    ),
    "gguf-ernie-moe": (
        "ernie4_5_moe",
        {
            **{"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 40, "num_hidden_layers": 4},
            **{"moe_layer_end_index": -1, "tie_word_embeddings": False},
        },
    ),
    "gguf-dots1": ("dots1", {**_MOE, "head_dim": 16, "sliding_window": None}),
    "gguf-deepseek-v3-yarn": (
        "deepseek_v3",
        {
            **_MOE,
            **_LATENT,
            "rope_parameters": {**make_checkpoints._LONG_YARN, "mscale": 1.2, "mscale_all_dim": 1.2},
        },
    ),
    "gguf-deepseek-v2-lite": (
        "deepseek_v2",
        {**_MOE, **_LATENT, "q_lora_rank": None, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
    ),
    "gguf-deepseek-v2": (
        "deepseek_v2",
        {**_MOE, **_LATENT, "topk_method": "group_limited_greedy", "norm_topk_prob": False},
    ),
    "gguf-llama4": (
        "llama4_text",
        {
            **{"intermediate_size_mlp": 80, "intermediate_size": 40, "interleave_moe_layer_step": 2, "num_hidden_layers": 4},
            **{"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 1, "rope_parameters": make_checkpoints._LLAMA3},
        },
    ),
    "gguf-olmo": ("olmo", {"clip_qkv": 0.7}),
    "gguf-exaone-moe": (
        "exaone_moe",
        {
            **{key: value for key, value in _MOE.items() if key not in ("n_routed_experts", "n_shared_experts")},
            **{"num_experts": 8, "num_shared_experts": 2, "head_dim": 16, "sliding_window": 11, "sliding_window_pattern": 4},
            "num_hidden_layers": 4,
        },
    ),
    "gguf-solar-open": ("solar_open", {**_MOE, "head_dim": 16, "attention_bias": True, "first_k_dense_replace": 0}),
    "gguf-qwen3-vl-moe": ("qwen3_moe", {**make_checkpoints._QWEN3_MOE, "norm_topk_prob": True}),
    "gguf-phimoe": (
        "phimoe",
        {
            **{"num_local_experts": 6, "attention_bias": True, "lm_head_bias": True, "sliding_window": 11},
            "original_max_position_embeddings": make_checkpoints.MAX_POSITIONS,
        },
    ),
    "gguf-ministral3": (
        "ministral3",
        {
            **{"head_dim": 16, "tie_word_embeddings": True},
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
        },
    ),
    "gguf-minicpm3": ("minicpm3", {**_LATENT, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}),
    "gguf-glm4-moe-lite": ("glm4_moe_lite", {**_MOE, **_LATENT, "n_group": 1, "topk_group": 1}),
    "gguf-deepseek-v32": (
        "deepseek_v32",
        {
            **{**_MOE, **_LATENT, **make_checkpoints._INDEXER},
            "rope_parameters": {**make_checkpoints._LONG_YARN, "mscale": 1.2, "mscale_all_dim": 1.2},
        },
    ),
    "gguf-mistral4": (
        "mistral4",
        {
            **{**_MOE, **_LATENT},
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
    ),
    "gguf-gemma3n": ("gemma3n_text", {**gemma_cases._GEMMA3N, "altup_num_inputs": 4, "vocab_size_per_layer_input": 131}),
    "gguf-gemma4": (
        "gemma4_text",
        {
            **{**gemma_cases._GEMMA4, **gemma_cases._SHARED, "use_double_wide_mlp": True, "vocab_size_per_layer_input": 131},
            "final_logit_softcapping": 3.0,
        },
    ),
    "gguf-gemma4-moe": (
        "gemma4_text",
        {
            **{**gemma_cases._GEMMA4, **gemma_cases._EXPERTS, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
            "final_logit_softcapping": 30.0,
        },
    ),
    "gguf-falcon": ("falcon", {"num_kv_heads": 1}),
    "gguf-falcon-40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gguf-afmoe": (
        "afmoe",
        {**dense_cases._EXPERTS, "num_hidden_layers": 4, "num_shared_experts": 1, "mup_enabled": True, "sliding_window": 11},
    ),
    "gguf-granite-swa": ("granite_swa", {**dense_cases._GRANITE, "num_hidden_layers": 5, "sliding_window": 11}),
    "gguf-starcoder2": ("starcoder2", {"sliding_window": None, "tie_word_embeddings": False}),
}
CASES = (
    *OWN_CASES,
    *("arcee", "cohere", "cohere-bias", "cohere2", "ernie4-5", "ernie4-5-moe-bias", "exaone4", "exaone4-full", "glm", "glm4"),
    *("glm4-moe", "glm4-moe-no-renorm", "gpt-neox", "gpt-neox-sequential", "granitemoe", "granitemoe-shared", "hunyuan-dense"),
    *(
        "hunyuan-moe-alpha",
        "minimax-m2",
        "nemotron",
        "olmoe",
        "phi",
        "phi-qk-norm",
        "seed-oss",
        "stablelm",
        "starcoder2-no-bias",
        "apertus",
        "glm-moe-dsa",
        *("gpt-bigcode", "bloom", "cohere2-moe", "hy-v3", "jais2", "mellum", "youtu"),
    ),
)
PROMPT = torch.randint(0, 131, (40,), generator=torch.Generator().manual_seed(40)).tolist()


@pytest.fixture(autouse=True)
def own_cases(monkeypatch):
    for name, case in OWN_CASES.items():
        monkeypatch.setitem(make_checkpoints._CONFIGS, name, case)


def check(path, reference):
    spec = read_model_spec(path, "float32")
    decoder = Decoder(spec, load_parameters(path, spec), 64)
    for length in (1, 40):
        with torch.inference_mode():
            want = reference(torch.tensor([PROMPT[:length]])).logits[0]
        assert (whole_prompt_logits(decoder, PROMPT[:length]) - want).abs().max() <= TOLERANCE * max(1, want.abs().max() / 10)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES)
def test_converted_checkpoint_gives_the_logits_of_transformers(checkpoint, tmp_path, case):
    folder = checkpoint(case, "v4")
    reference = reference_model(folder)
    check(convert(folder, reference, tmp_path / "model.gguf"), reference)


@pytest.mark.parametrize("case", ["gguf-deepseek-v3-yarn", "gguf-deepseek-v2-lite"])
def test_keys_and_values_of_latent_rows_may_be_stored_apart(checkpoint, tmp_path, case):
    folder = checkpoint(case, "v4")
    reference = reference_model(folder)
    check(convert(folder, reference, tmp_path / "model.gguf", splits_kv_b=True), reference)


def test_an_unknown_architecture_is_refused_with_the_nearest(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": ("string", "deepseek3")})
    with pytest.raises(UnsupportedError, match=r"'deepseek3' \(did you mean deepseek32, deepseek2\?"):
        read_model_spec(path, "float32")


def test_every_architecture_of_the_family_readers_is_converted():
    from quire.model.gguf_families import FAMILY_READERS
    from quire.model.gguf_gemma import GEMMA_READERS
    from quire.model.gguf_latent import LATENT_READERS

    # These have the layout of one that is: Llama, with or without its rows permuted, Granite and Qwen3.
    assert {*FAMILY_READERS, *GEMMA_READERS, *LATENT_READERS} - set(ARCHITECTURES.values()) == {
        *("baichuan", "exaone", "internlm2", "minicpm", "qwen2vl", "qwen3vl")
    }


@pytest.mark.parametrize(("key", "value"), [("beta", [0.5, 0.6]), ("eps", [0.0] * 2), ("alpha_p", [1.0]), ("alpha_n", None)])
def test_an_activation_that_is_not_that_of_apertus_is_refused(checkpoint, tmp_path, key, value):
    folder = checkpoint("apertus", "v4")
    metadata, tensors = parts_of(folder, reference_model(folder))
    metadata.pop(f"xielu.{key}")
    metadata |= {} if value is None else {f"xielu.{key}": ("f32[]", value)}
    path = write_gguf(tmp_path / "m.gguf", metadata, tensors)
    with pytest.raises((ModelFormatError, UnsupportedError), match=rf"xielu\.{key}"):
        load_parameters(path, read_model_spec(path, "float32"))


@pytest.mark.parametrize("is_quantized", [False, True])
def test_q_k_and_v_of_chatglm_may_be_one_matrix(checkpoint, tmp_path, monkeypatch, is_quantized):
    case = ("glm", {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "attention_bias": True})
    monkeypatch.setitem(make_checkpoints._CONFIGS, "gguf-chatglm", case)
    folder = checkpoint("gguf-chatglm", "v4")
    reference = reference_model(folder)
    metadata, tensors = parts_of(folder, reference)
    for index in range(2):
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"blk.{index}.attn_{one}.{kind}") for one in "qkv"]
            joined = np.concatenate(parts)
            if is_quantized and kind == "weight":
                joined, dense = quantize_q8_0(joined)
                layer = reference.model.layers[index].self_attn
                for one, part in zip("qkv", np.split(dense, (64, 96)), strict=True):
                    getattr(layer, f"{one}_proj").weight.data.copy_(torch.from_numpy(part))
            tensors[f"blk.{index}.attn_qkv.{kind}"] = joined
    check(write_gguf(tmp_path / "m.gguf", metadata, tensors), reference)


def test_q_k_and_v_may_be_one_matrix_where_their_rows_are_permuted(checkpoint, tmp_path):
    folder = checkpoint("gguf-ministral3", "v4")
    reference = reference_model(folder)
    metadata, tensors = parts_of(folder, reference)
    for index in range(2):
        parts = [tensors.pop(f"blk.{index}.attn_{one}.weight") for one in "qkv"]
        tensors[f"blk.{index}.attn_qkv.weight"] = np.concatenate(parts)
    check(write_gguf(tmp_path / "m.gguf", metadata, tensors), reference)


def test_layers_that_only_draft_are_left_out(checkpoint, tmp_path):
    folder = checkpoint("glm4-moe", "v4")
    reference = reference_model(folder)
    metadata, tensors = parts_of(folder, reference)
    layers = metadata["glm4moe.block_count"][1]
    metadata |= {"glm4moe.block_count": ("u32", layers + 1), "glm4moe.nextn_predict_layers": ("u32", 1)}
    last = {name: values for name, values in tensors.items() if name.startswith(f"blk.{layers - 1}.")}
    tensors |= {name.replace(f"blk.{layers - 1}", f"blk.{layers}"): values for name, values in last.items()}
    tensors[f"blk.{layers}.nextn.eh_proj.weight"] = np.zeros((48, 96), np.float32)
    check(write_gguf(tmp_path / "m.gguf", metadata, tensors), reference)


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("gguf-olmo", "attention.layer_norm_epsilon", ("f32", 1e-6)),
        ("gguf-ministral3", "rope.scaling.type", ("string", "none")),
        ("glm-moe-dsa", "attention.indexer.types", ("bool[]", [False, True, True, True])),
        ("glm-moe-dsa", "context_length", ("u32", 1 << 20)),
        ("gguf-gemma4", "feed_forward_length", ("i32[]", [80, 80, 80, 80, 80, 160])),
        ("gguf-gemma4", "rope.dimension_count_swa", ("u32", 6)),
        ("gguf-gemma4", "attention.sliding_window_pattern", ("bool[]", [True] * 6)),
    ],
)
def test_metadata_of_no_released_model_is_refused(checkpoint, tmp_path, case, key, value):
    folder = checkpoint(case, "v4")
    metadata, tensors = parts_of(folder, reference_model(folder))
    arch = metadata["general.architecture"][1]
    if key == "context_length":  # of releases whose layers share indexers
        del metadata[f"{arch}.attention.indexer.types"]
        path = write_gguf(tmp_path / "some.gguf", metadata | {f"{arch}.{key}": value}, tensors)
        flags = [layer.attention.latent.indexer.is_shared for layer in read_model_spec(path, "float32").layers]
        assert flags == [False, True, True, False]  # as their tensors are stored
        first = {name[6:]: tensor for name, tensor in tensors.items() if name.startswith("blk.0.indexer.")}
        tensors |= {f"blk.{index}.{name}": tensor for index in (1, 2) for name, tensor in first.items()}
    path = write_gguf(tmp_path / "m.gguf", metadata | {f"{arch}.{key}": value}, tensors)
    with pytest.raises((ModelFormatError, UnsupportedError), match=r"olmo|attention\.|indexer_|feed_forward_length|rope\."):
        read_model_spec(path, "float32")


_WIDE = {"hidden_size": 64, "intermediate_size": 96}
_WIDE_MOE = {**_WIDE, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WIDE_CASES = {
    "wide-neox": ("gpt_neox", _WIDE),
    "wide-qwen2-moe": (
        "qwen2_moe",
        {**_WIDE_MOE, "num_experts": 4, "shared_expert_intermediate_size": 32, "norm_topk_prob": False},
    ),
    "wide-deepseek": (
        "deepseek_v3",
        {
            **_WIDE_MOE,
            **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 8, "v_head_dim": 32},
            **{"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        },
    ),
    "wide-llama4": (
        "llama4_text",
        {
            **{**_WIDE, "intermediate_size_mlp": 96, "intermediate_size": 32, "head_dim": 16, "interleave_moe_layer_step": 1},
            **{"num_local_experts": 4, "num_experts_per_tok": 1},
        },
    ),
    "wide-gemma3n": (
        "gemma3n_text",
        {
            **{**gemma_cases._GEMMA3N, **_WIDE, "altup_num_inputs": 4, "vocab_size_per_layer_input": 131, "laurel_rank": 32},
            **{"hidden_size_per_layer_input": 32, "head_dim": 32},
        },
    ),
    "wide-gemma4-moe": (
        "gemma4_text",
        {
            **gemma_cases._GEMMA4,
            **gemma_cases._EXPERTS,
            **_WIDE,
            "head_dim": 32,
            "global_head_dim": 64,
            "moe_intermediate_size": 32,
        },
    ),
}


@pytest.mark.parametrize(("case", "splits_kv_b"), [*((case, False) for case in WIDE_CASES), ("wide-deepseek", True)])
def test_quantised_matrices_are_put_where_float_ones_are(checkpoint, tmp_path, monkeypatch, case, splits_kv_b):
    monkeypatch.setitem(make_checkpoints._CONFIGS, case, WIDE_CASES[case])
    folder = checkpoint(case, "v4")
    metadata, tensors = parts_of(folder, reference_model(folder), splits_kv_b=splits_kv_b)
    both = {name: quantize_q8_0(values) for name, values in tensors.items() if values.ndim > 1 and not values.shape[-1] % 32}
    quantized = write_gguf(tmp_path / "q.gguf", metadata, tensors | {name: packed for name, (packed, _) in both.items()})
    dense = write_gguf(tmp_path / "d.gguf", metadata, tensors | {name: values for name, (_, values) in both.items()})
    found = []
    for path in (quantized, dense):
        spec = read_model_spec(path, "float32")
        found.append(whole_prompt_logits(Decoder(spec, load_parameters(path, spec), 64), PROMPT))
    assert (found[0] - found[1]).abs().max() <= TOLERANCE
