"""The stages of a start in a fresh process, as far as they are the benchmark's own."""

import importlib.util
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

PATH = Path(__file__).resolve().parents[3] / "bench" / "gpu_start.py"


@pytest.fixture(scope="module")
def start():
    spec = importlib.util.spec_from_file_location("gpu_start", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def scripted(start, tmp_path, monkeypatch):
    """Have another script stand for the process that is started, and no model be written."""
    monkeypatch.setitem(sys.modules, "gpu_model", SimpleNamespace(write_random_model=lambda shape, folder: folder))

    def use(code, seconds=20):
        script = tmp_path / "script.py"
        script.write_text("import json, os, sys, time, pathlib\n" + code)
        monkeypatch.setattr(start, "__file__", str(script))
        place = SimpleNamespace(engine_device="interpreter", is_tiny=True, folder=tmp_path)
        return list(start.start_rows(place, SimpleNamespace(name="tiny"), time.perf_counter() + seconds))

    return use


def test_the_second_start_finds_the_cache_of_the_first(scripted, tmp_path):
    rows = scripted(
        "left = pathlib.Path(os.environ['TRITON_CACHE_DIR']) / 'left'; was_there = left.exists(); left.touch()\n"
        "print('a line of a library'); print(json.dumps({'total_s': 3 if was_there else 30, 'given': sys.argv[2:]}))"
    )
    assert [(row["is_cold"], row["total_s"]) for row in rows] == [(True, 30), (False, 3)]
    folder, options = rows[0]["given"]
    assert folder == str(tmp_path / "tiny")
    assert json.loads(options)["device"] == "interpreter"


def test_a_start_that_fails_is_a_row_that_says_so(scripted):
    (row,) = scripted("sys.exit('no such device')")
    assert (row["is_cold"], row["error"]) == (True, "ended with 1")
    assert "no such device" in row["output"]


def test_no_start_begins_when_the_time_is_over(scripted):
    assert scripted("", seconds=-1) == []


def test_a_start_that_hangs_is_stopped(scripted):
    (row,) = scripted("time.sleep(600)", seconds=1)
    assert row["error"].startswith("stopped after ")


def test_what_is_timed_does_the_same_and_adds_up(start):
    spent = {"a": 0.0}
    timed = start.timed(lambda x, *, y: (time.sleep(0.01), x + y)[1], spent, "a")
    assert [timed(1, y=2), timed(3, y=4)] == [3, 7]
    assert spent["a"] >= 0.02
