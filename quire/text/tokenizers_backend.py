"""Tokenizing with the `tokenizers` library: tokenizer.json, or a byte-level vocab.json with merges.txt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quire.base.errors import ModelFormatError, QuireError, UnsupportedError
from quire.text.token_streams import ByteFallbackStream, CleanUpStream, TokenStream, Utf8Stream, WindowStream, clean_up_spaces
from quire.text.tokenizer_files import TokenizerFiles, read_json_object, read_text

if TYPE_CHECKING:
    import tokenizers

# Classes with GPT-2's pre-tokenizer; others (Qwen2) need their tokenizer.json.
_GPT2_CLASSES = frozenset(("GPT2Tokenizer", "GPT2TokenizerFast", "CodeGenTokenizer", "CodeGenTokenizerFast"))
_LONG_TEXT = 4096
_NOT_OF_THE_LIBRARY = (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, QuireError)
_SPACE_MARK = "\u2581"
_REPLACE_SPACE_MARK = {"type": "Replace", "pattern": {"String": _SPACE_MARK}, "content": " "}
_STRIP_FIRST_SPACE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


class LibraryBorder:
    """Turns any exception of the library in a `with` block into a ModelFormatError that begins with `problem`.

    The library raises Exception itself and, where its Rust code panics, a PanicException, which is a BaseException.
    """

    __slots__ = ("_problem",)

    def __init__(self, problem: str) -> None:
        self._problem = problem

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None and not isinstance(error, _NOT_OF_THE_LIBRARY):
            raise ModelFormatError(f"{self._problem}: {error}") from error


def _encode(tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    if len(text) < _LONG_TEXT:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    # encode_batch gives the same ids, and releases the GIL.
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


class TokenizersBackend:
    """A `tokenizers.Tokenizer` and how its decoder streams."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
        self._tokenizer = tokenizer
        self._encoding = LibraryBorder(f"the tokenizer of {files.folder} cannot encode a text")
        self._decoding = LibraryBorder(f"the tokenizer of {files.folder} cannot decode tokens")
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = files.flag("split_special_tokens", False)
        _add_tokens(tokenizer, files)
        # As in transformers 5: the clean-up would remove spaces that a BPE model generated.
        self._cleans_up = files.flag("clean_up_tokenization_spaces", False) and type(tokenizer.model).__name__ != "BPE"
        self._decoder_kind, self._strips_first_space, self._has_bytes = _read_decoder(tokenizer)
        self._bytes_by_id: dict[int, bytes] = {}
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        self._without: dict[tuple[frozenset[str], bool], tokenizers.Tokenizer] = {}
        self._continuing: tokenizers.Tokenizer | None = None
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text; special tokens in it are recognised."""
        with self._encoding:
            return _encode(self._tokenizer, text, add_special_tokens)

    def encode_parts(self, texts: Sequence[str]) -> tuple[list[int], list[int | None]]:
        """Return the ids of one text or a pair with special tokens, and of each token its text, None for those."""
        with self._encoding:
            encoding = self._tokenizer.encode(*texts, add_special_tokens=True)
            return encoding.ids, encoding.sequence_ids

    def encode_without(self, text: str, hidden: frozenset[str], is_first: bool = True) -> list[int]:
        """Return the ids of a text in which the added tokens `hidden` are ordinary text.

        is_first  nothing precedes the text; otherwise an added token does
        """
        with self._encoding:
            known = self._without.get((hidden, is_first))
            if known is None:
                content = json.loads(self._tokenizer.to_str())
                if not is_first:
                    content["pre_tokenizer"] = _without_prefix(content["pre_tokenizer"], of_schemes=("first",))
                known = _rebuild(content, hidden)
                self._without = {(hidden, is_first): known, **dict(list(self._without.items())[:1])}
            return _encode(known, text, add_special_tokens=False)

    def encode_continuation(self, text: str) -> list[int]:
        """Return the ids of a text that continues another one: nothing is put before it, and special tokens in it are text."""
        with self._encoding:
            if self._continuing is None:
                content = json.loads(self._tokenizer.to_str())
                for name in ("normalizer", "pre_tokenizer"):
                    content[name] = _without_prefix(content[name])
                special = [token["content"] for token in content["added_tokens"] if token["special"]]
                self._continuing = _rebuild(content, frozenset(special))
            return _encode(self._continuing, text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included; ids without a token have none."""
        text = self._decode_raw(list(token_ids))
        return clean_up_spaces(text) if self._cleans_up else text

    def id_of(self, token: str) -> int | None:
        """Return the id of a token given by its spelling in the vocabulary."""
        return self._tokenizer.token_to_id(token)

    def bytes_of(self, token_id: int) -> bytes:
        """Return a token's contribution to the text, in UTF-8; b"" for ids without a token."""
        found = self._bytes_by_id.get(token_id)
        if found is None:
            found = self._bytes_by_id[token_id] = self._find_bytes(token_id)
        return found

    def new_stream(self) -> TokenStream:
        """Return a stream whose text equals `decode`."""
        stream: TokenStream
        if self._decoder_kind == "bytes":
            stream = Utf8Stream(self.bytes_of, self._strips_first_space)
        elif self._decoder_kind == "fallback":
            stream = ByteFallbackStream(self._text_of, self._byte_of, self._strips_first_space)
        else:
            stream = WindowStream(self._decode_raw, lambda token_id: self._byte_of(token_id) is not None)
        return CleanUpStream(stream) if self._cleans_up else stream

    def _decode_raw(self, token_ids: list[int]) -> str:
        with self._decoding:
            return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _find_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._decoder_kind == "bytes":
            return bytes_of_byte_level(token)
        byte = self._byte_of(token_id)
        if byte is not None:
            return bytes([byte])
        if self._decoder_kind == "fallback":
            return token.replace(_SPACE_MARK, " ").encode("utf-8")
        if token_id in self.special_token_ids:
            return token.encode("utf-8")
        if self._context is None:
            return self._decode_raw([token_id]).replace(_SPACE_MARK, " ").encode("utf-8")
        before, text = self._context
        return self._decode_raw([before, token_id]).removeprefix(text).encode("utf-8")

    @cached_property
    def _context(self) -> tuple[int, str] | None:
        """A token and its text, after which the decoder shows the whole text of another token; at the start of a text it may
        drop a space.
        """
        for token_id in range(self._tokenizer.get_vocab_size(with_added_tokens=False)):
            token = self._tokenizer.id_to_token(token_id) or ""
            if token.isalpha() and token.isascii() and token_id not in self.special_token_ids:
                text = self._decode_raw([token_id])
                if text and self._decode_raw([token_id, token_id]).startswith(text):
                    return token_id, text
        return None

    def _text_of(self, token_id: int) -> str:
        return self.bytes_of(token_id).decode("utf-8")

    def _byte_of(self, token_id: int) -> int | None:
        return byte_of_fallback(self._tokenizer.id_to_token(token_id) or "") if self._has_bytes else None


def _without_prefix(step: Any, of_schemes: Sequence[str] = ("first", "always")) -> Any:
    """Return a normalizer or pre-tokenizer, in the form of tokenizer.json, that neither adds nor removes a space before a text.

    of_schemes  the prepend_scheme values of Metaspace that become "never"; with ("first",) nothing else is changed
    """
    if step is None:
        return None
    if step["type"] == "Sequence":
        name = "normalizers" if "normalizers" in step else "pretokenizers"
        steps = [_without_prefix(inner, of_schemes) for inner in step[name]]
        return {**step, name: [inner for inner in steps if inner is not None]}
    if step["type"] == "Metaspace" and step["prepend_scheme"] in of_schemes:
        return {**step, "prepend_scheme": "never"}
    if "always" not in of_schemes:
        return step
    if step["type"] == "ByteLevel" and "add_prefix_space" in step:
        return {**step, "add_prefix_space": False}
    return None if step["type"] in ("Prepend", "Strip") else step


def _rebuild(content: dict[str, Any], hidden: frozenset[str]) -> tokenizers.Tokenizer:
    """Return a tokenizer from the content of a tokenizer.json, without the added tokens `hidden` and tokens around a text."""
    import tokenizers

    added = [token for token in content["added_tokens"] if token["content"] not in hidden]
    return tokenizers.Tokenizer.from_str(json.dumps({**content, "added_tokens": added, "post_processor": None}))


def load_tokenizer_json(files: TokenizerFiles) -> TokenizersBackend:
    """Read tokenizer.json. Raises ModelFormatError if it is damaged.

    Its post-processor alone decides which special tokens are added; as in transformers 5, add_bos_token and add_eos_token
    of tokenizer_config.json do not change it.
    """
    import tokenizers

    path = files.folder / "tokenizer.json"
    text = read_text(path)
    if text is None:
        raise ModelFormatError(f"{path} is missing")
    with LibraryBorder(f"{path} is damaged, or made by a newer version of tokenizers"):
        return TokenizersBackend(tokenizers.Tokenizer.from_str(text), files)


def load_vocab_and_merges(files: TokenizerFiles) -> TokenizersBackend:
    """Build GPT-2's byte-level BPE from vocab.json and merges.txt. Raises ModelFormatError if one is damaged."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    class_name = files.config.get("tokenizer_class")
    if class_name is not None and not isinstance(class_name, str):
        where = files.folder / "tokenizer_config.json"
        raise ModelFormatError(f"{where}: tokenizer_class must be a string, got {class_name!r}")
    if class_name is not None and class_name not in _GPT2_CLASSES:
        raise UnsupportedError(
            f"vocab.json and merges.txt are read for {', '.join(sorted(_GPT2_CLASSES))}, and tokenizer_class is "
            f"{class_name!r}: put its tokenizer.json into {files.folder}"
        )
    vocab_path, merges_path = files.folder / "vocab.json", files.folder / "merges.txt"
    vocab = read_json_object(vocab_path) or {}
    if any(token.endswith("</w>") for token in vocab):  # BioGPT and the first GPT, whose files may name no class
        raise UnsupportedError(
            f"{vocab_path} has tokens that end with '</w>', unlike GPT-2's: put its tokenizer.json into {files.folder}"
        )
    lines = [line for line in (read_text(merges_path) or "").split("\n") if line and not line.startswith("#version")]
    merges = [tuple(line.split(" ")) for line in lines]
    if not vocab or not all(type(token_id) is int for token_id in vocab.values()):
        raise ModelFormatError(f"{vocab_path} must map tokens to ids")
    if not all(len(pair) == 2 for pair in merges):
        raise ModelFormatError(f"{merges_path} must hold two tokens per line, got {next(p for p in merges if len(p) != 2)!r}")
    with LibraryBorder(f"{vocab_path} and {merges_path} contradict each other, or the files next to them"):
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=files.flag("add_prefix_space", False))
        tokenizer.decoder = decoders.ByteLevel()
        end_of_text = "<|endoftext|>"
        if end_of_text in vocab:
            tokenizer.add_special_tokens([end_of_text])
        backend = TokenizersBackend(tokenizer, files)
        _set_post_processor(tokenizer, files)
        return backend


def _add_tokens(tokenizer: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
    """Add tokens that are only in the small files, if their ids are known."""
    from tokenizers import AddedToken

    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for token in files.added_tokens:
        token_id = tokenizer.token_to_id(token.content)
        is_next = token_id is None and token.token_id == tokenizer.get_vocab_size(with_added_tokens=True)
        if token.content in known or (token_id is None and not is_next):
            continue
        added = AddedToken(
            token.content,
            single_word=token.is_single_word,
            lstrip=token.strips_left,
            rstrip=token.strips_right,
            normalized=token.is_normalized,
            special=token.is_special,
        )
        (tokenizer.add_special_tokens if token.is_special else tokenizer.add_tokens)([added])


def _set_post_processor(tokenizer: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
    """Add bos and eos around a text if tokenizer_config.json says so."""
    from tokenizers import processors

    begin, end = "", ""
    special_tokens: list[tuple[str, int]] = []
    for name in ("bos_token", "eos_token"):
        token = files.named_tokens.get(name)
        token_id = None if token is None else tokenizer.token_to_id(token)
        if token is None or token_id is None or not files.flag(f"add_{name}", False):
            continue
        special_tokens.append((token, token_id))
        begin, end = (f"{token}:0 ", end) if name == "bos_token" else (begin, f" {token}:0")
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin}$A:0{end}", special_tokens=special_tokens)


def _read_decoder(tokenizer: tokenizers.Tokenizer) -> tuple[str, bool, bool]:
    """Return how the decoder streams ("bytes", "fallback" or "window"), whether it strips the first space, and whether
    tokens such as <0x0A> stand for bytes.
    """
    if tokenizer.decoder is None:
        return "window", False, False
    steps = json.loads(tokenizer.decoder.__getstate__())
    steps = steps["decoders"] if steps["type"] == "Sequence" else [steps]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return "bytes", False, False
    has_bytes = any(step["type"] == "ByteFallback" for step in steps)
    strips_first_space = steps[-1:] == [_STRIP_FIRST_SPACE]
    steps = steps[:-1] if strips_first_space else steps
    if steps == [_REPLACE_SPACE_MARK, {"type": "ByteFallback"}, {"type": "Fuse"}]:
        return "fallback", strips_first_space, has_bytes
    return "window", False, has_bytes


def _byte_by_character() -> dict[str, int]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


BYTE_BY_CHARACTER = _byte_by_character()


def bytes_of_byte_level(token: str) -> bytes:
    """Return the bytes of a token; one that is not spelt in the alphabet (an added token) stands for its UTF-8."""
    try:
        return bytes([BYTE_BY_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode("utf-8")


def byte_of_fallback(token: str) -> int | None:
    """Return the byte of a token spelt <0x0A>, None for other tokens."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None
