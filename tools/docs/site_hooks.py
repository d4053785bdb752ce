"""Hooks of mkdocs: files of the repository that pages link to, but that are not below docs/, become files of the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
_PAGES = {"CONTRIBUTING.md": "contributing/index.md", "README.md": "index.md"}
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


def _target(page: str, link: str) -> str | None:
    """Return the path from the root of the repository for a link of a page that leaves docs/; None for other links."""
    if "://" in link or link.startswith(("#", "mailto:")):
        return None
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith("docs/") else path


def on_files(files: Files, config: Any) -> Files:
    """Add CONTRIBUTING.md as a page, and what pages link to outside of docs/ as files."""
    files.append(File.generated(config, "contributing/index.md", content=_contributing()))
    wanted: set[str] = set()
    for file in files.documentation_pages():
        for link, _ in _LINK.findall(file.content_string):
            target = _target(file.src_uri, link)
            if target is not None and target not in _PAGES:
                wanted.add(target)
    for path in sorted(wanted):
        if (ROOT / path).is_file():
            file = File.generated(config, f"files/{path}", abs_src_path=str(ROOT / path), inclusion=InclusionLevel.NOT_IN_NAV)
            files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point the links that leave docs/ to those files."""
    here = posixpath.dirname(page.file.src_uri)

    def replace(match: re.Match[str]) -> str:
        target = _target(page.file.src_uri, match.group(1))
        if target is None:
            return match.group(0)
        target = _PAGES.get(target, f"files/{target}")
        return f"]({posixpath.relpath(target, here or '.')}{match.group(2) or ''})"

    return _LINK.sub(replace, markdown)


def _contributing() -> str:
    """Return CONTRIBUTING.md with its links as a page below docs/contributing has them."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return text.replace("](docs/contributing/", "](").replace("](docs/", "](../")
