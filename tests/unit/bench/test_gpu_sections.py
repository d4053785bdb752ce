"""Sections of the GPU's benchmark: what one of them does, the others and its own rows outlive."""

import importlib
import sys
import tarfile
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"


@pytest.fixture
def load(monkeypatch):
    """Returns a module of the benchmark; none of these imports torch."""
    monkeypatch.syspath_prepend(str(BENCH))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if name.startswith("gpu"):
            del sys.modules[name]


@pytest.fixture
def sections(load):
    return load("gpu_sections")


def command(code, file):
    writes = f"open({str(file)!r}, 'a').write('{{\"found\": 1}}\\n'); "
    return [sys.executable, "-S", "-c", writes + code]  # begins in a moment


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
    seen, limits = {}, {}

    def command_of(section, rows):
        seen[section.name] = len(rows)
        limits[section.name] = section.limit_s
        file = tmp_path / f"{section.name}.jsonl"
        return command("raise SystemExit(1)" if section.name == "first" else "pass", file)

    taken = {}
    chosen = [sections.Section(name, 60) for name in names[:2]] + [sections.Section("third", 5)]
    sections.run_all_sections(chosen, command_of, tmp_path, 40, lambda section, rows: taken.setdefault(section.name, rows))
    assert seen == {"first": 0, "second": 3, "third": 5}
    assert [taken[name][0] for name in names] == [{"found": 1}] * 3
    assert 5 == limits["third"] < limits["second"] < limits["first"] < 40  # what is left where that is less
    late = sections.run_section(chosen[0], command("pass", tmp_path / "x.jsonl"), tmp_path / "x.jsonl", 29)
    assert late == [{"section": "first", "error": "left out: no time was left"}]


def test_a_row_that_was_cut_is_said_to_be(sections, tmp_path):
    file = tmp_path / "rows.jsonl"
    code = f"open({str(file)!r}, 'a').write('{{\"half')"
    rows = sections.run_section(sections.Section("a", 60), command(code, file), file, 60)
    assert rows[0] == {"found": 1}
    assert "half" in rows[1]["error"]


def test_a_record_has_tables_of_rows_and_says_what_has_run(sections):
    late = sections.run_section(sections.Section("late", 60), [], Path("none"), 0)
    record = {"commit": "a", "none": [], "first": [{"x": 1, "y": "a"}, {"x": 2.5, "y": None}, {"x": 3}], "late": late}
    text = sections.record_text(record)
    assert sections.read_record(text) == record
    assert '[2.5,null]]}, {"keys": ["x"], "rows": [' in text.splitlines()
    assert [sections.is_measured(record.get(name, [])) for name in ("first", "late", "never")] == [True, False, False]


def test_outputs_are_packed_again_after_each_section(sections, tmp_path):
    (tmp_path / "logs").mkdir()
    for name in ("one", "two"):
        (tmp_path / "logs" / f"{name}.txt").write_text(name)
        sections.pack(tmp_path / "logs", tmp_path / "a.logs.tar.gz")
    with tarfile.open(tmp_path / "a.logs.tar.gz") as packed:
        assert packed.extractfile("logs/two.txt").read() == b"two"
        assert "logs/one.txt" in packed.getnames()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.logs.tar.gz", "logs"]


def test_goals_are_compared_with_the_best_rows_of_a_record(load):
    step = {"section": "decode", "batch": 8, "context": 960, "share": 0.7, "step_us": 6.0}
    record = {
        "commit": "a",
        "decode-large": [{"section": "a", "seconds": 2.0}, step, {**step, "share": 0.8, "step_us": 5.0}],
        "decode-large-int4": [{**step, "step_us": 4.0, "share": 0.8}, {**step, "context": 4000, "share": 0.9}],
        "start": [{"section": "start", "is_cold": is_cold, "ready_s": 2.0 + 9 * is_cold} for is_cold in (True, False)],
    }
    lines = [" ".join(line.split()) for line in load("gpu_goals").goals_table(record).splitlines()]
    assert [line for line in lines if line.endswith("missed")] == [
        "decode-large, decode 8 share 0.85 0.8 missed",
        "start, start ready_s 10 11 missed",
    ]
    assert "decode-large-int4, decode 8 share 0.8 0.8" in lines
    assert "int4, 8 x 960, times as fast as bf16 1 1.25" in lines
    assert "drafts, drafts 4 at_share 1.7 not measured" in lines
