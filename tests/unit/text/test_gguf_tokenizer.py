"""Tokenizers from GGUF metadata, made here from real tokenizer files and compared with those."""

import itertools
import json

import pytest

from quire.base.errors import ModelFormatError, RequestError, UnsupportedError
from quire.text.gguf_splits import _SPLITS, find_split
from quire.text.tokenizer import load_tokenizer
from tests.gguf_writer import write_gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
LOADED = {}


def byte_level_metadata(folder, pre, num_rows=None):
    """Return the metadata of a byte-level tokenizer.json, its vocabulary filled up to `num_rows`."""
    whole = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    token_of = {token_id: token for token, token_id in whole["model"]["vocab"].items()}
    kinds = dict.fromkeys(token_of, NORMAL)
    for added in whole["added_tokens"]:
        token_of[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    for token_id in range(len(token_of), num_rows or 0):
        token_of[token_id], kinds[token_id] = f"[PAD{token_id}]", UNUSED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in whole["model"]["merges"]]
    return {
        "tokenizer.ggml.model": ("string", "gpt2"),
        "tokenizer.ggml.pre": ("string", pre),
        "tokenizer.ggml.tokens": ("string[]", [token_of[index] for index in range(len(token_of))]),
        "tokenizer.ggml.token_type": ("i32[]", [kinds[index] for index in range(len(token_of))]),
        "tokenizer.ggml.merges": ("string[]", merges),
    }


def sentencepiece_metadata(folder):
    sentencepiece = pytest.importorskip("sentencepiece")
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    ids = range(model.vocab_size())
    kinds = [
        UNKNOWN if model.is_unknown(i) else CONTROL if model.is_control(i) else BYTE if model.is_byte(i) else NORMAL
        for i in ids
    ]
    return {
        "tokenizer.ggml.model": ("string", "llama"),
        "tokenizer.ggml.pre": ("string", "default"),
        "tokenizer.ggml.tokens": ("string[]", [model.id_to_piece(i) for i in ids]),
        "tokenizer.ggml.scores": ("f32[]", [model.get_score(i) for i in ids]),
        "tokenizer.ggml.token_type": ("i32[]", kinds),
        "tokenizer.ggml.bos_token_id": ("u32", 1),
        "tokenizer.ggml.eos_token_id": ("u32", 2),
    }


@pytest.fixture
def from_real(shared_path, tmp_path):
    """Return a function from gpt2, qwen3 or mistral to the tokenizer of a GGUF file with its vocabulary."""

    def get(name):
        if name not in LOADED:
            folder = shared_path(f"tokenizers/{name}")
            metadata = {"general.architecture": ("string", {"mistral": "llama"}.get(name, name))}
            if name == "mistral":
                metadata |= sentencepiece_metadata(folder)
            else:
                pre, num_rows = {"gpt2": ("gpt-2", None), "qwen3": ("qwen2", 151936)}[name]
                metadata |= byte_level_metadata(folder, pre, num_rows)
                config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
                eos = 50256 if name == "gpt2" else 151645
                metadata |= {"tokenizer.ggml.eos_token_id": ("u32", eos), "tokenizer.ggml.add_bos_token": ("bool", False)}
                if isinstance(config.get("chat_template"), str):
                    metadata["tokenizer.chat_template"] = ("string", config["chat_template"])
            LOADED[name] = load_tokenizer(write_gguf(tmp_path / f"{name}.gguf", metadata))
        return LOADED[name]

    return get


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["gpt2", "qwen3", "mistral"])
def test_encode_gives_the_golden_ids(from_real, shared_lines, name):
    tokenizer = from_real(name)
    cases = [case for case in shared_lines("tokenizers/goldens.jsonl") if case["tokenizer"] == name]
    assert len(cases) == 59
    for case in cases:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"], case["text"]
        if name != "qwen3":  # NFC normalises
            assert tokenizer.decode(case["ids"]) == case["text"]


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "mistral"])
def test_special_tokens_and_long_text_are_those_of_the_original(from_real, real_tokenizer, shared_path, name):
    original, tokenizer = real_tokenizer(name), from_real(name)
    text = shared_path("text/tinyshakespeare.txt").read_text()[:20_000]
    texts = [
        text,
        text.replace(" ", "  "),
        "  <s>[INST] Hi [/INST]</s> x",
        "<think>\n<|im_start|>a <|endoftext|>",
        "\n",
        "  é\u0301",
    ]
    for content in texts:
        ids = original.encode(content)
        assert tokenizer.encode(content) == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode(ids) == original.decode(ids)
        stream = tokenizer.new_stream()
        whole = tokenizer.decode(ids, skip_special_tokens=False)
        assert "".join([*map(stream.push, ids), stream.finish()]) == whole
    assert tokenizer.special_token_ids == original.special_token_ids
    assert tokenizer.eos_token_id == original.eos_token_id


def test_chat_goldens_of_qwen3(from_real, shared_lines):
    tokenizer = from_real("qwen3")
    for case in shared_lines("tokenizers/chat_goldens.jsonl"):
        if case["case"] != "unicode":  # spells <|im_end|> out, which test_chat_encoding.py is about
            assert tokenizer.encode_chat(case["messages"], **case["kwargs"]) == case["ids"], case["case"]
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"], case["case"]


def test_rows_that_fill_the_embedding_up_have_no_text(from_real, real_tokenizer):
    tokenizer = from_real("qwen3")
    assert tokenizer.vocab_size == real_tokenizer("qwen3").vocab_size
    assert tokenizer.decode([151_935, 9707]) == "Hello"
    assert tokenizer.token_bytes(151_935) == b""


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def small_spm(**changes):
    """Return metadata of a SentencePiece vocabulary: unk, bos, eos, a user-defined token, 256 bytes and a few pieces."""
    tokens = ["<unk>", "<s>", "</s>", "<note>", *BYTES, "▁", "a", "b", "ab", "▁a", "▁ab"]
    kinds = [UNKNOWN, CONTROL, CONTROL, USER_DEFINED, *[BYTE] * 256, *[NORMAL] * 6]
    metadata = {
        "general.architecture": ("string", "llama"),
        "tokenizer.ggml.model": ("string", "llama"),
        "tokenizer.ggml.tokens": ("string[]", tokens),
        "tokenizer.ggml.scores": ("f32[]", [0.0] * 260 + [-4.0, -5.0, -6.0, -1.0, -2.0, -3.0]),
        "tokenizer.ggml.token_type": ("i32[]", kinds),
    }
    metadata |= {key.replace("__", "."): item for key, item in changes.items()}
    return {key: item for key, item in metadata.items() if item is not None}


def test_gemma4_merges_as_the_file_says_and_marks_spaces(tmp_path):
    metadata = small_spm(
        general__architecture=("string", "gemma4"),
        tokenizer__ggml__model=("string", "gemma4"),
        tokenizer__ggml__bos_token_id=("u32", 1),
        tokenizer__ggml__scores=None,
        tokenizer__ggml__merges=("string[]", ["a b", "\u2581 a", "\u2581a b"]),
    )
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", metadata))
    first = 4 + 256  # the mark of spaces, a, b, ab, and both a and ab behind a mark follow
    assert tokenizer.encode("ab a b") == [1, first + 3, first + 4, first, first + 2]
    assert tokenizer.encode("a\n\u00e9", add_special_tokens=False) == [first + 1, 4 + 10, 4 + 0xC3, 4 + 0xA9]
    assert tokenizer.decode([first + 3, first, first + 2, 4 + 0xC3, 4 + 0xA9]) == "ab b\u00e9"


def small_bpe(**changes):
    metadata = {
        "general.architecture": ("string", "llama"),
        "tokenizer.ggml.model": ("string", "gpt2"),
        "tokenizer.ggml.pre": ("string", "llama-bpe"),
        "tokenizer.ggml.tokens": ("string[]", ["a", "b", "Ġ", "c", "ab", "abc", "1", "<bos>", "<eos>"]),
        "tokenizer.ggml.token_type": ("i32[]", [NORMAL] * 7 + [CONTROL] * 2),
        "tokenizer.ggml.merges": ("string[]", ["a b"]),
        "tokenizer.ggml.bos_token_id": ("u32", 7),
        "tokenizer.ggml.eos_token_id": ("u32", 8),
    }
    metadata |= {key.replace("__", "."): item for key, item in changes.items()}
    return {key: item for key, item in metadata.items() if item is not None}


def load(tmp_path, metadata):
    return load_tokenizer(write_gguf(tmp_path / "model.gguf", metadata))


A, B, AB, SPACE, SPACE_A, SPACE_AB = 261, 262, 263, 260, 264, 265


@pytest.mark.parametrize(
    ("changes", "text", "ids"),
    [
        ({}, "ab", [1, SPACE_AB]),
        ({}, "", [1]),
        ({}, "  a", [1, SPACE, SPACE, SPACE_A]),
        ({}, "b<note>b", [1, SPACE, B, 3, SPACE, B]),
        ({}, "é", [1, SPACE, 4 + 0xC3, 4 + 0xA9]),
        ({"tokenizer.ggml.add_bos_token": ("bool", False)}, "ab", [SPACE_AB]),
        ({"tokenizer.ggml.add_eos_token": ("bool", True)}, "ab", [1, SPACE_AB, 2]),
        ({"tokenizer.ggml.add_space_prefix": ("bool", False)}, "ab ab", [1, AB, SPACE_AB]),
        ({"tokenizer.ggml.scores": ("f32[]", [0.0] * 260 + [-4, -5, -6, -3, -1, -2])}, "abab", [1, SPACE_AB, AB]),
        ({"tokenizer.ggml.bos_token_id": ("u32", 2)}, "a", [2, SPACE_A]),
    ],
)
def test_sentencepiece_flags_decide(tmp_path, changes, text, ids):
    tokenizer = load(tmp_path, small_spm(**changes))
    assert tokenizer.encode(text) == ids
    # Every part of a text begins with a space of its own, and only the first is taken away again.
    assert tokenizer.decode(ids) == text.replace("<note>", "<note> ")


def spm_of(pieces):
    """Return metadata of a SentencePiece vocabulary of these pieces alone, all of one score."""
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *pieces]
    return small_spm(
        **{
            "tokenizer.ggml.tokens": ("string[]", tokens),
            "tokenizer.ggml.token_type": ("i32[]", [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]),
            "tokenizer.ggml.scores": ("f32[]", [0.0] * len(tokens)),
        }
    )


def test_merges_are_refused_when_a_small_file_makes_many_of_every_token(tmp_path):
    # Every cut of every word over two letters makes two words of them: eleven for a word of twelve letters.
    pieces = ["".join(letters) for length in range(1, 13) for letters in itertools.product("ab", repeat=length)]
    with pytest.raises(ModelFormatError, match="more than 32760 pairs of tokens make a third among 8190"):
        load(tmp_path, spm_of(pieces))


def test_words_are_joined_by_score_then_by_the_order_of_the_tokens(tmp_path):
    # "ab" and "ba" have one score, and "ab" comes first.
    tokenizer = load(tmp_path, spm_of(["▁", "a", "b", "ab", "ba"]))
    assert [tokenizer.decode([token]) for token in tokenizer.encode("baba")[2:]] == ["b", "ab", "a"]


def test_gemma_ranks_tokens_by_their_order(tmp_path):
    # By these scores "▁a" is joined first, by the order of the tokens "ab" is; "▁ab" is no token.
    tokens = ["<unk>", "<s>", "</s>", *BYTES, "▁", "a", "b", "ab", "▁a"]
    metadata = small_spm(
        **{
            "tokenizer.ggml.tokens": ("string[]", tokens),
            "tokenizer.ggml.token_type": ("i32[]", [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 5]),
            "tokenizer.ggml.scores": ("f32[]", [0.0] * 262 + [-2.0, -1.0]),
        }
    )
    spelt = {
        name: load(tmp_path, {**metadata, "general.architecture": ("string", name)}).encode("ab", add_special_tokens=False)
        for name in ("llama", "gemma2")
    }
    assert spelt == {"llama": [263, 261], "gemma2": [259, 262]}


@pytest.mark.parametrize(
    ("changes", "text", "ids"),
    [
        ({}, "abc", [7, 5]),
        ({"tokenizer.ggml.pre": ("string", "dbrx")}, "abc", [4, 3]),
        ({"tokenizer.ggml.pre": ("string", "smollm")}, "ab11", [4, 6, 6]),
        ({"tokenizer.ggml.add_bos_token": ("bool", False)}, "abc", [5]),
        ({"tokenizer.ggml.add_eos_token": ("bool", True)}, "a b", [7, 0, 2, 1, 8]),
        ({"tokenizer.ggml.bos_token_id": None}, "a", [0]),
        ({}, "a<eos>b", [7, 0, 8, 1]),
    ],
)
def test_byte_level_flags_decide(tmp_path, changes, text, ids):
    tokenizer = load(tmp_path, small_bpe(**changes))
    assert tokenizer.encode(text) == ids
    assert tokenizer.eos_token_id == 8


def test_phi3_takes_spaces_after_special_tokens_away(tmp_path):
    kinds = [UNKNOWN, CONTROL, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 6]
    metadata = small_spm(**{"tokenizer.ggml.token_type": ("i32[]", kinds), "general.architecture": ("string", "phi3")})
    tokenizer = load(tmp_path, metadata)
    assert tokenizer.encode("<note>\n a", add_special_tokens=False) == [3, SPACE_A]
    assert tokenizer.encode("<s> a", add_special_tokens=False) == [1, SPACE, SPACE_A]


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"tokenizer.ggml.tokens": None}, ModelFormatError, "has no tokenizer"),
        ({"tokenizer.ggml.tokens": ("u8[]", [1])}, ModelFormatError, "an array of strings"),
        ({"tokenizer.ggml.tokens": ("string[]", ["a"] * 9)}, ModelFormatError, "all differ"),
        ({"tokenizer.ggml.token_type": ("i32[]", [1])}, ModelFormatError, "9 numbers"),
        ({"tokenizer.ggml.token_type": ("i32[]", [99] * 9)}, ModelFormatError, "from 1 to 6"),
        ({"tokenizer.ggml.token_type": ("f32[]", [1.0] * 9)}, ModelFormatError, "an array of i32"),
        ({"tokenizer.ggml.token_type": ("u8[]", [1] * 9)}, ModelFormatError, "an array of i32"),
        ({"tokenizer.ggml.bos_token_id": ("u32", 9)}, ModelFormatError, "below the number of tokens"),
        ({"tokenizer.ggml.eos_token_id": ("i32", -1)}, ModelFormatError, "below the number of tokens"),
        ({"tokenizer.ggml.eos_token_id": ("string", "x")}, ModelFormatError, "an integer"),
        ({"tokenizer.ggml.add_bos_token": ("u8", 1)}, ModelFormatError, "a boolean"),
        ({"tokenizer.ggml.merges": None}, ModelFormatError, "an array of strings"),
        ({"tokenizer.ggml.merges": ("string[]", ["ab"])}, ModelFormatError, "pairs of tokens"),
        ({"tokenizer.ggml.merges": ("string[]", ["x y"])}, ModelFormatError, "cannot be used"),
        ({"tokenizer.ggml.model": ("string", "bert")}, UnsupportedError, "'bert' is not supported; supported: gpt2, llama"),
        ({"tokenizer.ggml.model": None}, UnsupportedError, "None is not supported"),
        ({"tokenizer.ggml.pre": ("string", "no-such-pre")}, UnsupportedError, "'no-such-pre' is not supported"),
        ({"tokenizer.ggml.pre": ("string", "deepseek-v4")}, UnsupportedError, r"\(did you mean deepseek-v3"),
        ({"tokenizer.chat_template": ("u32", 1)}, ModelFormatError, "a string"),
    ],
)
def test_damaged_or_unknown_metadata_are_refused(tmp_path, changes, error, reason):
    with pytest.raises(error, match=reason):
        load(tmp_path, small_bpe(**changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokenizer.ggml.scores": None}, "266 f32"),
        ({"tokenizer.ggml.scores": ("f32[]", [0.0])}, "266 f32"),
        ({"tokenizer.ggml.scores": ("f64[]", [0.0] * 266)}, "an array of f32"),
        ({"tokenizer.ggml.unknown_token_id": ("u32", 266)}, "below the number of tokens"),
        ({"tokenizer.ggml.tokens": ("string[]", [f"{n}" for n in range(265)] + ["x" * 1025])}, "1025 characters"),
    ],
)
def test_damaged_scores_are_refused(tmp_path, changes, reason):
    with pytest.raises(ModelFormatError, match=reason):
        load(tmp_path, small_spm(**changes))


@pytest.mark.parametrize(
    ("templates", "expected"),
    [
        ({}, None),
        ({"tokenizer.chat_template": ("string", "main")}, "main"),
        ({"tokenizer.chat_templates": ("string[]", ["rag"]), "tokenizer.chat_template.rag": ("string", "r")}, "r"),
        (
            {
                "tokenizer.chat_templates": ("string[]", ["rag", "default"]),
                "tokenizer.chat_template.rag": ("string", "r"),
                "tokenizer.chat_template.default": ("string", "d"),
            },
            "d",
        ),
        (
            {
                "tokenizer.chat_template": ("string", "main"),
                "tokenizer.chat_templates": ("string[]", ["tool_use"]),
                "tokenizer.chat_template.tool_use": ("string", "t"),
            },
            "main",
        ),
    ],
)
def test_chat_template_is_found(tmp_path, templates, expected):
    template = load(tmp_path, small_bpe(**templates)).chat_template
    assert (None if template is None else template.source) == expected


def test_gpt_oss_splits_as_gpt_4o_takes_no_bos_and_finds_the_marks_of_its_template(tmp_path):
    marks = ["<|startoftext|>", "<|return|>", "<|start|>", "<|message|>", "<|end|>"]
    pieces = ["a", "b", "B", "ab", "bB", "Bb", "1", "11", "111", "1111", "\u0120", "\u0120a"]
    template = "{% for m in messages %}<|start|>{{ m.role[:0] }}<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>"
    metadata = {
        "general.architecture": ("string", "gpt-oss"),
        "tokenizer.ggml.model": ("string", "gpt2"),
        "tokenizer.ggml.pre": ("string", "gpt-4o"),
        "tokenizer.ggml.tokens": ("string[]", [*marks, *pieces]),
        "tokenizer.ggml.token_type": ("i32[]", [CONTROL] * len(marks) + [NORMAL] * len(pieces)),
        "tokenizer.ggml.merges": ("string[]", ["a b", "b B", "B b", "1 1", "11 1", "11 11", "\u0120 a"]),
        "tokenizer.ggml.bos_token_id": ("u32", 0),
        "tokenizer.ggml.eos_token_id": ("u32", 1),
        "tokenizer.chat_template": ("string", template),
    }
    tokenizer = load(tmp_path, metadata)
    names = [*marks, *pieces]

    def tokens(ids):
        return [names[token_id] for token_id in ids]

    # A word ends before a capital letter, and digits are taken by threes, whatever could be merged.
    assert tokens(tokenizer.encode("abBb1111 a")) == ["ab", "Bb", "111", "1", "\u0120a"]
    chat = tokenizer.encode_chat([{"role": "user", "content": "ab"}])
    assert tokens(chat) == ["<|start|>", "<|message|>", "ab", "<|end|>", "<|start|>"]


def test_chat_template_runs_in_the_sandbox(tmp_path):
    source = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    tokenizer = load(tmp_path, small_bpe(**{"tokenizer.chat_template": ("string", source)}))
    with pytest.raises((RequestError, ModelFormatError)):
        tokenizer.encode_chat([{"role": "user", "content": "a"}])


def test_whole_tokenizer_json_is_used_only_when_it_fits(tmp_path, caplog):
    original = load(tmp_path, small_bpe())
    whole = json.loads(original.backend._tokenizer.to_str())
    whole["model"]["merges"].append(["ab", "c"])
    whole["model"]["ignore_merges"] = False
    changed = load(tmp_path, small_bpe(**{"tokenizer.huggingface.json": ("string", json.dumps(whole))}))
    assert changed.encode("aabc", add_special_tokens=False) == [0, 5]
    assert original.encode("aabc", add_special_tokens=False) == [0, 4, 3]
    whole["model"]["vocab"]["zz"] = 9
    for text, reason in ((json.dumps(whole), "has other tokens"), ("{", "is damaged")):
        tokenizer = load(tmp_path, small_bpe(**{"tokenizer.huggingface.json": ("string", text)}))
        assert tokenizer.encode("aabc", add_special_tokens=False) == [0, 4, 3]
        assert reason in caplog.text


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("llama-bpe", "I'LL pay 12345 €!!\n\n x", ["I", "'LL", " pay", " ", "123", "45", " €!!\n\n", " x"]),
        ("qwen2", "I'LL pay 123 €", ["I", "'LL", " pay", " ", "1", "2", "3", " €"]),
        ("gpt-4o", "HelloWorld's 1234/\n", ["Hello", "World's", " ", "123", "4", "/\n"]),
        ("tekken", "HelloWorld's 12", ["Hello", "World", "'s", " ", "1", "2"]),
        ("glm4", "I'LL pay 1234!", ["I", "'LL", " pay", " ", "123", "4", "!"]),
        ("qwen35", "नमस्ते 12", ["नमस्ते", " ", "1", "2"]),
        ("minimax-m2", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
        ("kimi-k2", "Hello世界ok 1234\n\n", ["Hello", "世界", "ok", " ", "123", "4", "\n\n"]),
        ("deepseek-v3", "a_b 12345 世界。\n", ["a", "_b", " ", "123", "45", " ", "世界", "。\n"]),
        ("deepseek-coder", "x, 12\nü世", ["x", ",", " ", "1", "2", "\n", "ü", "世"]),
        ("deepseek-llm", "Ab δε, 123\n世界", ["Ab", " δε", ",", " ", "123", "\n", "世界"]),
        ("falcon", "it's 12345`", ["it", "'", "s", " ", "123", "45", "`"]),
        ("default", "it's $5, 1234", ["it", "'", "s", " ", "$", "5", ",", " ", "123", "4"]),
        ("bloom", "a b, c", ["a", " b", ",", " c"]),
        ("viking", "a 12", ["a", " ", "1", "2"]),
        ("seed-coder", "a!!\n b", ["a", "!!", "\n", " b"]),
        ("bailingmoe", "don't\n\nx", ["don", "'t", "\n\n", "x"]),
        ("exaone-moe", "one two 12", ["one two", " ", "1", "2"]),
    ],
)
def test_text_is_split_as_the_name_says(tmp_path, name, text, pieces):
    from tokenizers import Regex, pre_tokenizers

    found = find_split(name, "llama", tmp_path)
    patterns = (*found.before, found.pattern)
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns])
    assert [piece for piece, _ in split.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize("pre", [None, ("string", "default")])
def test_a_general_split_is_taken_with_a_warning_where_a_file_names_none(tmp_path, caplog, pre):
    tokenizer = load(tmp_path, small_bpe(**{"tokenizer.ggml.pre": pre}))
    assert tokenizer.encode("ab", add_special_tokens=False) == [4]
    assert "text is split in a general way" in caplog.text


@pytest.mark.parametrize("name", sorted(_SPLITS))
def test_a_tokenizer_is_made_of_every_split(tmp_path, name):
    tokenizer = load(tmp_path, small_bpe(**{"tokenizer.ggml.pre": ("string", name)}))
    assert tokenizer.encode("a b", add_special_tokens=False) == [0, 2, 1]
