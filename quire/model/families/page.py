"""FamilyPage: what quire knows of one model family, and the registry of all of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.base.registry import Registry
from quire.contracts.model_spec import ModelSpec
from quire.model.families.config_view import ConfigView
from quire.model.families.sources import Sources

_NOT_NEEDED = re.compile(r"(.*\.)?rotary_emb\.(\w+_)?inv_freq|mtp\..*|medusa_head\..*")
"""A table that old checkpoints carry and every program computes by itself; a layer and heads that only draft (model/heads)."""

_HEAD = re.compile("(ForCausalLM|LMHeadModel)$")


@dataclass(frozen=True, slots=True)
class FamilyPage:
    """A model family.

    architectures  the classes in config.json whose results the page reproduces; a class that is one of them without its head,
                   as embedding models are often stored, is accepted too
    read_spec      config.json -> ModelSpec, in the checkpoint's dtype
    find_sources   (spec, stored names without prefix) -> where each canonical parameter comes from; the stored names serve
                   only to choose between layouts that are both in use
    prefixes       of stored names, the longest first: the first that fits is dropped
    ignored        stored names, without prefix, that the model does not need
    """

    architectures: tuple[str, ...]
    read_spec: Callable[[ConfigView], ModelSpec]
    find_sources: Callable[[ModelSpec, Collection[str]], Sources]
    prefixes: tuple[str, ...] = ("model.",)
    ignored: re.Pattern[str] = _NOT_NEEDED

    def strip(self, name: str) -> str:
        """Return a stored name without its prefix."""
        for prefix in self.prefixes:
            if name.startswith(prefix):
                return name[len(prefix) :]
        return name


FAMILIES: Registry[FamilyPage] = Registry("model type")

_NESTED = {"gemma3": "gemma3_text"}
"""Multimodal model types whose language model is served, by the model type of their text_config."""


def find_family(config: Mapping[str, object]) -> tuple[str, Mapping[str, object]]:
    """Return the registered model type of a config.json and the part of it that describes the language model.

    Raises UnsupportedError with what is supported, or ModelFormatError for a value of the wrong type.
    """
    model_type, architectures = config.get("model_type"), config.get("architectures")
    if model_type is not None and not isinstance(model_type, str):
        raise ModelFormatError(f"model_type must be a string, got {model_type!r}")
    names = [] if architectures is None else architectures
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelFormatError(f"architectures must be a list of strings, got {architectures!r}")
    if model_type is None:
        model_type = next((t for t in (*_NESTED, *FAMILIES) if set(_architectures(t)) & set(names)), None)
    if model_type is None or (model_type not in FAMILIES and model_type not in _NESTED):
        known = ", ".join(sorted({*FAMILIES, *_NESTED}))
        got = f"model_type {model_type!r}" + (f" (architectures {names})" if names else "")
        raise UnsupportedError(f"{got} is not supported; supported model types: {known}")
    known = _architectures(model_type)
    if names and not set(names) & {*known, *(_HEAD.sub("Model", name) for name in known)}:
        raise UnsupportedError(
            f"architectures {names} of model_type {model_type!r} are not supported; supported: {', '.join(known)}"
        )
    if model_type in _NESTED:
        return _NESTED[model_type], _text_config(config, _NESTED[model_type])
    return model_type, config


def _architectures(model_type: str) -> tuple[str, ...]:
    if model_type in _NESTED:
        return ("Gemma3ForConditionalGeneration",)
    return FAMILIES.get(model_type).architectures


def _text_config(config: Mapping[str, object], model_type: str) -> Mapping[str, object]:
    text = config.get("text_config")
    text = {} if text is None else text
    if not isinstance(text, dict):
        raise ModelFormatError(f"text_config must be an object, got {text!r}")
    if text.get("model_type", model_type) != model_type:
        raise UnsupportedError(
            f"text_config of model_type {text['model_type']!r} is not supported in {config['model_type']!r}; "
            f"supported: {model_type}"
        )
    shared = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config", "eos_token_id", "bos_token_id")
    return {**text, **{key: config[key] for key in shared if key in config}}
