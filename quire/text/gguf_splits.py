"""How byte-level vocabularies split text before merging, by the names that GGUF files give (`tokenizer.ggml.pre`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from quire.base.errors import UnsupportedError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)


@dataclass(frozen=True, slots=True)
class Split:
    """A way to split.

    pattern            of the pieces; None: GPT-2's own
    cuts_digits        every digit is a piece, before the pattern is applied
    takes_whole_words  a piece that is a token is not merged together
    adds_bos           a text begins with bos unless the file says otherwise
    is_nfc             text is normalised first
    """

    pattern: str | None = None
    cuts_digits: bool = False
    takes_whole_words: bool = False
    adds_bos: bool = False
    is_nfc: bool = False


_GPT2 = Split()
_DIGITS = Split(cuts_digits=True)
_CL100K = Split(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}")
_LLAMA3 = replace(_CL100K, takes_whole_words=True, adds_bos=True)
_QWEN2 = Split(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}")
_TEKKEN = Split(rf"{'|'.join(_CASED_WORDS)}|\p{{N}}|{_REST_WITH_SLASH}", takes_whole_words=True, adds_bos=True)
_GPT4O = Split("|".join([*(f"{words}{_CONTRACTIONS}?" for words in _CASED_WORDS), r"\p{N}{1,3}", _REST_WITH_SLASH]))

_SPLITS: dict[str, Split] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo"), _GPT2),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm"), _DIGITS),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _CL100K),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _LLAMA3),
    "qwen2": replace(_QWEN2, is_nfc=True),
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
}


def find_split(name: str | None, architecture: str, path: Path) -> Split:
    """Return how a vocabulary splits text. An unknown name is refused: another split would give other tokens."""
    if name is None and architecture == "gpt2":
        return _GPT2
    if name not in _SPLITS:
        raise UnsupportedError(
            f"{path}: tokenizer.ggml.pre {name!r} is not supported; supported: {', '.join(_SPLITS)}. Give the option "
            "tokenizer= the folder of the original tokenizer"
        )
    return _SPLITS[name]
