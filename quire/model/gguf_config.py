"""Read the metadata of a GGUF file as the config.json that the model had before it was converted. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.base.gguf_file import GgufFile, read_gguf
from quire.base.gguf_metadata import NO_TOKEN
from quire.model.gguf_common import has_bias, is_tied, num_layers_of, read_common, vocab_size_of
from quire.model.gguf_families import FAMILY_READERS, read_qwen3_experts
from quire.model.gguf_gemma import GEMMA_READERS
from quire.model.gguf_keys import GgufKeys
from quire.model.gguf_latent import LATENT_READERS
from quire.model.gguf_names import find_architecture
from quire.model.gguf_recurrent import RECURRENT_READERS
from quire.model.gguf_rope import DEFAULT_ROPE_BASE

_DTYPES = {"F32": "float32", "F64": "float32", "F16": "float16", "BF16": "bfloat16"}
_DTYPE_OF_QUANTIZED = "bfloat16"
_END_TOKENS = frozenset(
    ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<EOT>")
)
"""Added tokens that end an answer, whether or not the metadata name them."""
_GEMMA4_END_TOKENS = _END_TOKENS | {"<turn|>", "<|tool_response>"}
_HARMONY_END_TOKENS = frozenset(("<|return|>", "<|call|>", "<|endoftext|>"))
"""Those of gpt-oss, whose <|end|> ends a message: the answer may come after it."""
_CONTROL, _USER_DEFINED = 3, 4
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def read_gguf_config(path: Path) -> dict[str, object]:
    """Return the keys of a config.json, model_type included, that say what the metadata of a GGUF file say.

    Raises ModelFormatError or UnsupportedError.
    """
    return gguf_config(read_gguf(path))


def gguf_config(file: GgufFile) -> dict[str, object]:
    """Return the same of a header that was read already."""
    name = file.metadata.string("general.architecture")
    if name is None:
        raise ModelFormatError(f"{file.path} has no general.architecture; it is not a model, or damaged")
    kind = file.metadata.string("general.type")
    if kind not in (None, "model"):
        raise UnsupportedError(f"{file.path} is of general.type {kind!r}, which is not supported; give the file of a model")
    keys = GgufKeys(file, name)
    architecture = find_architecture(name, keys.integer("expert_count") or 0)
    read = _BY_ARCHITECTURE.get(name) or _READERS[architecture.model_type]
    config = {"model_type": architecture.model_type, **read(keys), **_token_ids(keys)}
    keys.refuse_unread()
    config["dtype"] = _dtype(file, name)
    return config


def read_gguf_sampling(path: Path) -> dict[str, object]:
    """Return the sampling parameters that a file recommends, by the names of generation_config.json."""
    metadata = read_gguf(path).metadata
    found = {key: metadata.number(f"general.sampling.{name}") for name, key in _SAMPLING.items()}
    return {key: value for key, value in found.items() if value is not None}


def _llama(keys: GgufKeys) -> dict[str, object]:
    window = keys.integer("attention.sliding_window")
    config = {**read_common(keys), "hidden_act": "silu"}
    if window:
        return {**config, "model_type": "mistral", "sliding_window": window}
    biases = {"attention_bias": has_bias(keys, "attn_q"), "mlp_bias": has_bias(keys, "ffn_gate")}
    return {**config, **biases}


def _mixtral(keys: GgufKeys) -> dict[str, object]:
    experts = {"num_local_experts": keys.required("expert_count"), "num_experts_per_tok": keys.required("expert_used_count")}
    window = keys.integer("attention.sliding_window") or None
    return {**read_common(keys), **experts, "hidden_act": "silu", "sliding_window": window}


def _granite(keys: GgufKeys) -> dict[str, object]:
    return {
        **read_common(keys),
        "hidden_act": "silu",
        "attention_bias": has_bias(keys, "attn_q"),
        "mlp_bias": has_bias(keys, "ffn_gate"),
        "attention_multiplier": keys.number("attention.scale"),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


def _qwen(keys: GgufKeys) -> dict[str, object]:
    return {**read_common(keys), "hidden_act": "silu", "use_sliding_window": False}


def _qwen3_moe(keys: GgufKeys) -> dict[str, object]:
    return {**_qwen(keys), **read_qwen3_experts(keys)}


def _gemma(keys: GgufKeys) -> dict[str, object]:
    return {**read_common(keys), "hidden_act": "gelu_pytorch_tanh"}


def _gemma2(keys: GgufKeys) -> dict[str, object]:
    return {
        **read_common(keys),
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": keys.required("attention.sliding_window"),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0) or None,
        "query_pre_attn_scalar": _query_scalar(keys, num_layers_of_27b=46),
    }


def _gemma3(keys: GgufKeys) -> dict[str, object]:
    is_sliding = keys.flags("attention.sliding_window_pattern")
    config = {
        **read_common(keys),
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": keys.required("attention.sliding_window"),
        "rope_theta": keys.number("rope.freq_base", 1e6),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", DEFAULT_ROPE_BASE),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        "query_pre_attn_scalar": _query_scalar(keys, num_layers_of_27b=62),
    }
    if is_sliding is not None:
        return {**config, "layer_types": ["sliding_attention" if slides else "full_attention" for slides in is_sliding]}
    return {**config, "sliding_window_pattern": keys.integer("attention.sliding_window_pattern") or 6}


def _query_scalar(keys: GgufKeys, num_layers_of_27b: int) -> int:
    """Return what scores are divided by the root of: the size of a head, but hidden_size / heads in the 27B models."""
    num_heads, hidden_size = keys.required("attention.head_count"), keys.required("embedding_length")
    if keys.required("block_count") == num_layers_of_27b:
        return hidden_size // num_heads
    return keys.integer("attention.key_length") or hidden_size // num_heads


def _olmo2(keys: GgufKeys) -> dict[str, object]:
    """Read OLMo 2, or OLMo 3 where there is a window: on three of four layers."""
    config = {**read_common(keys), "hidden_act": "silu", "attention_bias": has_bias(keys, "attn_q")}
    window = keys.integer("attention.sliding_window")
    if not window:
        return config
    slides = keys.flags("attention.sliding_window_pattern")
    if slides is None:
        period = keys.integer("attention.sliding_window_pattern") or 4
        slides = [(index + 1) % period != 0 for index in range(keys.required("block_count"))]
    types = ["sliding_attention" if is_sliding else "full_attention" for is_sliding in slides]
    return {**config, "model_type": "olmo3", "sliding_window": window, "layer_types": types}


def _phi3(keys: GgufKeys) -> dict[str, object]:
    config = read_common(keys, can_be_partial=True)
    original = keys.integer("rope.scaling.original_context_length") or config["max_position_embeddings"]
    window = keys.integer("attention.sliding_window") or None
    return {**config, "hidden_act": "silu", "sliding_window": window, "original_max_position_embeddings": original}


def _gpt_oss(keys: GgufKeys) -> dict[str, object]:
    """Read gpt-oss; what its files do not say (the clamp of the gate, biases of experts) is the same in all of them."""
    common = read_common(keys)
    num_layers = keys.required("block_count")
    slides = keys.flags("attention.sliding_window_pattern")
    if slides is None:
        period = keys.integer("attention.sliding_window_pattern")
        period = 2 if period is None else period
        slides = [period == 0 or index % period < period - 1 for index in range(num_layers)]
    if keys.number("rope.freq_base_swa", keys.number("rope.freq_base", DEFAULT_ROPE_BASE)) != common["rope_theta"]:
        raise UnsupportedError(f"{keys.file.path}: rope.freq_base_swa must be rope.freq_base in {keys.architecture!r} models")
    config = {
        **common,
        "hidden_act": "silu",
        "intermediate_size": keys.required("expert_feed_forward_length"),
        "num_local_experts": keys.required("expert_count"),
        "num_experts_per_tok": keys.required("expert_used_count"),
        "sliding_window": keys.required("attention.sliding_window"),
        "layer_types": ["sliding_attention" if is_sliding else "full_attention" for is_sliding in slides],
        "attention_bias": has_bias(keys, "attn_q"),
    }
    scaling = common.get("rope_scaling")
    if not isinstance(scaling, dict):
        return {**config, "rope_parameters": {"rope_type": "default"}}  # absent, it would be that of the released models
    # The model was trained with bounds that are not rounded, which files do not say.
    return {**config, "rope_scaling": {**scaling, "truncate": False}}


def _gpt2(keys: GgufKeys) -> dict[str, object]:
    hidden_size = keys.required("embedding_length")
    return {
        "vocab_size": vocab_size_of(keys, hidden_size),
        "n_embd": hidden_size,
        "n_layer": num_layers_of(keys),
        "n_head": keys.required("attention.head_count"),
        "n_inner": keys.required("feed_forward_length"),
        "n_positions": keys.required("context_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        "tie_word_embeddings": is_tied(keys),
    }


def _starcoder(keys: GgufKeys) -> dict[str, object]:
    return {**_gpt2(keys), "multi_query": keys.integer("attention.head_count_kv") == 1}


_READERS: Mapping[str, Callable[[GgufKeys], dict[str, object]]] = {
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "gpt_bigcode": _starcoder,
    "gpt_oss": _gpt_oss,
    "granite": _granite,
    "llama": _llama,
    "mixtral": _mixtral,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "qwen3_moe": _qwen3_moe,
}

_BY_ARCHITECTURE = {**FAMILY_READERS, **GEMMA_READERS, **LATENT_READERS, **RECURRENT_READERS}


def _token_ids(keys: GgufKeys) -> dict[str, object]:
    """Return bos_token_id and eos_token_id; ids of tokens that end a turn end an answer as well."""
    metadata = keys.metadata
    tokens = metadata.strings("tokenizer.ggml.tokens") or []
    types = metadata.array("tokenizer.ggml.token_type", "i32", "u32") or []
    ids = {name: metadata.integer(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
    ids = {name: None if token_id == NO_TOKEN else token_id for name, token_id in ids.items()}
    num_rows = keys.file.tensors["token_embd.weight"].shape[0]
    for name, token_id in ids.items():
        if token_id is not None and not 0 <= token_id < num_rows:
            raise metadata.error(f"tokenizer.ggml.{name}_token_id", f"below the size of the vocabulary ({num_rows})")
    ends = {token_id for name, token_id in ids.items() if name != "bos" and token_id is not None}
    added = (
        (i, token) for i, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind in (_CONTROL, _USER_DEFINED)
    )
    end_tokens = {"gpt-oss": _HARMONY_END_TOKENS, "gemma4": _GEMMA4_END_TOKENS}.get(keys.architecture, _END_TOKENS)
    ends |= {token_id for token_id, token in added if token in end_tokens}
    return {"bos_token_id": ids["bos"], "eos_token_id": sorted(ends)}


def _dtype(file: GgufFile, architecture: str) -> str:
    """Return the dtype to run in: that of most of the weights, bfloat16 where they are quantised.

    Activations of Gemma overflow in float16: its weights were bfloat16 before they were converted.
    """
    num_bytes: dict[str, int] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            dtype = _DTYPES.get(tensor.type_name, _DTYPE_OF_QUANTIZED)
            num_bytes[dtype] = num_bytes.get(dtype, 0) + tensor.num_bytes
    dtype = max(num_bytes, key=lambda dtype: num_bytes[dtype])
    return "bfloat16" if dtype == "float16" and architecture.startswith("gemma") else dtype
