"""The files beside a vocabulary: tokenizer_config.json, special_tokens_map.json, added_tokens.json and the chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from quire.base.errors import ModelFormatError

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA = "additional_special_tokens"


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token beside the model's own vocabulary, found in text before it is split.

    token_id  None where the files do not say
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
    """What the files say, but for the vocabulary.

    config           tokenizer_config.json, {} without one
    named_tokens     "bos_token" -> "<s>" and so on, only those that are set
    added_tokens     in the order of their ids
    template_source  of the default chat template
    """

    folder: Path
    config: dict[str, object]
    named_tokens: dict[str, str]
    added_tokens: tuple[AddedToken, ...]
    template_source: str | None

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean of tokenizer_config.json."""
        value = self.config.get(name)
        return default if value is None else bool(value)


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read the small files of a folder; all are optional. Raises ModelFormatError where one is damaged."""
    config = read_json_object(folder / "tokenizer_config.json") or {}
    named_tokens = dict(read_json_object(folder / "special_tokens_map.json") or {})
    named_tokens.update({name: value for name, value in config.items() if name in _NAMED_TOKENS or name == _EXTRA})
    return TokenizerFiles(
        folder=folder,
        config=config,
        named_tokens={name: text for name in _NAMED_TOKENS if (text := _token_text(named_tokens.get(name))) is not None},
        added_tokens=_read_added_tokens(folder, config, named_tokens),
        template_source=_read_template(folder, config),
    )


def read_text(path: Path) -> str | None:
    """Return the text of a file, or None where there is none. Raises ModelFormatError if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFormatError(f"{path} cannot be read: {error}") from error


def read_json_object(path: Path) -> dict[str, object] | None:
    """Return the JSON object in a file, or None where there is none. Raises ModelFormatError if it is damaged."""
    text = read_text(path)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path} is damaged, it is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path} must hold a JSON object, got a {type(value).__name__}")
    return value


def _token_text(value: object) -> str | None:
    """Return the text of a token given as a string or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _read_added_tokens(folder: Path, config: dict[str, object], named_tokens: dict[str, object]) -> tuple[AddedToken, ...]:
    extra = named_tokens.get(_EXTRA)
    special_texts = {_token_text(value) for name, value in named_tokens.items() if name in _NAMED_TOKENS}
    special_texts |= {_token_text(value) for value in (extra if isinstance(extra, list) else [])}
    tokens: dict[str, AddedToken] = {}
    for content, token_id in (read_json_object(folder / "added_tokens.json") or {}).items():
        if not isinstance(token_id, int):
            raise ModelFormatError(f"{folder / 'added_tokens.json'} must map tokens to ids, got {token_id!r} for {content!r}")
        tokens[content] = AddedToken(content, token_id, content in special_texts)
    decoder = config.get("added_tokens_decoder")
    for key, value in (decoder if isinstance(decoder, dict) else {}).items():
        content = _token_text(value)
        if content is None or not isinstance(value, dict) or not str(key).isdecimal():
            raise ModelFormatError(f"{folder / 'tokenizer_config.json'}: added_tokens_decoder[{key!r}] is not a token")
        tokens[content] = AddedToken(
            content,
            int(key),
            bool(value.get("special")) or content in special_texts,
            is_single_word=bool(value.get("single_word")),
            strips_left=bool(value.get("lstrip")),
            strips_right=bool(value.get("rstrip")),
            is_normalized=bool(value.get("normalized")),
        )
    for text in sorted(text for text in special_texts if text is not None and text not in tokens):
        tokens[text] = AddedToken(text, None, is_special=True)
    return tuple(sorted(tokens.values(), key=lambda token: (token.token_id is None, token.token_id or 0)))


def _read_template(folder: Path, config: dict[str, object]) -> str | None:
    """Return the default chat template: its own file first, then chat_template.json, then tokenizer_config.json."""
    source = read_text(folder / "chat_template.jinja")
    if source is not None:
        return source
    path = folder / "chat_template.json"
    value = (read_json_object(path) or {}).get("chat_template")
    if value is None:
        path = folder / "tokenizer_config.json"
        value = config.get("chat_template")
    if value is None or isinstance(value, str):
        return value
    named: dict[str, str] = {}
    for entry in value if isinstance(value, list) else [value]:
        name, template = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(template, str):
            raise ModelFormatError(f"{path}: chat_template must be a string or a list of objects with name and template")
        named[name] = template
    if len(named) == 1:
        return next(iter(named.values()))
    return named.get("default")
