"""Scores of pairs of texts: pairing, the prompt of a pair, and the cosine of two embeddings. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

from quire.base.errors import RequestError
from quire.text.text_pairs import encode_texts
from quire.text.tokenizer import Tokenizer


def make_pairs(
    first: str | Sequence[str], second: str | Sequence[str], first_name: str, second_name: str
) -> list[tuple[str, str]]:
    """Return the pairs to score: texts at equal indexes, or the single first text with each of the others.

    first_name, second_name  of the fields, for errors

    Raises RequestError.
    """
    texts = []
    for name, given in ((first_name, first), (second_name, second)):
        found = [given] if isinstance(given, str) else list(given) if isinstance(given, list | tuple) else None
        if not found or not all(isinstance(text, str) for text in found):
            raise RequestError(f"{name} must be a text or a list of at least one text", name)
        texts.append(found)
    if len(texts[0]) == 1:
        texts[0] *= len(texts[1])
    if len(texts[0]) != len(texts[1]):
        raise RequestError(
            f"{first_name} must be one text or as many as {second_name}: got {len(texts[0])} and {len(texts[1])}", first_name
        )
    return list(zip(*texts, strict=True))


def encode_pair(tokenizer: Tokenizer, first: str, second: str, limit: int | None) -> list[int]:
    """Return the prompt of a pair of texts for a classifier that reads both; limit as in encode_texts.

    The prompt is rendered by a chat template with the roles query and document, which rerankers have; otherwise the tokenizer
    joins the texts as the checkpoint specifies.
    """
    template = tokenizer.chat_template
    if template is None or not all(role in template.source for role in ("query", "document")):
        return encode_texts(tokenizer, (first, second), limit)
    messages = [{"role": "query", "content": first}, {"role": "document", "content": second}]
    rendered = tokenizer.encode_rendered(tokenizer.render_chat(messages, add_generation_prompt=True))
    if limit is not None and len(rendered) > limit:
        raise RequestError(
            f"truncate_prompt_tokens: the pair has {len(rendered)} tokens in the model's template, which cannot be cut to "
            f"{limit}: shorten the texts",
            "truncate_prompt_tokens",
        )
    return rendered


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the cosine of two vectors of equal size; 0 if one of them is zero."""
    lengths = [math.sqrt(math.fsum(map(mul, one, one))) for one in (first, second)]
    return math.fsum(map(mul, first, second)) / (lengths[0] * lengths[1]) if all(lengths) else 0.0
