"""Tokenizing with the `sentencepiece` library (optional): tokenizer.model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.text.token_streams import ByteFallbackStream, TokenStream
from quire.text.tokenizer_files import TokenizerFiles

if TYPE_CHECKING:
    import sentencepiece

_SPACE_MARK = "\u2581"
# Fields of a NormalizerSpec in the encoding of protobuf.
_NO_DUMMY_PREFIX = b"\x18\x00"  # add_dummy_prefix: false
_ALL_WHITESPACES = b"\x20\x00"  # remove_extra_whitespaces: false


class SentencePieceBackend:
    """A SentencePiece model with added tokens.

    Text is first split at special and added tokens, and each part is encoded separately, as with tokenizer.json of such models.
    """

    def __init__(self, processor: sentencepiece.SentencePieceProcessor, files: TokenizerFiles) -> None:
        self._processor = processor
        self._continuing: sentencepiece.SentencePieceProcessor | None = None
        self._after_token = None if files.flag("legacy", True) else _respecified(processor, _NO_DUMMY_PREFIX)
        self._num_pieces = processor.vocab_size()
        added = [token for token in files.added_tokens if token.token_id is not None and token.token_id >= self._num_pieces]
        self._added_text = {token.token_id: token.content for token in added}
        self._added_id = {token.content: token.token_id for token in added}
        self.vocab_size = max([self._num_pieces, *(token_id + 1 for token_id in self._added_text)])
        control_ids = [i for i in range(self._num_pieces) if processor.is_control(i) or processor.is_unknown(i)]
        self._control_id = {processor.id_to_piece(token_id): token_id for token_id in control_ids}
        special_ids = {token.token_id for token in added if token.is_special} | set(control_ids)
        special_ids |= {i for token in files.added_tokens if token.is_special and (i := self.id_of(token.content)) is not None}
        self.special_token_ids = frozenset(special_ids)
        self.added_tokens = {**self._control_id, **self._added_id}
        splitters = sorted(self.added_tokens, key=len, reverse=True)
        splits = bool(splitters) and not files.flag("split_special_tokens", False)
        self._splitter = re.compile(f"({'|'.join(map(re.escape, splitters))})") if splits else None
        self._prefix_ids, self._suffix_ids = self._read_ends(files)
        first = processor.encode("a")
        self._strips_first_space = bool(first) and processor.id_to_piece(first[0]).startswith(_SPACE_MARK)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text; special tokens in it are recognised."""
        token_ids = self.encode_without(text, frozenset())
        return [*self._prefix_ids, *token_ids, *self._suffix_ids] if add_special_tokens else token_ids

    def encode_without(self, text: str, hidden: frozenset[str], is_first: bool = True) -> list[int]:
        """Return the ids of a text in which the added and control tokens `hidden` are ordinary text.

        is_first  nothing precedes the text; otherwise an added token does
        """
        token_ids: list[int] = []
        plain = ""
        for part in self._splitter.split(text) if self._splitter else [text]:
            token_id = self.added_tokens.get(part) if self._splitter else None
            if part in hidden or token_id is None:
                plain += part
                continue
            token_ids += [*self._encode_part(plain, is_first and not token_ids), token_id]
            plain = ""
        return [*token_ids, *self._encode_part(plain, is_first and not token_ids)]

    def _encode_part(self, text: str, is_first: bool) -> list[int]:
        """Return the ids of a text between added tokens. With "legacy": false only the first one gets a space before it."""
        if is_first or self._after_token is None:
            return self._processor.encode(text)
        return self._after_token.encode(text)

    def encode_continuation(self, text: str) -> list[int]:
        """Return the ids of a text that continues another one: nothing is put before it, and special tokens in it are text."""
        if self._continuing is None:
            self._continuing = _respecified(self._processor, _NO_DUMMY_PREFIX + _ALL_WHITESPACES)
        return self._continuing.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included; ids without a token have none."""
        stream = self.new_stream()
        return "".join([*map(stream.push, token_ids), stream.finish()])

    def id_of(self, token: str) -> int | None:
        """Return the id of a token given by its spelling in the vocabulary."""
        if token in self._added_id:
            return self._added_id[token]
        token_id = self._processor.piece_to_id(token)
        return token_id if self._processor.id_to_piece(token_id) == token else None

    def bytes_of(self, token_id: int) -> bytes:
        """Return a token's contribution to the text, in UTF-8; b"" for ids without a token."""
        byte = self._byte_of(token_id)
        return self._text_of(token_id).encode("utf-8") if byte is None else bytes([byte])

    def new_stream(self) -> TokenStream:
        """Return a stream whose text equals `decode`."""
        return ByteFallbackStream(self._text_of, self._byte_of, self._strips_first_space)

    @property
    def named_tokens(self) -> dict[str, str]:
        """The bos, eos and unk tokens that the model itself names."""
        ids = {
            "bos_token": self._processor.bos_id(),
            "eos_token": self._processor.eos_id(),
            "unk_token": self._processor.unk_id(),
        }
        return {name: self._processor.id_to_piece(token_id) for name, token_id in ids.items() if token_id >= 0}

    def _text_of(self, token_id: int) -> str:
        if not 0 <= token_id < self._num_pieces:
            return self._added_text.get(token_id, "")
        return self._processor.id_to_piece(token_id).replace(_SPACE_MARK, " ")

    def _byte_of(self, token_id: int) -> int | None:
        if 0 <= token_id < self._num_pieces and self._processor.is_byte(token_id):
            return int(self._processor.id_to_piece(token_id)[3:5], 16)
        return None

    def _read_ends(self, files: TokenizerFiles) -> tuple[list[int], list[int]]:
        """Return the tokens that add_special_tokens puts before and after; by default Llama's rule: bos and no eos."""
        ends: list[list[int]] = []
        for name, own_id, default in (
            ("bos_token", self._processor.bos_id(), True),
            ("eos_token", self._processor.eos_id(), False),
        ):
            token = files.named_tokens.get(name)
            token_id = own_id if token is None else self.id_of(token)
            is_added = token_id is not None and token_id >= 0 and files.flag(f"add_{name}", default)
            ends.append([token_id] if is_added else [])
        return ends[0], ends[1]


def load_sentencepiece(files: TokenizerFiles) -> SentencePieceBackend:
    """Read tokenizer.model. Raises UnsupportedError without the library, ModelFormatError if the file is damaged."""
    path = files.folder / "tokenizer.model"
    try:
        import sentencepiece
    except ImportError as error:
        raise UnsupportedError(
            f"{path} needs the sentencepiece library: pip install 'quire[sentencepiece]', or put the tokenizer.json there"
        ) from error
    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise ModelFormatError(f"{path} is damaged, it is not a SentencePiece model: {error}") from error
    return SentencePieceBackend(processor, files)


def _respecified(processor: sentencepiece.SentencePieceProcessor, fields: bytes) -> sentencepiece.SentencePieceProcessor:
    """Return a processor of the same model with other fields in its NormalizerSpec: when messages are concatenated,
    protobuf takes each field from the last one that has it.
    """
    import sentencepiece

    spec = b"\x1a" + bytes([len(fields)]) + fields  # field 3 of a ModelProto
    return sentencepiece.SentencePieceProcessor(model_proto=processor.serialized_model_proto() + spec)
