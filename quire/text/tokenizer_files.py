"""The files next to a vocabulary: tokenizer_config.json, special_tokens_map.json, added_tokens.json and the chat template."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from quire.base.errors import ModelFormatError

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA = "additional_special_tokens"
_MAX_TOKEN_ID = 1 << 31
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""A possible escape of a lone surrogate in JSON; a pair of two is a character."""


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token in addition to the model's vocabulary, matched in text before it is split.

    token_id  None if the files do not say
    """

    content: str
    token_id: int | None
    is_special: bool
    is_single_word: bool = False
    strips_left: bool = False
    strips_right: bool = False
    is_normalized: bool = False


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The content of the files, except the vocabulary.

    config           tokenizer_config.json, {} without one
    named_tokens     "bos_token" -> "<s>" and so on, only those that are set
    added_tokens     in the order of their ids
    template_source  of the default chat template
    template_file    where that is
    """

    folder: Path
    config: dict[str, object]
    named_tokens: dict[str, str]
    added_tokens: tuple[AddedToken, ...]
    template_source: str | None
    template_file: Path | None = None

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean of tokenizer_config.json. Raises ModelFormatError for a value of another type."""
        return read_flag(self.config, name, default, f"{self.folder / 'tokenizer_config.json'}: {name}")


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read the small files of a folder; all are optional. Raises ModelFormatError if one is damaged."""
    config = read_json_object(folder / "tokenizer_config.json") or {}
    named_tokens = dict(read_json_object(folder / "special_tokens_map.json") or {})
    _check_named_tokens(named_tokens, folder / "special_tokens_map.json")
    _check_named_tokens(config, folder / "tokenizer_config.json")
    named_tokens.update({name: value for name, value in config.items() if name in _NAMED_TOKENS or name == _EXTRA})
    template_source, template_file = _read_template(folder, config)
    return TokenizerFiles(
        folder=folder,
        config=config,
        named_tokens={name: text for name in _NAMED_TOKENS if (text := _token_text(named_tokens.get(name))) is not None},
        added_tokens=_read_added_tokens(folder, config, named_tokens),
        template_source=template_source,
        template_file=template_file,
    )


def read_text(path: Path) -> str | None:
    """Return the text of a file, or None if there is none. Raises ModelFormatError if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFormatError(f"{path} cannot be read: {error}") from error


def read_json_object(path: Path) -> dict[str, object] | None:
    """Return the JSON object in a file, or None if there is none.

    Raises ModelFormatError if it is damaged, or if a string in it holds a lone surrogate, which is no character.
    """
    text = read_text(path)
    if text is None:
        return None
    try:
        value = json.loads(text)
        if _SURROGATE.search(text) is not None:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        surrogate = error.object[error.start]
        raise ModelFormatError(f"{path} is damaged: it holds {surrogate!r}, a lone surrogate, which is no character") from None
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path} is damaged, it is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path} must hold a JSON object, got a {type(value).__name__}")
    return value


def read_flag(values: dict[str, object], key: str, default: bool, where: str) -> bool:
    """Return a boolean, the default if it is null or absent. Raises ModelFormatError, which begins with `where`."""
    value = values.get(key)
    if value is not None and not isinstance(value, bool):
        raise ModelFormatError(f"{where} must be true or false, got {value!r}")
    return default if value is None else value


def _token_text(value: object) -> str | None:
    """Return the text of a token given as a string or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _check_named_tokens(values: dict[str, object], file: Path) -> None:
    """Raise ModelFormatError for a named token that is neither a string nor an object with `content`."""
    extra = values.get(_EXTRA)
    if extra is not None and not isinstance(extra, list):
        raise ModelFormatError(f"{file}: {_EXTRA} must be a list of tokens, got {extra!r}")
    named = [(name, values.get(name)) for name in _NAMED_TOKENS] + [(_EXTRA, token) for token in extra or []]
    for name, value in named:
        text = value.get("content") if isinstance(value, dict) else value
        if not (isinstance(text, str) or value is None):
            raise ModelFormatError(f"{file}: {name} must be a string or an object with content, got {value!r}")


def _is_token_id(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_TOKEN_ID


def _read_added_tokens(folder: Path, config: dict[str, object], named_tokens: dict[str, object]) -> tuple[AddedToken, ...]:
    extra = named_tokens.get(_EXTRA)
    special_tokens = {_token_text(value) for name, value in named_tokens.items() if name in _NAMED_TOKENS}
    special_tokens |= {_token_text(value) for value in (extra if isinstance(extra, list) else [])}
    tokens: dict[str, AddedToken] = {}
    for content, token_id in (read_json_object(folder / "added_tokens.json") or {}).items():
        if type(token_id) is not int or not _is_token_id(token_id):
            raise ModelFormatError(f"{folder / 'added_tokens.json'} must map tokens to ids, got {token_id!r} for {content!r}")
        tokens[content] = AddedToken(content, token_id, content in special_tokens)
    file, decoder = folder / "tokenizer_config.json", config.get("added_tokens_decoder")
    if decoder is not None and not isinstance(decoder, dict):
        raise ModelFormatError(f"{file}: added_tokens_decoder must be an object, got {decoder!r}")
    for key, value in (decoder or {}).items():
        where = f"{file}: added_tokens_decoder[{key!r}]"
        content = _token_text(value)
        if content is None or not isinstance(value, dict) or not key.isdecimal() or not _is_token_id(int(key[:20])):
            raise ModelFormatError(f"{where} is not a token")
        is_special, is_single_word, strips_left, strips_right, is_normalized = (
            read_flag(value, name, False, f"{where}.{name}")
            for name in ("special", "single_word", "lstrip", "rstrip", "normalized")
        )
        tokens[content] = AddedToken(
            content,
            int(key),
            is_special or content in special_tokens,
            is_single_word=is_single_word,
            strips_left=strips_left,
            strips_right=strips_right,
            is_normalized=is_normalized,
        )
    for text in sorted(text for text in special_tokens if text is not None and text not in tokens):
        tokens[text] = AddedToken(text, None, is_special=True)
    return tuple(sorted(tokens.values(), key=lambda token: (token.token_id is None, token.token_id or 0)))


def _read_template(folder: Path, config: dict[str, object]) -> tuple[str | None, Path | None]:
    """Return the default chat template and its file: its own first, then chat_template.json, then tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    source = read_text(path)
    if source is not None:
        return source, path
    path = folder / "chat_template.json"
    value = (read_json_object(path) or {}).get("chat_template")
    if value is None:
        path = folder / "tokenizer_config.json"
        value = config.get("chat_template")
    if value is None or isinstance(value, str):
        return value, path
    named: dict[str, str] = {}
    for entry in value if isinstance(value, list) else [value]:
        name, template = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(template, str):
            raise ModelFormatError(f"{path}: chat_template must be a string or a list of objects with name and template")
        named[name] = template
    if len(named) == 1:
        return next(iter(named.values())), path
    return named.get("default"), path
