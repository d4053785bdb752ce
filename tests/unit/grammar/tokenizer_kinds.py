"""Small tokenizers of every kind, each without a token of its own for some characters, and what compiles for them."""

import contextlib
import json
from contextlib import closing
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from quire.grammar.compiler import GrammarCompiler
from quire.grammar.errors import GrammarError
from quire.grammar.sandbox_main import answer_to
from quire.grammar.vocabulary import read_vocabulary
from quire.text.tokenizer import load_tokenizer
from quire.text.tokenizers_backend import BYTE_BY_CHARACTER
from tests.gguf_writer import write_gguf

MARK = "\u2581"
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CHARACTERS = [*(chr(code) for code in range(0x21, 0x7F)), "\u00e9"]
WORDS = ["he", "ll", "hell", "hello", "wor", "world", "th", "the", "yes", "no", '":', '"}', "</", "</think>", "12"]
SPACED = [f"{MARK}{word}" for word in ("he", "hell", "hello", "wor", "world", "the", "yes", "no", "a")]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), (MARK, "hello"), (MARK, "hell"), (MARK, "he"), ("t", "he")]
MERGES = [pair for pair in MERGES if "".join(pair) in WORDS + SPACED]
TAKE_MARKS = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]


def _bpe(has_bytes=True):
    tokens = [*SPECIAL, *(BYTES if has_bytes else ()), MARK, *CHARACTERS, *WORDS, *SPACED]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    return RustTokenizer(models.BPE(vocab=vocab, merges=MERGES, unk_token="<unk>", fuse_unk=True, byte_fallback=has_bytes))


def _llama(prepends=True, has_bytes=True):
    rust = _bpe(has_bytes)
    steps = [normalizers.Prepend(MARK)] if prepends else []
    rust.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", MARK)])
    rust.decoder = decoders.Sequence([*TAKE_MARKS, decoders.Strip(" ", 1, 0)] if prepends else TAKE_MARKS)
    return rust


def _metaspace(scheme, own_decoder=False):
    rust = _bpe()
    rust.pre_tokenizer = pre_tokenizers.Metaspace(MARK, prepend_scheme=scheme, split=False)
    strips = [] if scheme == "never" else [decoders.Strip(" ", 1, 0)]
    own = [decoders.ByteFallback(), decoders.Metaspace(MARK, prepend_scheme=scheme)]
    rust.decoder = decoders.Sequence(own if own_decoder else [*TAKE_MARKS, *strips])
    return rust


def _byte_level(has_prefix=False, is_nfc=False, is_whole=True):
    alphabet = [character for character, byte in BYTE_BY_CHARACTER.items() if is_whole or byte < 0x80]
    tokens = [*SPECIAL, *alphabet, "he", "ll", "hell", "hello", "\u0120hello"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("\u0120", "hello")]
    rust = RustTokenizer(models.BPE(vocab={token: token_id for token_id, token in enumerate(tokens)}, merges=merges))
    rust.normalizer = normalizers.NFC() if is_nfc else None
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=has_prefix)
    rust.decoder = decoders.ByteLevel()
    return rust


def _unigram(has_bytes):
    tokens = [*SPECIAL, *(BYTES if has_bytes else ()), MARK, *CHARACTERS, *WORDS, *SPACED]
    scored = [(token, 0.0 if token in SPECIAL else -10.0 + min(len(token), 6)) for token in tokens]
    rust = RustTokenizer(models.Unigram(scored, unk_id=0, byte_fallback=has_bytes))
    rust.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" {2,}", " ")])
    rust.pre_tokenizer = pre_tokenizers.Metaspace(MARK, prepend_scheme="always")
    own = decoders.Metaspace(MARK, prepend_scheme="always")
    rust.decoder = decoders.Sequence([decoders.ByteFallback(), own]) if has_bytes else own
    return rust


def _wordpiece():
    tokens = [*SPECIAL, *CHARACTERS, *(f"##{character}" for character in CHARACTERS), "hello", "world", "##llo", "yes"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    rust = RustTokenizer(models.WordPiece(vocab=vocab, unk_token="<unk>"))
    rust.normalizer = normalizers.BertNormalizer(lowercase=True)
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.WordPiece()
    return rust


BUILDERS = {
    "llama": _llama,
    "llama-no-prefix": lambda: _llama(prepends=False),
    "metaspace-always": lambda: _metaspace("always"),
    "metaspace-first": lambda: _metaspace("first"),
    "metaspace-never": lambda: _metaspace("never"),
    "metaspace-decoder": lambda: _metaspace("always", own_decoder=True),
    "unigram-bytes": lambda: _unigram(True),
    "byte-level": _byte_level,
    "byte-level-prefix": lambda: _byte_level(has_prefix=True),
    "byte-level-nfc": lambda: _byte_level(is_nfc=True),
}
INCOMPLETE = {
    "llama-no-bytes": lambda: _llama(has_bytes=False),
    "unigram": lambda: _unigram(False),
    "wordpiece": _wordpiece,
    "byte-level-ascii": lambda: _byte_level(is_whole=False),
}
GGUF = ("gguf-llama", "gguf-llama-no-prefix", "gguf-gpt2")
MODEL_FILES = ("model-legacy", "model-not-legacy", "model-no-prefix")
COMPLETE_KINDS = (*BUILDERS, *GGUF, *MODEL_FILES)
KINDS = (*COMPLETE_KINDS, *INCOMPLETE)


def make_tokenizer(kind, folder):
    """Return the tokenizer of a kind; its files are written to a folder."""
    folder = Path(folder)
    if kind in GGUF:
        return load_tokenizer(write_gguf(folder / "model.gguf", _gguf_metadata(kind)))
    if kind in MODEL_FILES:
        _write_model(kind, folder)
        return load_tokenizer(folder)
    rust = {**BUILDERS, **INCOMPLETE}[kind]()
    rust.add_special_tokens(SPECIAL)
    rust.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return load_tokenizer(folder)


def _gguf_metadata(kind):
    if kind == "gguf-gpt2":
        alphabet = [*BYTE_BY_CHARACTER]
        tokens = ["</s>", *alphabet, "he", "ll", "hell", "hello", "\u0120hello"]
        merges = ["h e", "l l", "he ll", "hell o", "\u0120 hello"]
        return {
            "general.architecture": ("string", "llama"),
            "tokenizer.ggml.model": ("string", "gpt2"),
            "tokenizer.ggml.pre": ("string", "llama-bpe"),
            "tokenizer.ggml.tokens": ("string[]", tokens),
            "tokenizer.ggml.token_type": ("i32[]", [3] + [1] * (len(tokens) - 1)),
            "tokenizer.ggml.merges": ("string[]", merges),
            "tokenizer.ggml.eos_token_id": ("u32", 0),
        }
    tokens = [*SPECIAL, *BYTES, MARK, *CHARACTERS, *WORDS, *SPACED]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    return {
        "general.architecture": ("string", "llama"),
        "tokenizer.ggml.model": ("string", "llama"),
        "tokenizer.ggml.tokens": ("string[]", tokens),
        "tokenizer.ggml.token_type": ("i32[]", types),
        "tokenizer.ggml.scores": ("f32[]", [-float(len(tokens) - token_id) for token_id in range(len(tokens))]),
        "tokenizer.ggml.add_space_prefix": ("bool", kind == "gguf-llama"),
    }


def _write_model(kind, folder):
    sentencepiece = pytest.importorskip("sentencepiece")
    with (folder / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["hello world, the cat says hello", 'yes no "the" hello: {"a": 12}'] * 4),
            model_writer=file,
            model_type="bpe",
            vocab_size=256 + 3 + 60,
            byte_fallback=True,
            hard_vocab_limit=False,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=kind != "model-no-prefix",
            minloglevel=3,
        )
    config = {} if kind == "model-no-prefix" else {"legacy": kind == "model-legacy"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


class InlineCompiler:
    """Compiles in this process: what is tried is harmless, and a process for each tokenizer would take long."""

    def __init__(self):
        self._compilers = {}

    @contextlib.contextmanager
    def probe(self, setup, constraint):
        if setup["backend"] == "llguidance":
            yield {}
            return
        from quire.grammar.xgrammar_backend import ProbedXgrammar

        key = json.dumps(setup)
        if key not in self._compilers:
            self._compilers[key] = ProbedXgrammar(setup)
        names = ("kind", "source", "whitespace_pattern", "disable_any_whitespace", "max_open_length")
        answer = answer_to(self._compilers[key], {"param": "", **{name: getattr(constraint, name) for name in names}})
        if "error" in answer:
            raise GrammarError(answer["error"], answer["pointer"])
        yield answer

    def close(self):
        self._compilers.clear()


def compiler_for(tokenizer, sandbox=None):
    """Return a vocabulary and a compiler for it, as a context that closes that."""
    vocabulary = read_vocabulary(tokenizer, tokenizer.vocab_size)
    return vocabulary, closing(GrammarCompiler(lambda: vocabulary, sandbox or InlineCompiler()))
