"""The tokenizer in the metadata of a GGUF file: byte-level BPE ("gpt2"), SentencePiece's ("llama"), Gemma 4's."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.base.gguf_file import read_gguf
from quire.base.gguf_metadata import NO_TOKEN, GgufMetadata
from quire.base.logging import get_logger
from quire.text.gguf_splits import Split, find_split
from quire.text.tokenizer_files import TokenizerFiles
from quire.text.tokenizers_backend import LibraryBorder, TokenizersBackend

if TYPE_CHECKING:
    import tokenizers

logger = get_logger(__name__)

_SPACE_MARK = "\u2581"
_NAMED_IDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding", "sep_token": "seperator"}
_DEFAULT_SPM_IDS = {"bos_token": 1, "eos_token": 2, "unk_token": 0}
_MAX_TOKEN_CHARACTERS = 1024
_MERGES_PER_TOKEN = 4
"""Maximum number of SentencePiece's pairs for one token; Llama and Gemma have two."""
_FEW_MERGES, _MAX_MERGES = 10_000, 2_000_000
"""Limits of the number of merges that hold for any vocabulary size."""
_TEMPLATE = "tokenizer.chat_template"
# The tokenizer.json of these models takes the spaces after a special token away, but for some tokens.
_STRIPPING_ARCHITECTURE, _NOT_STRIPPING = "phi3", ("<unk>", "<s>", "<|endoftext|>")


class TokenType(IntEnum):
    """The type of a token. Control tokens are special; user-defined tokens are matched whole in text and are not special."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The checked arrays of a file. tokens and types have equal length, and ids are below it."""

    metadata: GgufMetadata
    architecture: str
    tokens: Sequence[str]
    types: Sequence[int]
    named_ids: dict[str, int]

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean of the metadata."""
        value = self.metadata.boolean(f"tokenizer.ggml.{name}")
        return default if value is None else value

    def of_type(self, *types: TokenType) -> list[str]:
        """Return the tokens of these types, without empty ones, which cannot be matched in text."""
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if token and kind in types]


def load_gguf_tokenizer(path: Path) -> tuple[TokenizersBackend, dict[str, str], str | None]:
    """Return backend, named tokens and chat template of a GGUF file, as Tokenizer takes them.

    Raises ModelFormatError if the metadata is damaged, UnsupportedError for an unsupported kind of tokenizer.
    """
    vocabulary = _read_vocabulary(read_gguf(path).metadata)
    model = vocabulary.metadata.string("tokenizer.ggml.model")
    if model not in _BUILDERS:
        raise UnsupportedError(
            f"{path}: tokenizer.ggml.model {model!r} is not supported; supported: {', '.join(_BUILDERS)}. Give the option "
            "tokenizer= the folder of the original tokenizer"
        )
    named_tokens = {name: vocabulary.tokens[token_id] for name, token_id in vocabulary.named_ids.items()}
    files = TokenizerFiles(path, {}, named_tokens, (), None)
    with LibraryBorder(f"{path}: the tokenizer in the metadata cannot be used"):
        backend = TokenizersBackend(_read_whole_tokenizer(vocabulary) or _BUILDERS[model](vocabulary), files)
    return backend, named_tokens, _read_template(vocabulary.metadata)


def _read_vocabulary(metadata: GgufMetadata) -> _Vocabulary:
    tokens = metadata.strings("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelFormatError(f"{metadata.path} has no tokenizer (tokenizer.ggml.tokens); give the option tokenizer= a folder")
    if len(set(tokens)) != len(tokens):
        raise metadata.error("tokenizer.ggml.tokens", "tokens that all differ")
    found = metadata.array("tokenizer.ggml.token_type", "i32", "u32")
    types = [TokenType.NORMAL] * len(tokens) if found is None else [int(kind) for kind in found]
    if len(types) != len(tokens) or not all(0 <= kind <= TokenType.BYTE for kind in types):
        raise metadata.error("tokenizer.ggml.token_type", f"{len(tokens)} numbers from 1 to {int(TokenType.BYTE)}")
    is_spm = metadata.string("tokenizer.ggml.model") == "llama"
    named_ids: dict[str, int] = {}
    for name, key in _NAMED_IDS.items():
        token_id = metadata.integer(f"tokenizer.ggml.{key}_token_id")
        if token_id is None and is_spm:
            token_id = _DEFAULT_SPM_IDS.get(name)
        if token_id is None or token_id == NO_TOKEN:
            continue
        if not 0 <= token_id < len(tokens):
            raise metadata.error(f"tokenizer.ggml.{key}_token_id", f"below the number of tokens ({len(tokens)})")
        named_ids[name] = token_id
    return _Vocabulary(metadata, metadata.string("general.architecture") or "", tokens, types, named_ids)


def _read_template(metadata: GgufMetadata) -> str | None:
    """Return the default chat template; a single named one is used if there is no default."""
    source = metadata.string(_TEMPLATE)
    if source is not None:
        return source
    names = metadata.strings("tokenizer.chat_templates") or ()
    if "default" in names or len(names) == 1:
        return metadata.string(f"{_TEMPLATE}.{'default' if 'default' in names else names[0]}")
    return None


def _read_whole_tokenizer(vocabulary: _Vocabulary) -> tokenizers.Tokenizer | None:
    """Return the tokenizer.json in a file, or None if there is none or it has another vocabulary."""
    text = vocabulary.metadata.string("tokenizer.huggingface.json")
    if text is None:
        return None
    try:
        tokenizer = _parse_whole_tokenizer(text)
    except ModelFormatError as error:
        logger.warning("%s: tokenizer.huggingface.json is damaged and not used: %s", vocabulary.metadata.path, error)
        return None
    known = tokenizer.get_vocab(with_added_tokens=True)
    if any(not 0 <= token_id < len(vocabulary.tokens) for token_id in known.values()) or any(
        known.get(vocabulary.tokens[token_id]) != token_id for token_id in vocabulary.named_ids.values()
    ):
        logger.warning("%s: tokenizer.huggingface.json has other tokens and is not used", vocabulary.metadata.path)
        return None
    return tokenizer


def _parse_whole_tokenizer(text: str) -> tokenizers.Tokenizer:
    import tokenizers

    with LibraryBorder("it cannot be read"):
        return tokenizers.Tokenizer.from_str(text)


def _byte_level(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """Return a byte-level BPE: merges in the order of the file, text split as `tokenizer.ggml.pre` says."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    metadata = vocabulary.metadata
    split = find_split(metadata.string("tokenizer.ggml.pre"), vocabulary.architecture, metadata.path)
    merges = _stored_merges(metadata)
    tokenizer = Tokenizer(models.BPE(vocab=_vocab(vocabulary), merges=merges, ignore_merges=split.takes_whole_words))
    steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Digits(individual_digits=True)] if split.cuts_digits else []
    steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.before]
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if split.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    _finish(tokenizer, vocabulary, split)
    return tokenizer


def _stored_merges(metadata: GgufMetadata) -> list[tuple[str, str]]:
    merges = metadata.strings("tokenizer.ggml.merges")
    if merges is None:
        raise metadata.error("tokenizer.ggml.merges", "an array of strings")
    # A token may contain spaces, but not begin with one.
    pairs = [(merge[:cut], merge[cut + 1 :]) for merge in merges if (cut := merge.find(" ", 1)) > 0]
    if len(pairs) != len(merges):
        raise metadata.error("tokenizer.ggml.merges", "pairs of tokens with a space between")
    return pairs


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """Return SentencePiece's BPE: the two neighbours whose join has the best score are merged first."""
    return _marked_spaces(vocabulary, _merges_of_scores(vocabulary), vocabulary.flag("add_space_prefix", True))


def _gemma4(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """Return the BPE of Gemma 4: as SentencePiece's, but with merges that are stored, and no space before a text."""
    return _marked_spaces(vocabulary, _stored_merges(vocabulary.metadata), has_prefix=False)


def _marked_spaces(vocabulary: _Vocabulary, merges: list[tuple[str, str]], has_prefix: bool) -> tokenizers.Tokenizer:
    """Return a BPE of characters, spaces as marks, and of the bytes of those that are no tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    unk_id = vocabulary.named_ids.get("unk_token")
    unknown = None if unk_id is None else vocabulary.tokens[unk_id]
    tokenizer = Tokenizer(
        models.BPE(vocab=_vocab(vocabulary), merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(_SPACE_MARK)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE_MARK)])
    decoding: list[decoders.Decoder] = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*decoding, decoders.Strip(" ", 1, 0)] if has_prefix else decoding)
    _finish(tokenizer, vocabulary, Split(adds_bos=True))
    return tokenizer


_BUILDERS: dict[str | None, Callable[[_Vocabulary], tokenizers.Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _gemma4,
}


def _vocab(vocabulary: _Vocabulary) -> dict[str, int]:
    """Return token -> id without the unused tokens at the end, which pad the embedding and have no text."""
    num_tokens = len(vocabulary.tokens)
    while num_tokens > 1 and vocabulary.types[num_tokens - 1] == TokenType.UNUSED:
        num_tokens -= 1
    return {token: token_id for token_id, token in enumerate(vocabulary.tokens[:num_tokens])}


def _merges_of_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return every way to join two tokens into a third, best score first; Gemma ranks its tokens by their order instead.

    Raises ModelFormatError if there are far more of them than in real vocabularies: a small file could need gigabytes.
    """
    import numpy as np

    metadata = vocabulary.metadata
    scores = metadata.array("tokenizer.ggml.scores", "f32")
    if scores is None or len(scores) != len(vocabulary.tokens):
        raise metadata.error("tokenizer.ggml.scores", f"{len(vocabulary.tokens)} f32")
    longest = max(vocabulary.tokens, key=len)
    if len(longest) > _MAX_TOKEN_CHARACTERS:
        raise ModelFormatError(f"{metadata.path}: a token has {len(longest)} characters, allowed are {_MAX_TOKEN_CHARACTERS}")
    if vocabulary.architecture.startswith("gemma"):
        scores = range(0, -len(scores), -1)
    mergeable = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind == TokenType.NORMAL
    }
    most = min(max(_FEW_MERGES, _MERGES_PER_TOKEN * len(mergeable)), _MAX_MERGES)
    joined, lefts, rights = array("i"), array("i"), array("i")
    for token, token_id in mergeable.items():
        for cut in range(1, len(token)):
            left, right = mergeable.get(token[:cut]), mergeable.get(token[cut:])
            if left is not None and right is not None:
                joined.append(token_id)
                lefts.append(left)
                rights.append(right)
        if len(joined) > most:
            raise ModelFormatError(
                f"{metadata.path}: more than {most} pairs of tokens make a third among {len(mergeable)} tokens, more than "
                "any vocabulary that was trained; get the file again, or give the option tokenizer= a folder"
            )
    order = np.lexsort((rights, lefts, joined, -np.asarray(scores, np.float64)[joined]))
    tokens = vocabulary.tokens
    return [(tokens[lefts[index]], tokens[rights[index]]) for index in order.tolist()]


def _finish(tokenizer: tokenizers.Tokenizer, vocabulary: _Vocabulary, split: Split) -> None:
    """Add special and user-defined tokens, which are found whole in text, and the tokens around a text."""
    from tokenizers import AddedToken, processors

    control = vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
    strips = vocabulary.architecture == _STRIPPING_ARCHITECTURE and split.pattern is None
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True, rstrip=strips and token not in _NOT_STRIPPING) for token in control]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special=False) for token in vocabulary.of_type(TokenType.USER_DEFINED)]
    )
    pieces = ["$A:0"]
    special_tokens: list[tuple[str, int]] = []
    for name, default in (("bos_token", split.adds_bos), ("eos_token", False)):
        token_id = vocabulary.named_ids.get(name)
        if token_id is None or not vocabulary.flag(f"add_{name}", default):
            continue
        token = vocabulary.tokens[token_id]
        special_tokens.append((token, token_id))
        pieces.insert(0 if name == "bos_token" else len(pieces), f"{token}:0")
    if special_tokens:
        tokenizer.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=special_tokens)
