"""bench/peers.py with engines that are short scripts: each figure is printed as it comes, and what does not run is left out."""

import importlib.util
import sys
from pathlib import Path
from unittest import mock

import pytest

SCRIPT = Path(__file__).parents[3] / "bench/peers.py"
WORKLOADS = 'WORKLOADS = {"decode1": (1, 4, 8, "output"), "prefill": (1, 9, 1, "input")}\n'
ENGINE = 'import json, sys\nprint(json.dumps({"workload": sys.argv[-1], "tokens_per_s": 20.0}))\n'
OTHER_PROCESSOR = "import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n"
QUIRE = (
    "import json, sys\n"
    'assert "--num-prompts" in sys.argv\n'
    'open(sys.argv[sys.argv.index("--output-json") + 1], "w").write(json.dumps({"elapsed_time": 0.25}))\n'
)


@pytest.fixture
def peers(tmp_path, monkeypatch):
    """The module, with a folder of peers and of engines."""
    spec = importlib.util.spec_from_file_location("peers", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "workloads", raising=False)
    texts = {"workloads": WORKLOADS, "run_llamacpp": ENGINE, "run_vllm": OTHER_PROCESSOR, "quire": QUIRE}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    for engine in ("llamacpp", "vllm"):
        (tmp_path / engine / "bin").mkdir(parents=True)
        (tmp_path / engine / "bin/python").symlink_to(sys.executable)
    yield module
    sys.modules.pop("workloads", None)


def test_figures_are_printed_and_engines_that_do_not_run_are_left_out(peers, tmp_path, capsys):
    quire = f"{sys.executable} -S {tmp_path}/quire.py"
    peers.main([str(tmp_path), "--peers", str(tmp_path), "--quire", quire, "--rounds", "1", "--only", "decode1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines[:2]] == [
        ["bf16", "decode1", "quire", "32.0"],
        ["bf16", "decode1", "llama.cpp", "20.0"],
    ]
    assert lines[2] == "vllm is left out: illegal instruction: it is compiled for another processor"
    assert lines[-1].split() == ["int4", "decode1", "quire", "32.0", "best", "peer", "20.0", "ratio", "1.60"]
    assert sum("vllm" in line for line in lines) == 1


def test_engine_that_takes_too_long_is_stopped_and_its_figures_so_far_are_kept(peers, monkeypatch):
    timer = mock.Mock()
    monkeypatch.setattr(peers.threading, "Timer", timer)
    script = "import time\nprint('{}', flush=True)\ntime.sleep(60)"
    lines = peers.stream([sys.executable, "-S", "-c", script], 1.0)
    assert next(lines) == {}
    timer.return_value.start.assert_called_once()
    limit_s, stop = timer.call_args.args
    assert limit_s == 1.0
    stop()
    with pytest.raises(peers.EngineFailure, match="stopped after 1 s"):
        next(lines)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--only", "x"], "--only: got 'x', allowed are decode1, prefill"),
        (["--only", "prefill", "--precision", "x"], "--precision: got 'x', allowed are bf16, int8, int4"),
    ],
)
def test_unknown_workloads_and_precisions_are_refused(peers, tmp_path, options, words):
    with pytest.raises(SystemExit, match=words):
        peers.main([str(tmp_path), "--peers", str(tmp_path), *options])
