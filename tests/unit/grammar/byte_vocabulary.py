"""Small vocabularies for the tests of grammars."""

import json
from contextlib import closing

import numpy as np

from quire.contracts.constraint import Constraint
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.masks import NO_DRAFT, MaskFill, fill_mask
from quire.grammar.spelling import Spelling
from quire.grammar.vocabulary import Vocabulary

SPECIAL = "<|tool|>"


def make_vocabulary(extra=(), size=None):
    """Return a vocabulary of 256 bytes, a special token, and some longer tokens; with `size`, that many tokens in all."""
    texts = [bytes([byte]) for byte in range(256)] + [SPECIAL.encode()] + [text.encode() for text in extra]
    ids = {text: token_id for token_id, text in enumerate(texts)}
    tokens = texts + [b""] * (0 if size is None else size - len(texts))
    spelling = Spelling(tokens, (256,), (lambda text: list(text.encode()),))
    return Vocabulary(tuple(tokens), frozenset((256,)), spelling, lambda text: ids.get(text.encode()))


def make_compiler():
    """Return a compiler for the smallest of them, as a context that closes it."""
    vocabulary = make_vocabulary()
    return closing(GrammarCompiler(lambda: vocabulary))


def schema_grammar(compiler, schema, kind="json_schema", backend="auto"):
    """Return the grammar of a JSON schema, by itself or as all of a structural tag."""
    source = schema
    if kind == "structural_tag":
        source = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    return compiler.start(Constraint(kind=kind, source=json.dumps(source), param="here", backend=backend)).result()


def accepts(grammar, text):
    """Return whether a text, or token ids, is a whole output of a grammar."""
    matcher = grammar.new_matcher()
    for token_id in text.encode() if isinstance(text, str) else text:
        if matcher.advance(token_id) is not None:
            return False
    return can_end(matcher)


def can_end(matcher):
    """Return whether an output may end here."""
    words = np.zeros(matcher.end_token_id // 32 + 1, dtype=np.int32)
    assert matcher.source.fill(matcher, words) is None
    return bool(words.view(np.uint32)[matcher.end_token_id // 32] >> (matcher.end_token_id % 32) & 1)


def filled(matcher, ending_ids=(), draft=NO_DRAFT):
    """Return the masks of a matcher."""
    masks = MaskFill(matcher, ending_ids, draft)
    masks.run()
    return masks


def allowed_ids(matcher, vocab_size, ending_ids=()):
    """Return the tokens that may come next."""
    masks = filled(matcher, ending_ids)
    assert masks.error is None
    bits = np.unpackbits(masks.words.view(np.uint8)[0], bitorder="little")
    assert not bits[vocab_size:].any(), "a bit beyond the vocabulary is set"
    return set(np.flatnonzero(bits[:vocab_size]).tolist())


def allowed_next(matcher):
    """Return the tokens that may come next, in order, and whether an output may end here, by one mask."""
    words = np.zeros(matcher.end_token_id // 32 + 1, dtype=np.int32)
    assert fill_mask(matcher, words) is None
    allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
    may_end = allowed[-1:] == [matcher.end_token_id]
    return (allowed[:-1] if may_end else allowed), may_end
