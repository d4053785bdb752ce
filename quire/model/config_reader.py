"""Read config.json and generation_config.json of a checkpoint folder into a ModelSpec. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

from quire.base.errors import ConfigError, ModelFormatError, UnsupportedError
from quire.base.gguf_file import is_gguf
from quire.base.logging import get_logger
from quire.base.shared_reads import read_once
from quire.contracts.model_spec import DTYPE_BYTES, Dtype, LayerSpec, ModelSpec
from quire.model.families import FAMILIES, find_family
from quire.model.families.config_view import ConfigView
from quire.model.families.page import BIDIRECTIONAL_TYPES
from quire.model.families.wrappers import is_wrapped
from quire.model.gguf_config import read_gguf_config
from quire.quant.config import QuantizationConfig, read_quantization

logger = get_logger(__name__)

_NEUTRAL: dict[str, object] = {
    "add_cross_attention": False,
    "alibi": False,
    "is_encoder_decoder": False,
    "pretraining_tp": 1,
    "pruned_heads": {},
    "reorder_and_upcast_attn": False,
}
"""Options that change results and are not implemented, each with the one value (other than null) that is accepted."""

_READ = {("alibi", "falcon")}
"""Of these, what a model type has."""

_QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files with the quantization config if config.json has none, and the method that wrote them."""

_HARMLESS = {
    *("_name_or_path", "architectures", "attention_dropout", "attn_pdrop", "auto_map", "cache_implementation", "dtype"),
    *("embd_pdrop", "eos_token_id", "id2label", "initializer_range", "label2id", "max_length", "output_attentions"),
    *("output_hidden_states", "output_router_logits", "pad_token_id", "resid_pdrop", "return_dict", "router_aux_loss_coef"),
    *("num_labels", "problem_type", "pooling", "classifier_from_token", "is_causal", "use_bidirectional_attention"),
    *("sentence_transformers", "sbert_ce_default_activation_function"),
    *("router_jitter_noise", "task_specific_params", "torch_dtype", "transformers_version", "use_cache", *_NEUTRAL),
    *_QUANTIZATION_KEYS,
}
"""Keys that are not read because they do not change the model's results."""


_MAX_LAYERS = 10_000
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
"""Keys of the number of layers, of which a family reads one."""
_STORED_DTYPES: dict[bytes, Dtype] = {b"F32": "float32", b"BF16": "bfloat16", b"F16": "float16"}


def read_model_spec(folder: Path, dtype: str = "auto") -> ModelSpec:
    """Return the spec of the checkpoint in a folder, or in a GGUF file.

    dtype  of weights and activations; "auto": that of config.json, otherwise that of the stored weights
    Raises ModelFormatError (invalid files), UnsupportedError (valid, but not implemented) or ConfigError (dtype)
    """
    if dtype != "auto" and dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype must be one of auto, {', '.join(DTYPE_BYTES)}, got {dtype!r}")
    file, whole = _read_config(folder)
    with _naming(file):
        return _read_model_spec(folder, file, whole, dtype)


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Prefix errors with the name of the file if they lack it."""
    try:
        yield
    except (ModelFormatError, UnsupportedError) as error:
        if str(file.parent) in str(error):
            raise
        raise type(error)(f"{file}: {error}") from error


def _read_model_spec(folder: Path, file: Path, whole: dict[str, object], dtype: str) -> ModelSpec:
    generation_file = folder / "generation_config.json"
    generation = read_json_object(generation_file) if generation_file.is_file() else {}
    _refuse_options(whole, file)
    model_type, values = find_family(whole)
    read_quantization_config(folder)
    _refuse_options(values, file)
    config = ConfigView(model_type, values, file)
    generation_config = ConfigView(model_type, generation, generation_file)
    for key in _LAYER_COUNTS:
        num_layers = values.get(key)
        if isinstance(num_layers, int) and num_layers > _MAX_LAYERS:
            raise config.error(key, num_layers, f"at most {_MAX_LAYERS}")
    spec = FAMILIES.get(model_type).read_spec(config)
    if _is_bidirectional(whole, values, file):
        spec = _attend_both_ways(spec, is_halved=values.get("use_bidirectional_attention") is True)
    if dtype == "auto":
        is_stated = any(part.get(key) is not None for part in (values, whole) for key in ("dtype", "torch_dtype"))
        dtype = spec.dtype if is_stated else stored_dtype(folder)
    spec = replace(
        spec,
        dtype=cast("Dtype", dtype),
        bos_token_id=_read_bos(config, values, generation_config),
        eos_token_ids=_read_eos(config, values, generation_config),
    )
    ignored = [key for key in config.unread_keys() if key not in _HARMLESS]
    if ignored:
        logger.info("%s: keys without a meaning in a %r model are ignored: %s", file, model_type, ", ".join(ignored))
    return spec


def _is_bidirectional(whole: Mapping[str, object], values: Mapping[str, object], file: Path) -> bool:
    """Return whether config.json says that each token attends to all tokens: by an option, or by the name of its class."""
    types = (whole.get("model_type"), values.get("model_type"))
    halves, is_gemma4 = "gemma3_text" in types, bool({"gemma4_text", "gemma4_unified_text"} & set(types))
    for key, neutral in (("is_causal", True), ("use_bidirectional_attention", False)):
        for part in (whole, values):
            value = part.get(key)
            # Gemma 4 says "vision" where only tokens of images attend both ways.
            if value is None or value is neutral or (is_gemma4 and value == "vision"):
                continue
            if not isinstance(value, bool) or (key == "use_bidirectional_attention" and not halves):
                raise UnsupportedError(f"{file}: {key} {value!r} is not supported; supported: {neutral!r}")
            return True
    named = whole.get("architectures")
    names = named if isinstance(named, list) else []
    return whole.get("model_type") in BIDIRECTIONAL_TYPES or any("Bidirectional" in str(name) for name in names)


def _attend_both_ways(spec: ModelSpec, is_halved: bool) -> ModelSpec:
    """Return the spec of a decoder whose layers attend in both directions, as transformers runs them.

    is_halved  a window counts both sides (Gemma 3); otherwise it reaches that far on either side
    """

    def change(layer: LayerSpec) -> LayerSpec:
        window = layer.attention.window
        if window is not None:
            window = window // 2 + 1 if is_halved else window + 1
        return replace(layer, attention=replace(layer.attention, is_causal=False, window=window))

    changed = {layer: change(layer) for layer in spec.layers}
    return replace(spec, layers=tuple(changed[layer] for layer in spec.layers))


def _read_config(folder: Path) -> tuple[Path, dict[str, object]]:
    """Return config.json and its content; for a GGUF file, its metadata under the same keys."""
    if is_gguf(folder):
        return folder, read_gguf_config(folder)
    file = folder / "config.json"
    if not folder.is_dir():
        raise ModelFormatError(f"{folder} is not a folder; give one with config.json and the weights in it")
    if not file.is_file():
        raise ModelFormatError(f"{folder} has no config.json; give a folder with a Hugging Face checkpoint")
    return file, read_json_object(file)


def is_base_model(folder: Path) -> bool:
    """Return whether config.json names a class without an LM head: a base model ("LlamaModel"), or a classifier of sequences.

    False for GGUF files.
    """
    if folder.is_file():
        return False
    named = _read_config(folder)[1].get("architectures")
    return isinstance(named, list) and bool(named) and all(map(_is_base_class, named))


def is_multimodal(folder: Path) -> bool:
    """Return whether a checkpoint is multimodal, with a language model that is served. False for GGUF files."""
    return not folder.is_file() and is_wrapped(_read_config(folder)[1])


def _is_base_class(name: object) -> bool:
    if not isinstance(name, str):
        return False
    return name.endswith("ForSequenceClassification") or (name.endswith("Model") and not name.endswith("LMHeadModel"))


def stored_dtype(folder: Path) -> Dtype:
    """Return the dtype of the first floating-point tensor of the first safetensors file; float32 if there is none."""
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            # The loader reports a damaged header.
            found = re.search(rb'"dtype"\s*:\s*"(F32|BF16|F16)"', stream.read(min(size, 1 << 20)))
        if found is not None:
            return _STORED_DTYPES[found.group(1)]
    return "float32"


def read_json_object(file: Path) -> dict[str, object]:
    """Return a file's JSON object, which callers must not change; see `shared_reads`. Raises ModelFormatError."""
    return read_once(file, load_json_object)


def load_json_object(file: Path) -> dict[str, object]:
    """Read a file's JSON object, without the sharing of `read_json_object`."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{file} cannot be read as JSON ({error}); get the file again") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{file} must hold a JSON object, got {type(value).__name__}")
    return value


def read_quantization_config(folder: Path) -> QuantizationConfig | None:
    """Return how the weights of a checkpoint folder are quantised, or None if they are not.

    It is read from config.json, its text_config or, for early checkpoints, a separate file.
    Raises ModelFormatError or UnsupportedError.
    """
    if is_gguf(folder):
        return None  # each tensor has its own type
    file = folder / "config.json"
    whole = read_json_object(file)
    for part in (whole, whole.get("text_config")):
        for key in _QUANTIZATION_KEYS:
            if isinstance(part, dict) and part.get(key) is not None:
                return read_quantization(part[key], f"{file}: {key}")
    for name, method in _QUANTIZATION_FILES.items():
        if (folder / name).is_file():
            return read_quantization(read_json_object(folder / name), str(folder / name), method)
    return None


def _refuse_options(values: Mapping[str, object], file: Path) -> None:
    for key, neutral in _NEUTRAL.items():
        value = values.get(key)
        if value not in (None, neutral) and (key, values.get("model_type")) not in _READ:
            raise UnsupportedError(f"{file}: {key} {value!r} is not supported; supported: {neutral!r}")


def _read_bos(config: ConfigView, values: Mapping[str, object], generation: ConfigView) -> int | None:
    if "bos_token_id" not in values and generation.has("bos_token_id"):
        config = generation
    return config.nullable_integer("bos_token_id", minimum=0)


def _read_eos(config: ConfigView, values: Mapping[str, object], generation: ConfigView) -> frozenset[int]:
    """Return the ids of both files; the default of the family's class counts only where neither file has the key."""
    key = "eos_token_id"
    ids = config.integers(key) if config.has(key) else []
    ids = ids + (generation.integers(key) if generation.has(key) else [])
    if not ids and key not in values:
        ids = config.integers(key)
    return frozenset(ids)
