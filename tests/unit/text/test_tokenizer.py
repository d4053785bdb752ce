from __future__ import annotations

import json
import shutil
import sys

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from quire.base.errors import ModelFormatError, RequestError, UnsupportedError
from quire.model.resolve import resolve_model
from quire.text.tokenizer import load_tokenizer

VOCAB = {"<s>": 0, "</s>": 1, "<unk>": 2, "a": 3, "b": 4, "\u2581": 5, "\u2581a": 6}


def write_tokenizer(folder, config=None, post_processor=None, added=("<s>", "</s>", "<unk>")):
    rust = RustTokenizer(models.BPE(vocab=VOCAB, merges=[("\u2581", "a")], unk_token="<unk>"))
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    rust.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    rust.add_special_tokens(list(added))
    if post_processor is not None:
        rust.post_processor = post_processor
    rust.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return rust


@pytest.mark.parametrize("name", ["gpt2", "gpt2-merges", "qwen3", "mistral", "mistral-model"])
def test_encode_gives_the_golden_ids(real_tokenizer, shared_lines, tmp_path, name):
    tokenizer = real_tokenizer(name, tmp_path)
    cases = [case for case in shared_lines("tokenizers/goldens.jsonl") if case["tokenizer"] == name.partition("-")[0]]
    assert len(cases) == 59
    for case in cases:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"], case["text"]
        if name != "qwen3":  # NFC normalises
            assert tokenizer.decode(case["ids"]) == case["text"]


def test_encode_adds_bos_as_the_checkpoint_does(real_tokenizer, shared_path):
    for case in json.loads(shared_path("checkpoints/stories260K/greedy.json").read_text()):
        assert real_tokenizer("stories").encode(case["prompt"]) == case["tokenizer_ids"]


def test_tokenizer_model_encodes_special_tokens_in_text_like_tokenizer_json(real_tokenizer, tmp_path):
    text = "<s>[INST] Hi [/INST] well</s> x<s>"
    ids = real_tokenizer("mistral").encode(text)
    assert ids[:2] == [1, 1]
    model = real_tokenizer("mistral-model", tmp_path)
    assert model.encode(text) == ids
    assert model.decode(ids) == real_tokenizer("mistral").decode(ids)
    assert model.decode(ids, skip_special_tokens=False) == real_tokenizer("mistral").decode(ids, skip_special_tokens=False)
    assert (model.bos_token_id, model.eos_token_id, model.special_token_ids) == (1, 2, frozenset((0, 1, 2)))


@pytest.mark.covering(keep=False)
@pytest.mark.parametrize("template", [None, "<s> $A", "<s> $A </s>"])
@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}])
@pytest.mark.parametrize("class_name", ["PreTrainedTokenizerFast", "LlamaTokenizerFast"])
def test_special_tokens_are_added_as_transformers_does(tmp_path, template, config, class_name):
    from transformers import AutoTokenizer

    special_tokens = [("<s>", 0), ("</s>", 1)]
    post_processor = template and processors.TemplateProcessing(single=template, special_tokens=special_tokens)
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}, "unk_token": "<unk>"}
    write_tokenizer(tmp_path, {**config, **named, "tokenizer_class": class_name}, post_processor)
    tokenizer = load_tokenizer(tmp_path)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("a b") == reference.encode("a b")
    assert tokenizer.encode("a b", add_special_tokens=False) == [6, 5, 4]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}])
def test_config_decides_on_special_tokens_without_tokenizer_json(tmp_path, flags):
    (tmp_path / "vocab.json").write_text('{"a": 0, "<|endoftext|>": 1}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    named = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**flags, **named}))
    expected = [1] * flags.get("add_bos_token", False) + [0] + [1] * flags.get("add_eos_token", False)
    assert load_tokenizer(tmp_path).encode("a") == expected
    assert load_tokenizer(tmp_path).encode("a", add_special_tokens=False) == [0]


@pytest.mark.parametrize(
    ("flags", "expected"), [({}, [1, 264]), ({"add_bos_token": False, "add_eos_token": True}, [264, 2])], ids=["llama", "asked"]
)
def test_tokenizer_model_adds_bos_unless_the_config_says_otherwise(tmp_path, shared_path, flags, expected):
    (tmp_path / "tokenizer.model").symlink_to(shared_path("tokenizers/mistral/tokenizer.model"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(flags))
    assert load_tokenizer(tmp_path).encode("a") == expected


def test_added_tokens_of_the_config_are_found_when_tokenizer_json_lacks_them(tmp_path):
    decoder = {"7": {"content": "<|tool|>", "special": True}, "8": {"content": "<note>", "special": False}}
    write_tokenizer(tmp_path, {"added_tokens_decoder": decoder})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a<|tool|><note>") == [6, 7, 8]
    assert tokenizer.decode([6, 7, 8]) == "a<note>"
    assert tokenizer.decode([6, 7, 8], skip_special_tokens=False) == "a<|tool|><note>"
    assert tokenizer.vocab_size == 9


def test_special_tokens_map_names_the_tokens_when_the_config_does_not(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    assert load_tokenizer(tmp_path).eos_token_id == 1


def test_truncation_of_tokenizer_json_is_ignored(tmp_path):
    rust = write_tokenizer(tmp_path)
    rust.enable_truncation(2)
    rust.enable_padding(length=5)
    rust.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).encode("b b b b")) == 8


def test_decode_cleans_up_spaces_only_when_asked_and_not_for_bpe(tmp_path):
    rust = RustTokenizer(models.WordLevel({"it": 0, ".": 1, "n't": 2, "[UNK]": 3}, unk_token="[UNK]"))
    rust.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    rust.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).decode([0, 2, 1]) == "it n't ."
    (tmp_path / "tokenizer_config.json").write_text('{"clean_up_tokenization_spaces": true}')
    assert load_tokenizer(tmp_path).decode([0, 2, 1]) == "itn't."
    write_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path).decode([6, 5, 4]) == "a b"


def test_token_text_keeps_the_leading_space(real_tokenizer):
    for name in ("gpt2", "mistral"):
        tokenizer = real_tokenizer(name)
        ids = tokenizer.encode("Hello world", add_special_tokens=False)
        assert [tokenizer.token_text(i) for i in ids][1] == " world"
    mistral = real_tokenizer("mistral")
    assert mistral.token_text(1) == "<s>"
    assert mistral.token_bytes(13) == b"\n"
    assert mistral.token_text(0xE6 + 3) == "\ufffd"
    assert mistral.token_bytes(10**6) == b""


def test_decode_ignores_ids_without_a_token(real_tokenizer):
    tokenizer = real_tokenizer("qwen3")
    assert tokenizer.decode([]) == ""
    assert tokenizer.decode([40, 151_900, 40]) == tokenizer.decode([40, 40])


@pytest.mark.parametrize("text", [None, 3, ["a"], "a\ud800"])
def test_encode_rejects_what_is_not_text(tmp_path, text):
    write_tokenizer(tmp_path)
    with pytest.raises(RequestError) as raised:
        load_tokenizer(tmp_path).encode(text)
    assert raised.value.param == "prompt"


def test_missing_files_are_named(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ModelFormatError, match=r"tokenizer\.json, tokenizer\.model, and vocab\.json with merges\.txt"):
            load_tokenizer(folder)


@pytest.mark.covering(keep=False)
@pytest.mark.parametrize(
    "file",
    ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json"],
)
@pytest.mark.parametrize("content", [b'{"version": ', b"[]", b"\xff\xfe{}"], ids=["cut", "list", "not-utf8"])
def test_damaged_json_is_named(tmp_path, file, content):
    write_tokenizer(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ModelFormatError, match=file):
        load_tokenizer(tmp_path)


def test_words_with_marks_of_their_ends_are_not_read_as_gpt2s(tmp_path):
    (tmp_path / "vocab.json").write_text('{"a": 0, "b</w>": 1, "ab</w>": 2}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b</w>\n")
    with pytest.raises(UnsupportedError, match=r"tokens that end with '</w>'.*: put its tokenizer\.json into"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("file", "content"),
    [("vocab.json", "{"), ("vocab.json", '{"a": "b"}'), ("vocab.json", "{}"), ("merges.txt", "a b c")],
)
def test_damaged_vocab_and_merges_are_named(tmp_path, file, content):
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    assert load_tokenizer(tmp_path).encode("ab") == [2]
    (tmp_path / file).write_text(content)
    with pytest.raises(ModelFormatError, match=file):
        load_tokenizer(tmp_path)


def test_vocab_and_merges_of_another_class_are_refused(tmp_path):
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(UnsupportedError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_damaged_sentencepiece_model_is_named(tmp_path):
    pytest.importorskip("sentencepiece")
    (tmp_path / "tokenizer.model").write_bytes(b"nonsense")
    with pytest.raises(ModelFormatError, match=r"tokenizer\.model"):
        load_tokenizer(tmp_path)


def test_missing_sentencepiece_says_how_to_install_it(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(UnsupportedError, match=r"quire\[sentencepiece\]"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"tokenizer_config.json": '{"chat_template": "config"}'}, "config"),
        ({"tokenizer_config.json": '{"chat_template": "config"}', "chat_template.jinja": "file"}, "file"),
        ({"chat_template.json": '{"chat_template": "json"}'}, "json"),
        (
            {
                "tokenizer_config.json": '{"chat_template": [{"name": "rag", "template": "r"}, '
                '{"name": "default", "template": "d"}]}'
            },
            "d",
        ),
    ],
    ids=["none", "config", "jinja-file-first", "json", "named"],
)
def test_chat_template_is_found(tmp_path, files, expected):
    write_tokenizer(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    template = load_tokenizer(tmp_path).chat_template
    assert (None if template is None else template.source) == expected


def test_chat_without_a_template_is_rejected(tmp_path):
    write_tokenizer(tmp_path)
    with pytest.raises(RequestError, match="chat template") as raised:
        load_tokenizer(tmp_path).encode_chat([{"role": "user", "content": "a"}])
    assert raised.value.param == "messages"


def test_chat_goldens_of_qwen3(real_tokenizer, shared_lines):
    tokenizer = real_tokenizer("qwen3")
    for case in shared_lines("tokenizers/chat_goldens.jsonl"):
        assert tokenizer.apply_chat_template(case["messages"], **case["kwargs"]) == case["text"], case["case"]
        if case["case"] != "unicode":  # spells <|im_end|> out, which test_chat_encoding.py is about
            assert tokenizer.encode_chat(case["messages"], **case["kwargs"]) == case["ids"], case["case"]
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"], case["case"]


def test_encode_chat_adds_bos_once(real_tokenizer):
    ids = real_tokenizer("stories").encode_chat([{"role": "user", "content": "Once"}])
    assert ids.count(1) == 1
    assert ids[0] == 1


def test_long_text_has_the_ids_that_the_tokenizer_gives(tmp_path):
    rust = write_tokenizer(tmp_path)
    text = "a b\u00e9 </s> " * 1000
    assert load_tokenizer(tmp_path).encode(text, add_special_tokens=False) == rust.encode(text, add_special_tokens=False).ids


def test_bundled_models_have_the_tokenizer_of_demo(tmp_path):
    text = "It was a cold morning."
    expected = load_tokenizer(resolve_model("demo")).encode(text)
    for name in ("demo-moe", "demo-draft"):
        tokenizer = load_tokenizer(resolve_model(name))
        assert tokenizer.encode(text) == expected
        assert tokenizer.chat_template is not None
    # Elsewhere a folder without a tokenizer has none.
    shutil.copytree(resolve_model("demo-moe"), tmp_path / "demo-moe")
    with pytest.raises(ModelFormatError, match="has no tokenizer"):
        load_tokenizer(tmp_path / "demo-moe")
