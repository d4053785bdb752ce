"""Encode a text, or a pair of texts, with the checkpoint's special tokens, and truncate it as transformers does."""

from __future__ import annotations

from collections.abc import Sequence

from quire.base.errors import RequestError
from quire.text.tokenizer import Tokenizer


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str], limit: int | None = None) -> list[int]:
    """Return the ids of one text, or of a pair in one prompt, as the tokenizer joins them.

    limit  tokens to keep: texts are truncated at the end, the longer one of a pair first; special tokens stay. None: all

    Raises RequestError if the special tokens do not fit into the limit, or a text is not valid.
    """
    token_ids, parts = tokenizer.encode_parts(texts)
    if limit is None or len(token_ids) <= limit:
        return token_ids
    num_special = parts.count(None)
    if num_special >= limit:
        raise RequestError(
            f"truncate_prompt_tokens is {limit}, but the tokenizer adds {num_special} special tokens: ask for more",
            "truncate_prompt_tokens",
        )
    kept = _longest_first([parts.count(index) for index in range(len(texts))], limit - num_special)
    found: list[int] = []
    for token_id, part in zip(token_ids, parts, strict=True):
        if part is not None:
            kept[part] -= 1
            if kept[part] < 0:
                continue
        found.append(token_id)
    return found


def _longest_first(lengths: list[int], limit: int) -> list[int]:
    """Return how many tokens of each text are kept, `limit` in total."""
    if len(lengths) == 1:
        return [limit]
    short, long = sorted(lengths)
    long = short if short > limit else max(short, limit - short)
    if short + long > limit:
        short = limit // 2
        long = limit - short
    return [short, long] if lengths[0] <= lengths[1] else [long, short]
