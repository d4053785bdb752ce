"""Sections of the GPU's benchmark: what one of them does, the others and its own rows outlive."""

import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[3] / "bench" / "gpu_sections.py"


@pytest.fixture(scope="module")
def sections():
    spec = importlib.util.spec_from_file_location("gpu_sections", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_sections"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu_sections"]


def command(code, file):
    writes = f"open({str(file)!r}, 'a').write('{{\"found\": 1}}\\n'); "
    return [sys.executable, "-c", writes + code]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "code, limit_s, error",
    [
        ("print('words'); raise SystemExit(3)", 60, "ended with 3"),
        ("import os; print('words', flush=True); os.kill(os.getpid(), 9)", 60, "ended with -9"),
        ("import time; print('words', flush=True); time.sleep(600)", 2, "stopped after 2 s"),
    ],
    ids=["fails", "is killed", "hangs"],
)
def test_rows_of_a_section_are_kept_when_it_ends_badly(sections, tmp_path, code, limit_s, error):
    file = tmp_path / "rows.jsonl"
    rows = sections.run_section(sections.Section("a", limit_s), command(code, file), file, 600)
    assert rows[0] == {"found": 1}
    assert (rows[1]["section"], rows[1]["error"]) == ("a", error)
    assert "words" in rows[1]["output"]
    assert rows[2]["seconds"] > 0


def test_sections_go_on_after_one_that_fails_and_end_with_the_time(sections, tmp_path):
    names = ["first", "second", "third"]
    seen = {}

    def command_of(section, rows):
        seen[section.name] = len(rows)
        file = tmp_path / f"{section.name}.jsonl"
        return command("raise SystemExit(1)" if section.name == "first" else "pass", file)

    taken = {}
    chosen = [sections.Section(name, 60) for name in names]
    sections.run_all_sections(chosen, command_of, tmp_path, 60, lambda section, rows: taken.setdefault(section.name, rows))
    assert seen == {"first": 0, "second": 3, "third": 5}
    assert [taken[name][0] for name in names] == [{"found": 1}] * 3
    late = sections.run_section(chosen[0], command("pass", tmp_path / "x.jsonl"), tmp_path / "x.jsonl", 0.5)
    assert late == [{"section": "first", "error": "left out: no time was left"}]


def test_a_row_that_was_cut_is_said_to_be(sections, tmp_path):
    file = tmp_path / "rows.jsonl"
    code = f"open({str(file)!r}, 'a').write('{{\"half')"
    rows = sections.run_section(sections.Section("a", 60), command(code, file), file, 60)
    assert rows[0] == {"found": 1}
    assert "half" in rows[1]["error"]
