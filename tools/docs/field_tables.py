"""Find the column tables in quire's docstrings (`name   meaning`) and write them as Markdown; the site and its pages use it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

_NAMES = r"[A-Za-z_*][\w*]*(?:, [A-Za-z_*][\w*]*)*"
_ROW = re.compile(rf"({_NAMES}) {{2,}}(\S.*)")
_ONLY_NAMES = re.compile(_NAMES)


def split_docstring(text: str) -> list[str | list[tuple[str, str]]]:
    """Return the parts of a docstring in their order: paragraphs as text, tables as (name, meaning) pairs.

    text  cleaned as inspect.cleandoc does
    """
    parts: list[str | list[tuple[str, str]]] = []
    for block in re.split(r"\n\s*\n", text):
        parts += _split_block(block.splitlines())
    return parts


def field_meanings(text: str) -> dict[str, str]:
    """Return name -> meaning of every table in a docstring; names that share a row share the meaning."""
    rows = [row for part in split_docstring(text) if not isinstance(part, str) for row in part]
    return {name: meaning for names, meaning in rows for name in names.split(", ")}


def to_markdown(text: str) -> str:
    """Return the docstring with each table as a Markdown list."""
    parts: list[str] = []
    for part in split_docstring(text):
        if isinstance(part, str):
            parts.append(part)
        else:
            parts.append("\n".join(f"- **`{names}`**: {meaning}" for names, meaning in part))
    return "\n\n".join(parts)


def _split_block(lines: list[str]) -> Iterator[str | list[tuple[str, str]]]:
    column = _text_column(lines)
    prose: list[str] = []
    rows: list[tuple[str, str]] = []
    for number, line in enumerate(lines):
        row = _read_row(line, column)
        if row is None and not prose and rows and line.startswith("  "):
            names, meaning = rows[-1]
            rows[-1] = (names, f"{meaning} {line.strip()}".strip())
            continue
        if row is None and _ONLY_NAMES.fullmatch(line) and any(rows) and lines[number + 1 : number + 2] != []:
            row = (line, "") if lines[number + 1].startswith("  ") else None
        if row is None:
            if rows:
                yield rows
                rows = []
            prose.append(line)
            continue
        if prose:
            yield "\n".join(prose)
            prose = []
        rows.append(row)
    if prose:
        yield "\n".join(prose)
    if rows:
        yield rows


def _text_column(lines: list[str]) -> int | None:
    found = Counter(match.start(2) for line in lines if (match := _ROW.fullmatch(line)) is not None)
    return found.most_common(1)[0][0] if found else None


def _read_row(line: str, column: int | None) -> tuple[str, str] | None:
    match = _ROW.fullmatch(line)
    if match is not None:
        return match.group(1), match.group(2)
    if column is None or len(line) <= column or line[column - 1] != " ":
        return None
    names = line[:column].rstrip()
    return (names, line[column:]) if _ONLY_NAMES.fullmatch(names) else None
