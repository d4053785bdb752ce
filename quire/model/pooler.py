"""Read the pooling of a checkpoint: from the class in config.json and the files of sentence-transformers. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.base.gguf_file import is_gguf
from quire.contracts.model_spec import ModelSpec
from quire.contracts.pooler_spec import Activation, HeadLayerSpec, PoolerSpec
from quire.contracts.pooling_params import Pooling
from quire.model.config_reader import is_base_model, read_json_object, read_quantization_config

CLASSIFIER = "ForSequenceClassification"
_POOLING_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_MODE_NAMES: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_CONFIG_POOLINGS: dict[str, Pooling] = {"avg": "mean", "mean": "mean", "cls": "cls", "last": "last"}
_ACTIVATIONS: dict[str, Activation] = {
    "identity": "identity",
    "linear": "identity",
    "tanh": "tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "sigmoid": "sigmoid",
    "softmax": "softmax",
}
_MAX_CLASSES = 1 << 20


def read_pooler_spec(folder: Path, spec: ModelSpec, *, generates_without_head: bool = False) -> PoolerSpec:
    """Return how the checkpoint in a folder pools. A GGUF file is always a generative model.

    generates_without_head  the embedding stands for a missing LM head (allow_missing_head): the model generates

    Raises ModelFormatError (invalid files) or UnsupportedError (valid, but not implemented).
    """
    if is_gguf(folder):
        return PoolerSpec()
    config = read_json_object(folder / "config.json")
    is_bidirectional = not spec.is_causal
    if is_classifier(config):
        found = _read_classifier(config, folder)
    elif config.get("classifier_from_token") is not None:
        found = _read_token_classifier(config, folder)
    elif (folder / "modules.json").is_file():
        found = _read_modules(folder, _default(config, spec, folder, is_bidirectional))
    else:
        found = _default(config, spec, folder, is_bidirectional and not generates_without_head)
    if generates_without_head and found.task == "embed" and not is_bidirectional:
        found = replace(found, task="generate")
    return replace(_read_prompts(folder, found), is_bidirectional=is_bidirectional, max_tokens=_read_max_tokens(folder))


def is_classifier(config: Mapping[str, object]) -> bool:
    """Return whether config.json names a class for sequence classification."""
    named = config.get("architectures")
    return isinstance(named, list) and any(isinstance(name, str) and name.endswith(CLASSIFIER) for name in named)


def _stated_pooling(config: Mapping[str, object], default: Pooling) -> Pooling:
    """Return the pooling in config.json (llama-embed). Raises UnsupportedError."""
    stated = config.get("pooling")
    if stated is None:
        return default
    if not isinstance(stated, str) or stated not in _CONFIG_POOLINGS:
        raise UnsupportedError(f"pooling {stated!r} is not supported; supported: {', '.join(_CONFIG_POOLINGS)}")
    return _CONFIG_POOLINGS[stated]


def _default(config: Mapping[str, object], spec: ModelSpec, folder: Path, is_bidirectional: bool) -> PoolerSpec:
    """Return the pooling of a checkpoint without files of sentence-transformers."""
    pooling = _stated_pooling(config, "last" if spec.is_causal else "mean")
    is_embedding = is_bidirectional or is_base_model(folder)
    return PoolerSpec(task="embed" if is_embedding else "generate", pooling=pooling)


def _read_classifier(config: Mapping[str, object], folder: Path) -> PoolerSpec:
    labels = _read_labels(config, folder)
    return PoolerSpec(
        task="classify",
        pooling=_stated_pooling(config, "last"),
        layers=(HeadLayerSpec(("", "score.weight")),),
        size=len(labels),
        labels=labels,
        activation=_read_activation(config, len(labels)),
    )


def _read_token_classifier(config: Mapping[str, object], folder: Path) -> PoolerSpec:
    """Return the pooler of a generative reranker whose score is that of a token, or the difference of two (Qwen3-Reranker)."""
    tokens = config["classifier_from_token"]
    if not isinstance(tokens, list) or not 1 <= len(tokens) <= 2 or not all(isinstance(token, str) for token in tokens):
        raise ModelFormatError(
            f'{folder}: classifier_from_token must be one or two tokens, such as ["no", "yes"], got {tokens!r}'
        )
    if read_quantization_config(folder) is not None:
        raise UnsupportedError(f"{folder}: classifier_from_token is not supported in a quantised checkpoint")
    known = _vocabulary(folder)
    missing = [token for token in tokens if token not in known]
    if missing:
        raise ModelFormatError(f"{folder}: the vocabulary has no tokens {missing}, which classifier_from_token names")
    ids = tuple(known[cast("str", token)] for token in tokens)
    return PoolerSpec(
        task="classify", pooling="last", token_ids=ids, size=1, labels=("LABEL_0",), activation=_read_activation(config, 1)
    )


def _vocabulary(folder: Path) -> dict[str, int]:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UnsupportedError(f"{folder}: classifier_from_token needs a tokenizer.json")
    content = read_json_object(file)
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    added = content.get("added_tokens")
    found: dict[str, int] = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    for token in added if isinstance(added, list) else []:
        found[token["content"]] = token["id"]
    return found


def _read_labels(config: Mapping[str, object], folder: Path) -> tuple[str, ...]:
    """Return the names of the classes; as in transformers there are two if the config has none."""
    names, count = config.get("id2label"), config.get("num_labels")
    if isinstance(names, dict) and names:
        if set(names) != {str(index) for index in range(len(names))}:
            raise ModelFormatError(f"{folder}: id2label must have the keys 0 to {len(names) - 1}, got {list(names)[:8]}")
        return tuple(str(names[str(index)]) for index in range(len(names)))
    if count is None:
        count = 2
    if type(count) is not int or not 1 <= count <= _MAX_CLASSES:
        raise ModelFormatError(f"{folder}: num_labels must be an integer from 1 to {_MAX_CLASSES}, got {count!r}")
    return tuple(f"LABEL_{index}" for index in range(count))


def _read_activation(config: Mapping[str, object], num_labels: int) -> Activation:
    """Return the function of the logits: that of a cross-encoder's config, or of its problem_type, or the usual one."""
    nested = config.get("sentence_transformers")
    stated = nested.get("activation_fn") if isinstance(nested, dict) else None
    stated = config.get("sbert_ce_default_activation_function") if stated is None else stated
    if isinstance(stated, str):
        return _activation_of(stated, "activation_fn")
    problem = config.get("problem_type")
    if problem == "regression":
        return "identity"
    return "sigmoid" if num_labels == 1 or problem == "multi_label_classification" else "softmax"


def _activation_of(path: str, key: str) -> Activation:
    name = path.rpartition(".")[2].lower()
    if name not in _ACTIVATIONS:
        raise UnsupportedError(f"{key} {path!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _read_modules(folder: Path, default: PoolerSpec) -> PoolerSpec:
    """Return the pooler that modules.json of sentence-transformers describes."""
    found = replace(default, task="embed", normalize=False)
    for module in _modules(folder):
        kind, path = str(module.get("type", "")).rpartition(".")[2], _module_folder(folder, module)
        if kind == "Pooling":
            found = replace(found, pooling=_read_pooling(path / "config.json"))
        elif kind == "Dense":
            layer, size = _read_dense(folder, path)
            found = replace(found, layers=(*found.layers, layer), size=size)
        elif kind == "Normalize":
            found = replace(found, normalize=True)
        elif kind != "Transformer":
            raise UnsupportedError(
                f"{folder}: the module {kind!r} in modules.json is not supported; supported: Transformer, "
                "Pooling, Dense, Normalize"
            )
    return found


def _modules(folder: Path) -> Sequence[Mapping[str, object]]:
    import json

    file = folder / "modules.json"
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFormatError(f"{file} cannot be read as JSON ({error}); get the file again") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelFormatError(f"{file} must be a list of modules, each with type and path")
    return modules


def _module_folder(folder: Path, module: Mapping[str, object]) -> Path:
    path = module.get("path", "")
    if not isinstance(path, str) or not re.fullmatch(r"[\w.-]*", path) or path == "..":
        raise ModelFormatError(f"{folder}: modules.json names the path {path!r}, which is no plain folder name")
    return folder / path


def _read_pooling(file: Path) -> Pooling:
    config = read_json_object(file)
    name = config.get("pooling_mode")
    modes = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    by_flag = _POOLING_MODES.get(modes[0]) if len(modes) == 1 else None
    chosen = _MODE_NAMES.get(name) if isinstance(name, str) else by_flag
    if chosen is None:
        raise UnsupportedError(
            f"{file}: pooling by {name or modes or 'nothing'} is not supported; supported: {', '.join(_MODE_NAMES)}"
        )
    if config.get("include_prompt") is False:
        raise UnsupportedError(
            f"{file}: include_prompt false is not supported: the tokens of a prompt are pooled with the others"
        )
    return chosen


def _read_dense(folder: Path, path: Path) -> tuple[HeadLayerSpec, int]:
    config = read_json_object(path / "config.json")
    size = config.get("out_features")
    if type(size) is not int or size < 1:
        raise ModelFormatError(f"{path / 'config.json'}: out_features must be an integer >= 1, got {size!r}")
    file = next((name for name in ("model.safetensors", "pytorch_model.bin") if (path / name).is_file()), None)
    if file is None:
        raise ModelFormatError(f"{path} has no weights: looked for model.safetensors and pytorch_model.bin")
    stored = f"{path.relative_to(folder)}/{file}"
    has_bias = config.get("bias") is not False
    activation = _activation_of(str(config.get("activation_function", "Tanh")), "activation_function")
    return (
        HeadLayerSpec((stored, "linear.weight"), (stored, "linear.bias") if has_bias else None, activation),
        size,
    )


def _read_prompts(folder: Path, found: PoolerSpec) -> PoolerSpec:
    file = folder / "config_sentence_transformers.json"
    if not file.is_file():
        return found
    config = read_json_object(file)
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelFormatError(f"{file}: prompts must be an object of texts, got {prompts!r}")
    if default is not None and default not in prompts:
        raise ModelFormatError(
            f"{file}: default_prompt_name is {default!r}, which is not one of prompts ({', '.join(prompts)})"
        )
    return replace(found, prompts=dict(prompts), default_prompt=default)


def _read_max_tokens(folder: Path) -> int | None:
    file = folder / "sentence_bert_config.json"
    value = read_json_object(file).get("max_seq_length") if file.is_file() else None
    if value is not None and (type(value) is not int or value < 2):
        raise ModelFormatError(f"{file}: max_seq_length must be an integer >= 2, got {value!r}")
    return value
