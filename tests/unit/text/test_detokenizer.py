from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers

from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.token_streams import WindowStream
from quire.text.tokenizer import load_tokenizer

TEXT = "日本 😀 héllo\n\n  wörld नमस्ते 👩‍👩‍👧 it 's , n't <s>x</s> <|im_end|> end."


def random_ids(rng, tokenizer):
    kind = rng.choice(["any", "low", "special", "text"])
    if kind == "text":
        ids = tokenizer.encode(TEXT)
        return ids[: rng.randrange(len(ids))] + [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(4))]
    high = min(300, tokenizer.vocab_size) if kind == "low" else tokenizer.vocab_size + 20
    special = sorted(tokenizer.special_token_ids) if kind == "special" else []
    return [rng.choice(special) if special and rng.random() < 0.3 else rng.randrange(high) for _ in range(rng.randrange(40))]


def pieces_of(rng, tokenizer, ids, skip_special_tokens):
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
    most = rng.choice([1, 1, 6])
    pieces, begin = [], 0
    while begin < len(ids):
        end = begin + rng.randint(1, most)
        pieces.append(detokenizer.append(ids[begin:end]))
        begin = end
    return [*pieces, detokenizer.finish()]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["gpt2", "qwen3", "mistral", "mistral-model", "stories"])
def test_pieces_join_to_the_decoded_text(real_tokenizer, tmp_path, name):
    tokenizer = real_tokenizer(name, tmp_path)
    rng = random.Random(1)
    for _ in range(600):
        ids, skips = random_ids(rng, tokenizer), rng.random() < 0.5
        assert "".join(pieces_of(rng, tokenizer, ids, skips)) == tokenizer.decode(ids, skips), ids


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "mistral", "stories"])
def test_no_piece_holds_half_a_character(real_tokenizer, name):
    tokenizer = real_tokenizer(name)
    pieces = pieces_of(random.Random(0), tokenizer, tokenizer.encode(TEXT), True)
    assert not any("\ufffd" in piece for piece in pieces)
    assert sum(1 for piece in pieces if piece) > 5


def test_text_is_not_held_back_longer_than_needed(real_tokenizer):
    tokenizer = real_tokenizer("gpt2")
    detokenizer = IncrementalDetokenizer(tokenizer)
    for token_id in tokenizer.encode("The quick brown fox"):
        assert detokenizer.append([token_id]) == tokenizer.token_text(token_id)


def test_nothing_gives_nothing(real_tokenizer):
    detokenizer = IncrementalDetokenizer(real_tokenizer("gpt2"))
    assert detokenizer.append([]) == detokenizer.finish() == ""


def test_text_after_a_prompt_keeps_its_leading_space(real_tokenizer):
    tokenizer = real_tokenizer("stories")
    prompt = tokenizer.encode("Once upon a time")
    ids = tokenizer.encode("there", add_special_tokens=False)
    for after, expected in ((prompt, " there"), ([], "there"), (prompt[:1], "there")):
        detokenizer = IncrementalDetokenizer(tokenizer, after=after)
        assert detokenizer.append(ids) + detokenizer.finish() == expected


def make_tokenizer(folder, kind):
    words = ["it", "n't", ".", ",", "'s", "\u2581it", "\u2581", "\u2581\u2581a", "##ing", "go</w>", "a", "<0x0A>", "<0xE6>"]
    rust = RustTokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="it"))
    rust.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    decoder = {
        "metaspace": decoders.Metaspace(),
        "wordpiece": decoders.WordPiece(),
        "bpe": decoders.BPEDecoder(),
        "bytes-then-metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    }.get(kind)
    if decoder is not None:
        rust.decoder = decoder
    rust.add_special_tokens(["<s>"])
    rust.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(f'{{"clean_up_tokenization_spaces": {str(kind == "cleaned").lower()}}}')
    return load_tokenizer(folder)


@pytest.mark.parametrize("kind", ["metaspace", "wordpiece", "bpe", "bytes-then-metaspace", "joined", "cleaned"])
def test_pieces_join_to_the_decoded_text_with_other_decoders(tmp_path, kind):
    tokenizer = make_tokenizer(tmp_path, kind)
    assert kind == "cleaned" or isinstance(tokenizer.new_stream(), WindowStream)
    rng = random.Random(2)
    num_words = 11 if kind == "bpe" else tokenizer.vocab_size
    for _ in range(400):
        ids = [rng.randrange(num_words) for _ in range(rng.randrange(25))]
        assert "".join(pieces_of(rng, tokenizer, ids, True)) == tokenizer.decode(ids), ids
