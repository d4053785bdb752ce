"""Texts of tokens: joined they are the text, whatever is held back."""

from __future__ import annotations

import random

import pytest

from quire.serving.core.alignment import TokenAligner
from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.stop_strings import StopStringScanner
from tests.unit.grammar.tokenizer_kinds import make_tokenizer
from tests.unit.serving.fakes import load_demo_tokenizer

TOKENIZER = load_demo_tokenizer()
TEXT = 'Once upon a time — été, 日本語 and 🙂🙂 — there was a girl. She said: "stop here" and left.'


def deltas_of(token_ids, rng, stops=()):
    """Cut tokens into deltas as the engine does: the text lags behind while a stop string or a character is incomplete."""
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    scanner = StopStringScanner(tuple(stops), False) if stops else None
    at, found = 0, None
    while at < len(token_ids) and found is None:
        ids, text = [], ""
        for token_id in token_ids[at : at + rng.randint(1, 4)]:
            piece = detokenizer.append([token_id])
            if scanner is not None:
                piece, found = scanner.feed(piece)
            ids.append(token_id)
            text += piece
            if found is not None:
                break
        at += len(ids)
        if at >= len(token_ids) and found is None:
            rest = detokenizer.finish()
            text += rest if scanner is None else scanner.feed(rest)[0] + scanner.flush()
        yield text, ids, found is not None or at >= len(token_ids), found


@pytest.mark.covering
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("stops", [(), ("stop here",), ("girl. S", "été,  "), ("🙂🙂",)], ids=str)
def test_pieces_join_to_the_text_and_tokens_come_in_order(seed, stops):
    rng = random.Random(seed)
    token_ids = TOKENIZER.encode(TEXT, add_special_tokens=False)
    aligner = TokenAligner(TOKENIZER, True, [])
    whole, pieces = "", []
    for text, ids, is_last, found in deltas_of(token_ids, rng, stops):
        whole += text
        marks = [[token_id] for token_id in ids]
        if is_last:
            new = aligner.feed("", ids, marks) + aligner.finish(text, found is not None)
        else:
            new = aligner.feed(text, ids, marks)
        pieces += new
        assert "".join(piece.text for piece in pieces) == whole
        given = [piece.token_id for piece in pieces if piece.token_id is not None]
        assert given == token_ids[: len(given)]
        data = b"".join(TOKENIZER.token_bytes(token_id) for token_id in given)
        if not is_last:  # what was given of the tokens is what was given of the text, but for the rest of one token
            assert whole.startswith(data.decode("utf-8"))
    given = [piece.token_id for piece in pieces if piece.token_id is not None]
    assert all(piece.position == [piece.token_id] for piece in pieces if piece.token_id is not None)
    if not any(stop in TEXT for stop in stops):
        assert given == token_ids
        assert whole == TEXT
    else:
        data = b"".join(TOKENIZER.token_bytes(token_id) for token_id in given).decode("utf-8", "replace")
        assert data.startswith(whole)
        assert len(data) - len(whole) < 12


def test_incomplete_character_at_the_end_belongs_to_its_tokens():
    token_ids = TOKENIZER.encode("a🙂", add_special_tokens=False)[:-1]
    aligner = TokenAligner(TOKENIZER, True, [])
    pieces = aligner.feed("", token_ids, None) + aligner.finish(TOKENIZER.decode(token_ids), False)
    assert "".join(piece.text for piece in pieces) == TOKENIZER.decode(token_ids)
    assert [piece.token_id for piece in pieces] == token_ids


def test_tokens_of_a_constrained_output_keep_their_first_space(tmp_path):
    """As the engine does: after a prompt of special tokens only, a decoder of Llama's would drop it."""
    tokenizer = make_tokenizer("llama", tmp_path)
    token_ids = tokenizer.encode("hello hello", add_special_tokens=False)
    aligner = TokenAligner(tokenizer, True, [1], is_exact=True)
    pieces = aligner.feed(" hello", token_ids[:1], None) + aligner.feed(" hello", token_ids[1:], None)
    assert [(piece.text, piece.token_id) for piece in pieces] == [(" hello", token_ids[0]), (" hello", token_ids[1])]
