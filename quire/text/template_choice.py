"""read_template: the chat template that an option names instead of the checkpoint's default one."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from quire.base.errors import ConfigError
from quire.base.gguf_file import is_gguf
from quire.base.suggestions import did_you_mean
from quire.text.tokenizer_files import read_json_object, read_text

BUILT_IN = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{{ (message['content'] or '') + '<|im_end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
}
"""Templates that need nothing of the checkpoint."""


def read_template(folder: Path, wanted: str) -> tuple[str, Path | None]:
    """Return the source of a chat template, and its file, None for a built-in one.

    folder  of the tokenizer, or a GGUF file
    wanted  a file, or a name: one of the checkpoint's named templates, or of BUILT_IN
    Raises ConfigError.
    """
    path = Path(wanted).expanduser()
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8"), path.absolute()
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"chat_template: {wanted!r} cannot be read as UTF-8 text: {error}") from None
    named = {} if is_gguf(folder) else _named_templates(folder)
    if wanted in named:
        return named[wanted]
    if wanted in BUILT_IN:
        return BUILT_IN[wanted], None
    names = sorted({*named, *BUILT_IN})
    raise ConfigError(
        f"chat_template must be a file or one of {', '.join(names)}, got {wanted[:200]!r}"
        f"{did_you_mean(get_close_matches(wanted, names, 1))}"
    )


def _named_templates(folder: Path) -> dict[str, tuple[str, Path]]:
    """Return the templates of a checkpoint that have names; a damaged entry has none."""
    path = folder / "tokenizer_config.json"
    stated = (read_json_object(path) or {}).get("chat_template")
    found: dict[str, tuple[str, Path]] = {}
    for entry in stated if isinstance(stated, list) else []:
        name, template = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if isinstance(name, str) and isinstance(template, str):
            found[name] = template, path
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = read_text(file) or "", file
    return found
