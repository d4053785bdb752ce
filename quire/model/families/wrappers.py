"""Wrappers: multimodal models whose language model is served; images are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from quire.base.errors import ModelFormatError, UnsupportedError

_SHARED = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config", "eos_token_id", "bos_token_id")
NOT_TEXT = re.compile(
    r"(model\.)?(vision_tower|vision_model|vision_embedder|visual|multi_modal_projector|mm_projector|patch_merge_mlp|"
    r"embed_vision|"
    r"audio_tower|embed_audio)\..*"
)
"""Names of stored tensors that only images and sounds need."""
PREFIXES = ("model.language_model.", "language_model.")
"""Prefixes of the language model's names, as transformers saves them and as in older files."""


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A model type whose config.json has the language model's in its text_config.

    text_types  model types that the text_config may have; the first where it names none
    is_tied     whether embeddings are tied if neither config says so; None: the default of the language model's family
    """

    architectures: tuple[str, ...]
    text_types: tuple[str, ...]
    is_tied: bool | None = None


_KIMI = ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")
"""As in the files of its authors, and as transformers writes it."""

WRAPPERS: dict[str, Wrapper] = {
    "gemma3": Wrapper(("Gemma3ForConditionalGeneration",), ("gemma3_text",)),
    "gemma3n": Wrapper(("Gemma3nForConditionalGeneration",), ("gemma3n_text",)),
    "gemma4": Wrapper(("Gemma4ForConditionalGeneration",), ("gemma4_text",)),
    "gemma4_unified": Wrapper(("Gemma4UnifiedForConditionalGeneration",), ("gemma4_unified_text",)),
    "internvl": Wrapper(("InternVLForConditionalGeneration",), ("qwen2", "qwen3", "qwen3_moe", "llama", "gpt_oss"), True),
    "kimi_k25": Wrapper(_KIMI, ("deepseek_v3", "kimi_k2"), True),
    "llama4": Wrapper(("Llama4ForConditionalGeneration",), ("llama4_text",), False),
    "minimax_m3_vl": Wrapper(("MiniMaxM3SparseForConditionalGeneration",), ("minimax_m3_vl_text",), False),
    "mistral3": Wrapper(("Mistral3ForConditionalGeneration",), ("mistral", "ministral3", "mistral4"), True),
    "qwen3_5": Wrapper(("Qwen3_5ForConditionalGeneration",), ("qwen3_5_text",), False),
    "qwen3_5_moe": Wrapper(("Qwen3_5MoeForConditionalGeneration",), ("qwen3_5_moe_text",), False),
    "qwen3_vl": Wrapper(("Qwen3VLForConditionalGeneration",), ("qwen3_vl_text",), False),
    "qwen3_vl_moe": Wrapper(("Qwen3VLMoeForConditionalGeneration",), ("qwen3_vl_moe_text",), False),
}


def is_wrapped(config: Mapping[str, object]) -> bool:
    """Return whether a config.json is that of a wrapper."""
    names = config.get("architectures")
    if config.get("model_type") is None and isinstance(names, list):
        return any(name in wrapper.architectures for wrapper in WRAPPERS.values() for name in names)
    return config.get("model_type") in WRAPPERS


def unwrap(config: Mapping[str, object], model_type: str) -> tuple[str, Mapping[str, object]]:
    """Return the model type of the language model in a wrapper of type `model_type`, and the config of it.

    Raises ModelFormatError or UnsupportedError.
    """
    wrapper, text = WRAPPERS[model_type], config.get("text_config")
    text = {} if text is None else text
    if not isinstance(text, dict):
        raise ModelFormatError(f"text_config must be an object, got {text!r}")
    text_type = text.get("model_type", wrapper.text_types[0])
    if text_type not in wrapper.text_types:
        raise UnsupportedError(
            f"text_config of model_type {text_type!r} is not supported in {model_type!r}; "
            f"supported: {', '.join(wrapper.text_types)}"
        )
    found = {**text, **{key: config[key] for key in _SHARED if key in config}}
    if wrapper.is_tied is not None and found.get("tie_word_embeddings") is None:
        found["tie_word_embeddings"] = wrapper.is_tied
    return text_type, found
