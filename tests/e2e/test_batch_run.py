"""`quire batch run` as users run it: a process of its own, with the bundled model."""

import collections
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time

import pytest

TIMEOUT_S = 120
NUM_LINES = 200
INTERRUPTED = 130


def line(name, **body):
    body = {"model": "demo", "prompt": "It was", "max_tokens": 4, "temperature": 0, "ignore_eos": True, **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


def write_lines(path, lines):
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))


def command(folder, *options):
    files = ("-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"))
    return [sys.executable, "-m", "quire", "batch", "run", *files, "demo", "--num-kv-blocks", "512", *options]


def run(folder, *options):
    """Run it to its end, without a terminal."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command(folder, *options), capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)


def answers(path):
    """Return what the whole lines of a file say."""
    if not path.exists():
        return []
    return [json.loads(text) for text in path.read_text().splitlines(keepends=True) if text.endswith("\n")]


def names(path):
    return [answer["custom_id"] for answer in answers(path)]


def test_every_line_is_answered_and_what_failed_lies_apart(tmp_path):
    chat = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    lines = [line(f"r{n}", max_tokens=n) for n in range(1, 9)]
    lines += [{**line("chat"), "url": "/v1/chat/completions", "body": chat}]
    lines += [line("model", model="other"), line("long", prompt="sea " * 3000)]
    write_lines(tmp_path / "in.jsonl", lines)
    ended = run(tmp_path, "--log-level", "error")
    assert ended.returncode == 1
    assert "11 of 11 requests done, 2 failed: see " in ended.stderr
    assert "INFO" not in ended.stderr  # nor of the engine
    found = {answer["custom_id"]: answer["response"] for answer in answers(tmp_path / "out.jsonl")}
    assert {name: found[name]["body"]["usage"]["completion_tokens"] for name in found} == {
        **{f"r{n}": n for n in range(1, 9)},
        "chat": 3,
    }
    failed = {answer["custom_id"]: answer["response"] for answer in answers(tmp_path / "out.errors.jsonl")}
    assert {name: failed[name]["status_code"] for name in failed} == {"model": 404, "long": 400}
    assert failed["long"]["body"]["error"]["code"] == "context_length_exceeded"
    assert "%|" not in ended.stderr  # no progress bar without a terminal
    assert "Traceback" not in ended.stderr


def start(folder):
    return subprocess.Popen(command(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_for_answers(path, count, process):
    end = time.monotonic() + TIMEOUT_S
    while len(answers(path)) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_run_goes_on_where_a_signal_ended_it_and_answers_no_line_twice(tmp_path, number):
    # The first lines are soon done, the others far from it: the signal comes in the middle on any machine.
    lines = [line(f"r{n}", max_tokens=2 if n < 8 else 900, prompt=f"{n} It") for n in range(NUM_LINES)]
    write_lines(tmp_path / "in.jsonl", lines)
    output = tmp_path / "out.jsonl"
    process = start(tmp_path)
    wait_for_answers(output, 8, process)
    if number == signal.SIGINT:  # as a terminal does
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    printed, said = process.communicate(timeout=TIMEOUT_S)  # also of the engine, which ends with it
    assert process.returncode == (INTERRUPTED if number == signal.SIGINT else -number), said
    assert "Traceback" not in printed + said
    kept = names(output)
    assert 8 <= len(kept) < NUM_LINES
    with output.open("ab") as file:  # as if it had been killed in the middle of a write
        file.write(b'{"id": "batch_req_x", "custom_id": "r19')
    write_lines(tmp_path / "in.jsonl", [{**one, "body": {**one["body"], "max_tokens": 2}} for one in lines])
    ended = run(tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "INFO weights" in ended.stderr  # the engine's own log, at the default level
    assert names(output)[: len(kept)] == kept
    assert collections.Counter(names(output)) == {f"r{n}": 1 for n in range(NUM_LINES)}
    assert not (tmp_path / "out.errors.jsonl").exists()
    assert f"{NUM_LINES} of {NUM_LINES} requests done" in ended.stderr


@pytest.mark.slow
def test_progress_bar_is_shown_on_a_terminal(tmp_path):
    write_lines(tmp_path / "in.jsonl", [line(f"r{n}") for n in range(20)])
    main, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 120))
    process = subprocess.Popen(command(tmp_path), stdout=terminal, stderr=terminal, env={**os.environ, "TERM": "xterm"})
    os.close(terminal)
    shown = b""
    try:
        while piece := os.read(main, 1 << 16):
            shown += piece
    except OSError:  # EIO: the process has closed the terminal
        pass
    os.close(main)
    assert process.wait(TIMEOUT_S) == 0
    text = shown.decode()
    assert re.search(r"100%\|.*\| 20/20 \[.*request.*tokens/s, 0 failed\]", text), text
    assert "20 of 20 requests done" in text


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, "No such file"),
        (json.dumps(line("a", temperature=-1)).encode(), "line 1: temperature"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (b"", "no lines"),
                (b"\n".join(json.dumps(line("a")).encode() for _ in range(2)), "line 2: custom_id 'a' is on an earlier line"),
            )
        ),
    ],
    ids=["absent", "body", "empty", "same-id"],
)
def test_input_that_cannot_be_run_ends_with_1_and_says_why(tmp_path, data, said):
    if data is not None:
        (tmp_path / "in.jsonl").write_bytes(data)
    ended = run(tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: ")
    assert said in ended.stderr
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["out.jsonl", "absent/out.jsonl"])
def test_output_that_cannot_be_written_ends_with_1_and_says_why(tmp_path, name):
    write_lines(tmp_path / "in.jsonl", [line("a")])
    (tmp_path / "out.jsonl").write_text("my notes\n")
    ended = run(tmp_path, "-o", str(tmp_path / name))
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert str(tmp_path / name) in last
    assert (tmp_path / "out.jsonl").read_text() == "my notes\n"


def test_usage_that_is_wrong_ends_with_2(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "quire", "batch", "run", "demo", "-i", "x"], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert ended.returncode == 2
    assert "-o" in ended.stderr
