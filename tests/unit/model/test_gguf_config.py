"""GGUF metadata read as a config.json: what is taken, what is refused."""

import struct
import time

import numpy as np
import pytest

from quire.base.errors import ConfigError, ModelFormatError, QuireError, UnsupportedError
from quire.model.config_reader import read_model_spec
from quire.model.generation_defaults import read_generation_defaults
from quire.model.gguf_config import read_gguf_config
from quire.model.resolve import resolve_model
from tests.gguf_writer import BF16, Q4_0, write_gguf

VOCAB_SIZE, HIDDEN_SIZE = 7, 32
TENSORS = {"token_embd.weight": np.ones((VOCAB_SIZE, HIDDEN_SIZE), np.float32), "blk.0.x.weight": np.ones(1, np.float32)}


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a model of an architecture, with changes of its keys, and returns its path."""

    def write(architecture="llama", tensors=None, **changes):
        metadata = {
            "general.architecture": ("string", architecture),
            f"{architecture}.block_count": ("u32", 2),
            f"{architecture}.embedding_length": ("u32", HIDDEN_SIZE),
            f"{architecture}.feed_forward_length": ("u32", 48),
            f"{architecture}.context_length": ("u32", 64),
            f"{architecture}.attention.head_count": ("u32", 4),
            f"{architecture}.attention.layer_norm_rms_epsilon": ("f32", 1e-5),
            f"{architecture}.attention.layer_norm_epsilon": ("f32", 1e-5),
            **changes,
        }
        metadata = {key: item for key, item in metadata.items() if item is not None}
        return write_gguf(tmp_path / "model.gguf", metadata, {**TENSORS, **(tensors or {})})

    return write


def rope(write, kind=None, tensors=None, **changes):
    spec = read_model_spec(write(tensors=tensors, **({} if kind is None else {"llama.rope.scaling.type": kind}), **changes))
    return spec.layers[0].attention.rope


def test_defaults_are_those_of_the_format(write):
    spec = read_model_spec(write())
    attention = spec.layers[0].attention
    assert (spec.model_type, len(spec.layers), spec.vocab_size, spec.max_positions) == ("llama", 2, VOCAB_SIZE, 64)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.window) == (4, 4, 8, None)
    assert (attention.rope.theta, attention.rope.kind, attention.has_qkv_bias) == (10000.0, "default", False)
    assert spec.is_tied
    assert spec.eos_token_ids == frozenset()
    assert spec.bos_token_id is None


def test_stated_sizes_win(write):
    sizes = {"llama.attention.key_length": ("u32", 20), "llama.attention.value_length": ("u32", 20)}
    sizes |= {"llama.attention.head_count_kv": ("u32", 2), "llama.rope.freq_base": ("f32", 5e5)}
    path = write(**sizes, tensors={"output.weight": np.ones((VOCAB_SIZE, HIDDEN_SIZE), np.float32)})
    attention = read_model_spec(path).layers[0].attention
    assert (attention.head_dim, attention.num_kv_heads, attention.rope.theta) == (20, 2, 5e5)
    assert not read_model_spec(path).is_tied


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma", "gpt2", "granite", "phi3", "olmo2", "gpt-oss"])
def test_head_is_tied_when_it_is_not_stored_and_need_not_be(write, architecture):
    extra = {"gpt-oss.expert_count": ("u32", 1), "gpt-oss.expert_used_count": ("u32", 1)} if architecture == "gpt-oss" else {}
    extra |= {"gpt-oss.expert_feed_forward_length": ("u32", 8), "gpt-oss.attention.sliding_window": ("u32", 8)} if extra else {}
    extra |= {"gpt-oss.attention.key_length": ("u32", 8)} if extra else {}
    extra |= {"granite.attention.scale": ("f32", 0.3)} if architecture == "granite" else {}
    is_required = architecture in ("olmo2", "gpt-oss")
    assert read_model_spec(write(architecture, **extra)).is_tied is not is_required
    head = {"output.weight": np.ones((VOCAB_SIZE, HIDDEN_SIZE), np.float32)}
    assert not read_model_spec(write(architecture, head, **extra)).is_tied


def test_arrays_with_one_value_for_every_layer_are_read(write):
    path = write(**{"llama.attention.head_count_kv": ("u32[]", [2, 2]), "llama.feed_forward_length": ("i32[]", [40, 40])})
    spec = read_model_spec(path)
    assert spec.layers[0].attention.num_kv_heads == 2
    assert spec.layers[1].mlp.intermediate_size == 40
    with pytest.raises(UnsupportedError, match="head_count_kv differs between layers"):
        read_model_spec(write(**{"llama.attention.head_count_kv": ("u32[]", [2, 4])}))


def test_window_of_llama_is_mistral(write):
    spec = read_model_spec(write(**{"llama.attention.sliding_window": ("u32", 5)}))
    assert spec.model_type == "mistral"
    assert {layer.attention.window for layer in spec.layers} == {5}


def test_window_pattern_of_gemma3_may_be_a_number_or_flags(write):
    keys = {"gemma3.attention.sliding_window": ("u32", 5), "gemma3.attention.key_length": ("u32", 8)}
    for pattern in (("u32", 2), ("bool[]", [True, False])):
        spec = read_model_spec(write("gemma3", **keys, **{"gemma3.attention.sliding_window_pattern": pattern}))
        assert [layer.attention.window for layer in spec.layers] == [5, None]
        assert [layer.attention.rope.theta for layer in spec.layers] == [1e4, 1e6]
    spec = read_model_spec(write("gemma3", **keys))
    assert [layer.attention.window for layer in spec.layers] == [5, 5]


@pytest.mark.parametrize(("architecture", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_scores_of_the_27b_gemmas_are_scaled_by_their_heads(write, architecture, num_layers):
    keys = {
        f"{architecture}.attention.sliding_window": ("u32", 5),
        f"{architecture}.attention.key_length": ("u32", 16),
        f"{architecture}.block_count": ("u32", num_layers),
    }
    filling = {f"t{index}": np.ones(1, np.float32) for index in range(num_layers)}
    assert read_model_spec(write(architecture, filling, **keys)).layers[0].attention.scale == 8**-0.5
    keys[f"{architecture}.block_count"] = ("u32", 2)
    assert read_model_spec(write(architecture, filling, **keys)).layers[0].attention.scale == 16**-0.5


def test_rope_scaling_is_read(write):
    factor = {"llama.rope.scaling.factor": ("f32", 4.0)}
    assert rope(write, ("string", "none")).kind == "default"
    assert (rope(write, ("string", "linear"), **factor).kind, rope(write, **factor).factor) == ("linear", 4.0)
    assert rope(write, **{"llama.rope.scale_linear": ("f32", 2.0)}).factor == 2.0
    yarn = rope(write, ("string", "yarn"), **factor, **{"llama.rope.scaling.original_context_length": ("u32", 16)})
    assert (yarn.kind, yarn.factor, yarn.original_max) == ("yarn", 4.0, 16)


def test_divisors_of_frequencies_are_the_same_for_every_length(write):
    factors = np.array([1, 2, 4, 8], np.float32)
    found = rope(write, tensors={"rope_freqs.weight": factors})
    assert (found.kind, found.attention_factor) == ("longrope", 1.0)
    assert found.short == found.long == (1.0, 2.0, 4.0, 8.0)


@pytest.mark.parametrize(
    ("factors", "error"),
    [
        (np.ones(3, np.float32), ModelFormatError),
        (np.ones((4, 1), np.float32), ModelFormatError),
        (np.ones(4, np.float16), ModelFormatError),
        (np.array([1, 0, 1, 1], np.float32), ModelFormatError),
        (np.array([1, np.nan, 1, 1], np.float32), ModelFormatError),
    ],
)
def test_damaged_divisors_are_refused(write, factors, error):
    with pytest.raises(error, match=r"rope_freqs\.weight"):
        read_model_spec(write(tensors={"rope_freqs.weight": factors}))


def test_only_one_of_short_and_long_divisors_is_refused(write):
    with pytest.raises(ModelFormatError, match="or neither"):
        read_model_spec(write(tensors={"rope_factors_short.weight": np.ones(4, np.float32)}))


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"general.architecture": None}, ModelFormatError, "no general.architecture"),
        ({"general.architecture": ("u32", 1)}, ModelFormatError, "general.architecture must be a string"),
        ({"general.architecture": ("string", "rwkv7")}, UnsupportedError, "is not supported; supported: afmoe, apertus, "),
        ({"general.type": ("string", "adapter")}, UnsupportedError, "general.type 'adapter'"),
        ({"llama.block_count": None}, ModelFormatError, "block_count must be an integer >= 1, got nothing"),
        ({"llama.block_count": ("u32", 0)}, ModelFormatError, "block_count must be"),
        ({"llama.block_count": ("string", "2")}, ModelFormatError, "block_count must be"),
        ({"llama.block_count": ("u32", 1 << 31)}, ModelFormatError, "2147483648 layers"),
        ({"llama.expert_count": ("u32", 1 << 31), "llama.expert_used_count": ("u32", 2)}, ModelFormatError, "experts"),
        ({"llama.embedding_length": ("u32", 31)}, ModelFormatError, "multiple of 4 heads"),
        ({"llama.embedding_length": ("u32", 64)}, ModelFormatError, "rows of 64 elements"),
        ({"llama.attention.head_count": ("i32", -4)}, ModelFormatError, "head_count must be"),
        ({"llama.attention.head_count_kv": ("u32", 3)}, ModelFormatError, "num_key_value_heads"),
        ({"llama.attention.layer_norm_rms_epsilon": ("f32", float("nan"))}, ModelFormatError, "epsilon must be"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, ModelFormatError, "epsilon must be"),
        ({"llama.attention.layer_norm_rms_epsilon": ("f32", -1.0)}, ModelFormatError, "rms_norm_eps"),
        ({"llama.context_length": ("u64", 1 << 60)}, ModelFormatError, "max_position_embeddings"),
        ({"llama.vocab_size": ("u32", 8)}, ModelFormatError, "vocab_size is 8, but token_embd.weight has 7 rows"),
        ({"tokenizer.ggml.tokens": ("string[]", ["a"])}, ModelFormatError, "tokens is 1"),
        ({"tokenizer.ggml.eos_token_id": ("u32", 7)}, ModelFormatError, "below the size of the vocabulary"),
        ({"tokenizer.ggml.eot_token_id": ("i32", -2)}, ModelFormatError, "below the size of the vocabulary"),
        ({"llama.attention.value_length": ("u32", 16)}, UnsupportedError, "value_length"),
        ({"llama.rope.dimension_count": ("u32", 4)}, UnsupportedError, "dimension_count"),
        ({"llama.rope.scaling.type": ("string", "other")}, UnsupportedError, "'other' is not supported"),
        ({"llama.rope.scaling.type": ("string", "yarn")}, ModelFormatError, "original_context_length"),
        ({"llama.attention.scale": ("f32", 0.5)}, UnsupportedError, "attention.scale"),
        ({"llama.attention.causal": ("bool", False)}, UnsupportedError, "attention.causal"),
        ({"llama.use_parallel_residual": ("bool", True)}, UnsupportedError, "use_parallel_residual"),
        ({"llama.final_logit_softcapping": ("f32", 30.0)}, UnsupportedError, "final_logit_softcapping"),
    ],
)
def test_damaged_or_unknown_metadata_are_refused(write, changes, error, reason):
    started = time.process_time()
    with pytest.raises(error, match=reason):
        read_model_spec(write(**changes))
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    "changes",
    [{"attention.causal": ("bool", True)}, {"use_parallel_residual": ("bool", False)}, {"attention.scale": ("f32", 1.0)}],
)
def test_options_that_change_nothing_are_accepted(write, changes):
    changed = read_model_spec(write(**{f"llama.{key}": item for key, item in changes.items()}))
    assert changed == read_model_spec(write())


def test_baichuan_2_is_refused_by_its_vocabulary(write):
    with pytest.raises(UnsupportedError, match="vocab_size 125696, Baichuan 2, is not supported"):
        read_model_spec(write("baichuan", {"token_embd.weight": np.ones((125696, HIDDEN_SIZE), np.float16)}))


def test_embedding_is_needed(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", {"general.architecture": ("string", "llama")})
    with pytest.raises(QuireError):
        read_gguf_config(path)


def test_tokens_that_end_a_turn_end_an_answer(write):
    tokens = {
        "tokenizer.ggml.tokens": ("string[]", ["<s>", "</s>", "<end_of_turn>", "<|im_end|>", "x", "y", "<|eot_id|>"]),
        "tokenizer.ggml.token_type": ("i32[]", [3, 3, 3, 4, 1, 1, 1]),
        "tokenizer.ggml.bos_token_id": ("u32", 0),
        "tokenizer.ggml.eos_token_id": ("u32", 1),
        "tokenizer.ggml.eot_token_id": ("u32", 5),
    }
    spec = read_model_spec(write(**tokens))
    assert spec.bos_token_id == 0
    assert spec.eos_token_ids == {1, 2, 3, 5}


def test_token_ids_that_writers_mean_as_none_are_none(write):
    ids = {f"tokenizer.ggml.{name}_token_id": ("u32", 0xFFFFFFFF) for name in ("bos", "eos", "eot", "eom")}
    spec = read_model_spec(write(**ids))
    assert (spec.bos_token_id, spec.eos_token_ids) == (None, frozenset())


def test_dtype_is_that_of_most_weights(write):
    assert read_model_spec(write()).dtype == "float32"
    matrix = np.ones((64, 64))
    assert read_model_spec(write(tensors={"blk.0.a.weight": matrix.astype(np.float16)})).dtype == "float16"
    assert read_model_spec(write("gemma", tensors={"blk.0.a.weight": matrix.astype(np.float16)})).dtype == "bfloat16"
    bf16 = {"blk.0.a.weight": (BF16, (64, 64), bytes(64 * 64 * 2))}
    assert read_model_spec(write(tensors=bf16)).dtype == "bfloat16"
    q4_0 = {"blk.0.a.weight": (Q4_0, (64, 64), bytes(64 * 2 * 18))}
    assert read_model_spec(write(tensors=q4_0)).dtype == "bfloat16"
    assert read_model_spec(write(tensors=q4_0), "float32").dtype == "float32"


def test_recommended_sampling_is_the_default(write):
    sampling = {"general.sampling.temp": ("f32", 0.6), "general.sampling.top_k": ("i32", 20)}
    sampling["general.sampling.top_p"] = ("f32", struct.unpack("<f", struct.pack("<f", 0.95))[0])
    assert read_generation_defaults(write(**sampling)) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert read_generation_defaults(write()) == {}
    with pytest.raises(ModelFormatError, match="top_p"):
        read_generation_defaults(write(**{"general.sampling.top_p": ("f32", 2.0)}))


def test_file_and_folder_with_one_file_are_resolved(write, tmp_path):
    path = write()
    assert resolve_model(str(path)) == path
    assert resolve_model(str(tmp_path)) == path
    with pytest.raises(ConfigError, match="revision"):
        resolve_model(str(path), "main")
    (tmp_path / "other.GGUF").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"2 GGUF files.*model\.gguf, other\.GGUF"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_folder_with_a_split_file_stands_for_its_first_part(tmp_path):
    for number in (1, 2):
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(b"")
    assert resolve_model(str(tmp_path)) == tmp_path / "m-00001-of-00002.gguf"
    (tmp_path / "m-00001-of-00002.gguf").unlink()
    assert resolve_model(str(tmp_path)) == tmp_path
