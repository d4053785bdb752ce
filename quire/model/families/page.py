"""FamilyPage: the description of one model family, and the registry of all families."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.base.registry import Registry
from quire.contracts.model_spec import ModelSpec
from quire.model.families.config_view import ConfigView
from quire.model.families.sources import Sources
from quire.model.families.wrappers import PREFIXES, WRAPPERS, unwrap

_NOT_NEEDED = re.compile(r"(.*\.)?rotary_emb\.(\w+_)?inv_freq|mtp\..*|medusa_head\..*")
"""Ignored tensors: rope tables of old checkpoints, and layers and heads that are only for drafting (model/heads)."""

_HEAD = re.compile("(ForCausalLM|LMHeadModel|ForMaskedLM)$")
_OTHER_HEADS = ("Model", "ForSequenceClassification", "TextModel", "TextForSequenceClassification")
BIDIRECTIONAL_TYPES = {"llama_bidirec": "llama", "llama_bidirectional": "llama"}
"""Model types with bidirectional attention (llama-embed-nemotron) -> the family."""


@dataclass(frozen=True, slots=True)
class FamilyPage:
    """A model family.

    architectures  the classes in config.json that the family supports; the base class without an LM head, as embedding models
                   are often stored, and the class for sequence classification are accepted too
    read_spec      config.json -> ModelSpec, in the checkpoint's dtype
    find_sources   (spec, stored names without prefix) -> where each canonical parameter comes from; the stored names are
                   used only to choose between layouts
    prefixes       of stored names, the longest first: the first that fits is dropped, after that of a wrapper
    ignored        stored names, without prefix, that the model does not need
    spare          stored names, without prefix, that only some of the layers need; they are accepted for the others
    head           the stored name of the LM head's module, without prefix
    """

    architectures: tuple[str, ...]
    read_spec: Callable[[ConfigView], ModelSpec]
    find_sources: Callable[[ModelSpec, Collection[str]], Sources]
    prefixes: tuple[str, ...] = ("model.",)
    ignored: re.Pattern[str] = _NOT_NEEDED
    head: str = "lm_head"
    spare: re.Pattern[str] | None = None

    def strip(self, name: str) -> str:
        """Return a stored name without its prefix; the LM head is `lm_head`."""
        for prefixes in (PREFIXES, self.prefixes):
            name = next((name[len(prefix) :] for prefix in prefixes if name.startswith(prefix)), name)
        module, dot, kind = name.rpartition(".")
        return f"lm_head{dot}{kind}" if module == self.head else name


FAMILIES: Registry[FamilyPage] = Registry("model type")


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
        known = [t for t in (*WRAPPERS, *FAMILIES) if set(_architectures(t)) & set(names)]
        # Some types name the class of another one after their own.
        model_type = next((t for t in known if _architectures(t)[0] in names), known[0] if known else None)
    model_type = BIDIRECTIONAL_TYPES.get(model_type, model_type) if model_type is not None else None
    if model_type is None or (model_type not in FAMILIES and model_type not in WRAPPERS):
        raise _unknown_type(model_type, names)
    known = _architectures(model_type)
    stems = [_HEAD.sub("", name) for name in known]
    with_other_heads = {f"{stem}{kind}{head}" for stem in stems for kind in ("", "Bidirectional") for head in _OTHER_HEADS}
    if names and not set(names) & {*known, *with_other_heads}:
        raise UnsupportedError(
            f"architectures {names} of model_type {model_type!r} are not supported; supported: {', '.join(known)}"
        )
    if model_type in WRAPPERS:
        return unwrap(config, model_type)
    return model_type, config


def _architectures(model_type: str) -> tuple[str, ...]:
    if model_type in WRAPPERS:
        return WRAPPERS[model_type].architectures
    return FAMILIES.get(model_type).architectures


def _unknown_type(model_type: str | None, architectures: list[str]) -> UnsupportedError:
    """Return the error for a model type that is not supported; it names the supported type with the most similar name."""
    from quire.model.transformers_backend.library import library_refusal  # imports torch, which specs do not need

    known = sorted({*FAMILIES, *WRAPPERS})
    got = f"model_type {model_type!r}" + (f" (architectures {architectures})" if architectures else "")
    by_architecture = {name.lower(): known_type for known_type in known for name in _architectures(known_type)}
    nearest = get_close_matches(model_type or "", known, 1, 0.0)
    if model_type is None and architectures:
        nearest = [by_architecture[n] for n in get_close_matches(architectures[0].lower(), list(by_architecture), 1, 0.0)]
    hint = f"; the nearest supported type is {nearest[0]!r}" if nearest else ""
    refusal = None if model_type is None else library_refusal(model_type)
    library = (
        "--model-impl transformers (model_impl) runs other causal models, more slowly"
        if refusal is None
        else f"nor does --model-impl transformers run it, as it {refusal}"
    )
    return UnsupportedError(f"{got} is not supported{hint}; {library}; supported model types: {', '.join(known)}")
