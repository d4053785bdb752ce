"""Prompts with a given number of tokens: token ids, or text of words that are one token each."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Protocol

import numpy as np

from quire.base.errors import ConfigError, RequestError
from quire.text.tokenizer import Tokenizer

Prompt = list[int] | str
_FIRST_ID = 3  # the lowest ids are often padding, start and end
_USUAL_VOCABULARY = 1000
_NUM_WORDS = 1000
_WORD = re.compile(r" [a-z]{2,12}")


class Alphabet(Protocol):
    """Symbols that are one token each: prompts are drawn as symbol numbers and then rendered."""

    size: int

    def render(self, symbols: np.ndarray) -> Prompt: ...


class TokenAlphabet:
    """Token ids [3, vocab_size)."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size <= _FIRST_ID:
            raise ConfigError(f"--vocab-size must be above {_FIRST_ID}, got {vocab_size}")
        self.size = vocab_size - _FIRST_ID

    def render(self, symbols: np.ndarray) -> Prompt:
        """Return token ids; symbols is [T] of integers below size."""
        return (symbols + _FIRST_ID).tolist()


class WordAlphabet:
    """Words with a leading space, from a tokenizer's vocabulary."""

    def __init__(self, words: list[str]) -> None:
        self.size = len(words)
        self._words = np.array(words, dtype=object)

    def render(self, symbols: np.ndarray) -> Prompt:
        """Return text; symbols is [T] of integers below size."""
        return "".join(self._words[symbols])


def find_words(tokenizer: Tokenizer, vocab_size: int) -> WordAlphabet:
    """Return an alphabet of words that stay one token each when concatenated. Raises ConfigError if there are too few."""
    words: list[str] = []
    for token_id in range(vocab_size):
        try:
            word = tokenizer.token_bytes(token_id).decode("ascii")
        except (UnicodeDecodeError, RequestError, IndexError, KeyError):
            continue  # part of a character, or an id without a token
        if _WORD.fullmatch(word) and len(tokenizer.encode(f" the{word}{word}", False)) == 3:
            words.append(word)
        if len(words) == _NUM_WORDS:
            break
    if len(words) < 16:
        raise ConfigError(
            f"--tokenizer has only {len(words)} words that are one token each, too few for prompts of text; use --backend "
            "openai with token ids, or --dataset-name custom"
        )
    return WordAlphabet(words)


def vocab_size_of(folder: Path | None) -> int:
    """Return the vocabulary's size from config.json; without one, a size that nearly every model exceeds."""
    path = folder / "config.json" if folder is not None and folder.is_dir() else None
    if path is None or not path.is_file():
        return _USUAL_VOCABULARY
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); give --vocab-size") from error
    return size if isinstance(size, int) and size > _FIRST_ID else _USUAL_VOCABULARY
