"""The documentation: files and links that it names exist, its commands parse, and its generated pages are current."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
WRITTEN = [
    page for page in PAGES if page.parent.name != "reference" or page.name in ("models.md", "environment.md", "python-api.md")
]
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FILE = re.compile(r"[\w./*-]+\.(?:py|h|cpp|inl|md|yml|yaml|toml)|\.ci/run")
_NOT_OURS = {"config.json", "generation_config.json"}


def ids_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def load_generator():
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "tools" / "docs" / "make_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def slugs_of(page: Path) -> set[str]:
    text = _FENCE.sub("", page.read_text())
    heads = [re.sub(r"[`*]", "", head) for head in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads}


def exists(name: str, page: Path) -> bool:
    for base in (ROOT, ROOT / "quire", ROOT / "quire/kernels/cpu", page.parent):
        if any(base.glob(name)):
            return True
    return "/" not in name and any(
        path for folder in ("quire", "tests", "tools", "bench", "docs") for path in (ROOT / folder).rglob(name)
    )


@pytest.mark.parametrize("page", WRITTEN, ids=ids_of)
def test_every_file_that_a_page_names_exists(page):
    names = [text for text in _CODE.findall(_FENCE.sub("", page.read_text())) if _FILE.fullmatch(text)]
    missing = [name for name in names if name not in _NOT_OURS and not exists(name, page)]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=ids_of)
def test_every_link_between_pages_resolves(page):
    broken = []
    for link in _LINK.findall(_FENCE.sub("", page.read_text())):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page if not path else (page.parent / path).resolve()
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in slugs_of(target)):
            broken.append(link)
    assert not broken


def commands_of(page: Path) -> list[str]:
    text = page.read_text()
    fences = "\n".join(block for block in _FENCE.findall(text) if not block.startswith(("```python", "```mermaid")))
    lines = [line[4:] for line in _FENCE.sub("", text).splitlines() if line.startswith("    ")] + fences.splitlines()
    return [line.split("#")[0].strip() for line in lines if re.match(r"(\w+=\S+ )?quire \w", line)]


def options_of(words: list[str]) -> set[str]:
    """Return the option names of the subcommand that the words call."""
    from quire.cli.main import make_parser

    parser = make_parser()
    for word in words:
        inner = next((one for one in parser._actions if isinstance(one, argparse._SubParsersAction)), None)
        if inner is None:
            break
        assert word in inner.choices, f"there is no command {word!r}"
        parser = inner.choices[word]
    return {name for one in parser._actions for name in one.option_strings}


@pytest.mark.parametrize("page", WRITTEN, ids=ids_of)
def test_every_command_of_a_page_has_options_that_exist(page):
    for command in commands_of(page):
        text = command.split("quire ", 1)[1].split("&&")[0]
        words = shlex.split(text if "{" in text else re.sub(r"[\[\]\\]", " ", text))
        known = options_of(words)
        used = {word.split("=")[0] for word in words if re.fullmatch(r"--?[a-z][\w-]*(=.*)?", word)}
        assert used <= known, f"{command}: {used - known}"


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "docs/reference").glob("*.md") if path not in WRITTEN))
def test_generated_page_is_current(name):
    made = load_generator().PAGES[name]()
    assert (ROOT / "docs/reference" / name).read_text() == made, "run python tools/docs/make_reference.py"


def test_every_field_of_the_engine_options_has_a_meaning():
    page = (ROOT / "docs/reference/engine-options.md").read_text()
    assert not [line for line in page.splitlines() if line.startswith("| `") and line.endswith("|  |")]


def test_readme_is_short_and_has_one_test_command():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    section = text.split("## Test", 1)[1].split("## Use", 1)[0]
    command = next(line for line in section.splitlines() if line.startswith("    "))
    assert command.endswith("pytest -n 2 --dist loadfile")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_page_installs_the_packages_of_the_extra_docs(page):
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]
    command = next(line for line in (ROOT / page).read_text().splitlines() if "pip install" in line and "mkdocs" in line)
    words = shlex.split(command.split("&&")[0])
    assert words[2:] == wanted


def test_column_tables_of_docstrings_become_rows():
    load_generator()
    from field_tables import field_meanings, to_markdown

    text = "What it is.\n\na, b   first\n       goes on\nlonger second\n\nRaises nothing."
    assert field_meanings(text) == {"a": "first goes on", "b": "first goes on", "longer": "second"}
    assert "- **`a, b`**: first goes on" in to_markdown(text)
    assert to_markdown(text).endswith("Raises nothing.")
