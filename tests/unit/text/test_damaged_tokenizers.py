"""Damaged tokenizer files: always a ModelFormatError that names the file, whatever the libraries raise for them."""

import copy
import json
import random
import re

import pytest

from quire.base.errors import ModelFormatError, RequestError, UnsupportedError
from quire.text.tokenizer import load_tokenizer
from quire.text.tokenizers_backend import LibraryBorder
from tests.tiny_checkpoint import write_tokenizer

LONE = "\ud800"
TEXTS = ("the quick brown fox", "Hello, wörld! 漢字 🦊\n\n  x", "<|endoftext|> a <s>", "", "x" * 5000)
VALUES = (None, True, False, 0, -1, 2**31, -(2**70), 1.5, "", "x", LONE, "\0", [], [None], ["a"], [["a", "b"]], {}, {"a": 1})
_NUM_DAMAGES = 40


@pytest.fixture
def folder(tmp_path):
    """A tokenizer.json with all files that may lie beside it."""
    write_tokenizer(tmp_path)
    extra = ["<a>", {"content": "<b>"}]
    named = {"bos_token": "<s>", "eos_token": {"content": "<|endoftext|>"}, "additional_special_tokens": extra}
    _write(tmp_path / "special_tokens_map.json", named)
    _write(tmp_path / "added_tokens.json", {"<a>": 301, "<b>": 302})
    config = _read(tmp_path / "tokenizer_config.json")
    config["added_tokens_decoder"] = {"300": {"content": "<|endoftext|>", "special": True, "lstrip": False}}
    _write(tmp_path / "tokenizer_config.json", config)
    use(tmp_path)
    return tmp_path


@pytest.fixture
def old_folder(folder):
    """The same vocabulary in vocab.json and merges.txt."""
    model = _read(folder / "tokenizer.json")["model"]
    for file in folder.iterdir():
        file.unlink()
    _write(folder / "vocab.json", model["vocab"])
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"})
    use(folder)
    return folder


def _read(file):
    return json.loads(file.read_text())


def _write(file, value):
    file.write_text(json.dumps(value))


def use(folder):
    tokenizer = load_tokenizer(folder)
    for text in TEXTS:
        token_ids = tokenizer.encode(text)
        tokenizer.decode(token_ids)
        stream = tokenizer.new_stream()
        for token_id in token_ids:
            stream.push(token_id)
        stream.finish()
    for token_id in range(min(tokenizer.vocab_size + 2, 400)):
        tokenizer.token_bytes(token_id)
    if tokenizer.chat_template is not None:
        tokenizer.encode_chat([{"role": "user", "content": "hi <|endoftext|>"}])


def paths(value, at=()):
    """Yield the ways to all places in a JSON value, of long lists and vocabularies to some."""
    if at:
        yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items)[:12]:
        yield from paths(item, (*at, key))


def damage(raw, rng):
    """Return a JSON file with another value somewhere, or with other bytes."""
    if rng.random() < 0.8:
        value = json.loads(raw)
        way = rng.choice(list(paths(value)))
        place = value
        for key in way[:-1]:
            place = place[key]
        if rng.random() < 0.8:
            place[way[-1]] = copy.deepcopy(rng.choice(VALUES))
        else:
            del place[way[-1]]
        return json.dumps(value).encode()
    return damage_bytes(raw, rng)


def damage_bytes(raw, rng):
    """Return a file with a bit turned over, cut off, or with something put in."""
    octets, index = bytearray(raw), rng.randrange(len(raw))
    kind = rng.randrange(3)
    if kind == 0:
        octets[index] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del octets[index:]
    else:
        octets[index:index] = rng.choice([b"\\ud800", b"\xff", b"\0", b"null", b"{"])
    return bytes(octets)


def error_of(folder):
    """Return the error of a tokenizer's use, None where there is none; others than these go on to the test."""
    try:
        use(folder)
    except (ModelFormatError, UnsupportedError, RequestError) as error:
        return error
    return None


def try_damages(folder, name, make):
    raw = (folder / name).read_bytes()
    rng = random.Random(name)
    refusals = []
    for _ in range(_NUM_DAMAGES):
        damaged = make(raw, rng)
        (folder / name).write_bytes(damaged)
        error = error_of(folder)
        # A request is refused by a template that works, or where a damaged one made an ordinary text a special token.
        if not isinstance(error, RequestError | None):
            refusals.append(error)
            assert str(folder) in str(error), damaged
    (folder / name).write_bytes(raw)
    assert len(refusals) > _NUM_DAMAGES // 8


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"])
def test_damaged_file_is_refused_by_name(folder, name):
    try_damages(folder, name, damage)


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "tokenizer_config.json"])
def test_damaged_file_of_the_old_form_is_refused_by_name(old_folder, name):
    try_damages(old_folder, name, damage if name.endswith(".json") else damage_bytes)


def test_prefix_that_merges_do_not_have_is_refused(folder):
    content = _read(folder / "tokenizer.json")
    content["model"]["continuing_subword_prefix"] = "##"
    _write(folder / "tokenizer.json", content)
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json is damaged"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "name, keys",
    [
        ("tokenizer.json", ("added_tokens", 0, "content")),
        ("tokenizer.json", ("model", "unk_token")),
        ("tokenizer_config.json", ("eos_token",)),
        ("tokenizer_config.json", ("chat_template",)),
        ("tokenizer_config.json", ("added_tokens_decoder", "300", "content")),
        ("special_tokens_map.json", ("bos_token",)),
        ("special_tokens_map.json", ("additional_special_tokens", 0)),
        ("added_tokens.json", (LONE,)),
    ],
)
def test_lone_surrogate_is_refused(folder, name, keys):
    content = _read(folder / name)
    place = content
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = 303 if keys[-1] == LONE else f"a{LONE}b"
    _write(folder / name, content)
    with pytest.raises(ModelFormatError, match=re.escape(name) + ".*(surrogate|hex escape)"):
        load_tokenizer(folder)


def test_lone_surrogate_in_a_vocabulary_is_refused(old_folder):
    _write(old_folder / "vocab.json", {**_read(old_folder / "vocab.json"), LONE: 999})
    with pytest.raises(ModelFormatError, match=r"vocab\.json .*lone surrogate"):
        load_tokenizer(old_folder)


def test_surrogates_that_are_a_pair_are_a_character(folder):
    file = folder / "added_tokens.json"
    file.write_text(r'{"\ud83e\udd8a": 301}')
    assert load_tokenizer(folder).id_of("🦊") == 301


@pytest.mark.covering(keep=False)
@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "source, words",
    [
        (r"{{ 'a\ud800' }}{{ messages[0].content }}", "lone surrogate.*line 1"),
        (r"{% set mark = ['\udfff'] %}", "lone surrogate"),
        ("{% for", "not a valid Jinja template"),
        ("x" * 1_000_001, "at most 1000000 characters"),
    ],
)
def test_damaged_chat_template_is_refused_by_name(folder, name, source, words):
    if name.endswith(".jinja"):
        (folder / name).write_text(source)
    else:
        _write(folder / name, {"chat_template": source})
    tokenizer = load_tokenizer(folder)
    for call in (lambda: tokenizer.encode_chat([{"role": "user", "content": "hi"}]), tokenizer.chat_template.variables):
        with pytest.raises(ModelFormatError, match=re.escape(name) + f": chat_template.*{words}"):
            call()


@pytest.mark.parametrize(
    "content, words",
    [
        ({"eos_token": 1}, "eos_token must be a string or an object with content, got 1"),
        ({"bos_token": {"content": None}}, "bos_token must be"),
        ({"additional_special_tokens": "<a>"}, "additional_special_tokens must be a list"),
        ({"additional_special_tokens": [1]}, "additional_special_tokens must be"),
        ({"split_special_tokens": "false"}, "split_special_tokens must be true or false, got 'false'"),
        ({"clean_up_tokenization_spaces": 0}, "clean_up_tokenization_spaces must be true or false, got 0"),
        ({"added_tokens_decoder": []}, "added_tokens_decoder must be an object"),
        ({"added_tokens_decoder": {"-1": {"content": "a"}}}, "is not a token"),
        ({"added_tokens_decoder": {str(2**31): {"content": "a"}}}, "is not a token"),
        ({"added_tokens_decoder": {"3": {"content": "a", "special": "no"}}}, "special must be true or false, got 'no'"),
    ],
)
def test_wrong_type_in_the_config_is_refused(folder, content, words):
    _write(folder / "tokenizer_config.json", content)
    with pytest.raises(ModelFormatError, match=f"tokenizer_config.json: .*{words}"):
        load_tokenizer(folder)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, MemoryError])
def test_border_lets_pass_what_the_library_did_not_raise(kind):
    with pytest.raises(kind), LibraryBorder("no"):
        raise kind
    with pytest.raises(ModelFormatError, match="the problem: the cause"), LibraryBorder("the problem"):
        raise BaseException("the cause")


def test_token_that_a_tokenizer_cannot_write_is_refused_when_it_encodes(folder):
    content = _read(folder / "tokenizer.json")
    content["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    content["added_tokens"] = []
    _write(folder / "tokenizer.json", content)
    (folder / "special_tokens_map.json").unlink()
    (folder / "added_tokens.json").unlink()
    _write(folder / "tokenizer_config.json", {})
    tokenizer = load_tokenizer(folder)
    with pytest.raises(ModelFormatError, match=f"the tokenizer of {folder} cannot encode a text"):
        tokenizer.encode("the fox")
