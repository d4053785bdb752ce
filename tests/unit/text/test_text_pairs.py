"""encode_texts against transformers' own joining and truncation."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from quire.base.errors import RequestError
from quire.text.text_pairs import encode_texts
from quire.text.tokenizer import load_tokenizer

WORDS = ["[CLS]", "[SEP]", "[UNK]", *(f"w{index}" for index in range(40))]
TEXTS = [
    " ".join(f"w{index % 40}" for index in range(start, start + length)) for start, length in ((0, 3), (5, 9), (9, 30), (2, 1))
]


@pytest.fixture(scope="module", params=["pairs", "plain"])
def folder(request, tmp_path_factory):
    """Return a tokenizer with a template for pairs, or without any."""
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if request.param == "pairs":
        tokenizer.add_special_tokens(WORDS[:2])
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.mark.parametrize("limit", [None, 50, 20, 13, 8, 5])
def test_ids_are_those_of_transformers(folder, limit):
    ours = load_tokenizer(folder)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    cut = {} if limit is None else {"truncation": True, "max_length": limit}
    for first in TEXTS:
        assert encode_texts(ours, (first,), limit) == theirs(first, **cut)["input_ids"]
        for second in TEXTS:
            assert encode_texts(ours, (first, second), limit) == theirs(first, second, **cut)["input_ids"], (first, second)


def test_limit_that_special_tokens_fill_is_refused(folder):
    tokenizer = load_tokenizer(folder)
    num_special = len(encode_texts(tokenizer, (TEXTS[0], TEXTS[1]))) - 12
    if num_special == 0:
        assert len(encode_texts(tokenizer, (TEXTS[0], TEXTS[1]), 1)) == 1
        return
    with pytest.raises(RequestError, match="truncate_prompt_tokens is 3, but the tokenizer adds 3 special tokens") as raised:
        encode_texts(tokenizer, (TEXTS[0], TEXTS[1]), num_special)
    assert raised.value.param == "truncate_prompt_tokens"
