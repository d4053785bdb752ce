"""`quire batch run` without an engine: what is kept, what is run again, what is refused."""

import asyncio
import collections
import json

import pytest

from quire.base.errors import ConfigError
from quire.serving.answers import Ready
from quire.serving.batch.offline import BatchFiles, read_input, run_file
from quire.serving.errors import ApiError, invalid

URLS = ("/v1/completions", "/v1/chat/completions")


def check_body(url, body):
    if b"bad" in body:
        raise invalid("bad body", "x")


def write_input(path, names, url=URLS[0]):
    lines = [json.dumps({"custom_id": name, "method": "POST", "url": url, "body": {"x": name}}) for name in names]
    path.write_text("\n".join(lines) + "\n")


class Work:
    def __init__(self, failing=(), failure=None):
        self.failing, self.failure = failing, failure or ApiError(400, "no")
        self.calls, self.urls = collections.Counter(), set()

    async def __call__(self, record, body):
        name = json.loads(body)["x"]
        self.calls[name] += 1
        self.urls.add(record.endpoint)
        await asyncio.sleep(0)
        if name in self.failing:
            raise self.failure
        return Ready(json.dumps({"echo": name, "usage": {"prompt_tokens": 2, "completion_tokens": 3}}).encode())


def run(folder, work, **options):
    files = BatchFiles(folder / "in", folder / "out", folder / "err")
    spans = read_input(files.input_path, URLS, check_body)
    return asyncio.run(run_file(files, spans, work, 3, **options))


def answered(path):
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


def test_every_line_is_answered_and_failures_lie_apart(tmp_path):
    names = [f"r{n}" for n in range(20)]
    write_input(tmp_path / "in", names)
    progress = run(tmp_path, Work(failing={"r3"}))
    assert (progress.num_lines, progress.num_done, progress.num_failed) == (20, 20, 1)
    assert (progress.num_input_tokens, progress.num_output_tokens) == (38, 57)
    assert sorted(answered(tmp_path / "out")) == sorted(set(names) - {"r3"})
    assert answered(tmp_path / "err") == ["r3"]


def test_other_lines_are_answered_when_one_raises_what_nobody_foresaw(tmp_path):
    write_input(tmp_path / "in", ["a", "b", "c"])
    progress = run(tmp_path, Work(failing={"b"}, failure=RuntimeError("no such row")))
    assert (progress.num_done, progress.num_failed) == (3, 1)
    assert sorted(answered(tmp_path / "out")) == ["a", "c"]
    assert json.loads((tmp_path / "err").read_text())["response"]["status_code"] == 500


def test_run_goes_on_from_what_is_there_when_the_last_line_was_cut(tmp_path):
    write_input(tmp_path / "in", ["a", "b", "c"])
    run(tmp_path, Work(failing={"c"}))
    text = (tmp_path / "out").read_bytes()
    lines = text.splitlines(keepends=True)
    (tmp_path / "out").write_bytes(lines[0] + lines[1][:-5])
    cut = json.loads(lines[1])["custom_id"]
    work = Work()
    progress = run(tmp_path, work)
    assert progress.num_done == 3
    assert work.calls == {cut: 1, "c": 1}
    assert sorted(answered(tmp_path / "out")) == ["a", "b", "c"]
    assert not (tmp_path / "err").exists()


def test_run_begins_anew_when_it_may_overwrite(tmp_path):
    write_input(tmp_path / "in", ["a", "b"])
    run(tmp_path, Work())
    work = Work()
    run(tmp_path, work, is_overwriting=True)
    assert work.calls == {"a": 1, "b": 1}
    assert sorted(answered(tmp_path / "out")) == ["a", "b"]


def test_nothing_is_run_or_written_when_a_line_is_not_valid(tmp_path):
    write_input(tmp_path / "in", ["a", "bad", "a"])
    with pytest.raises(ConfigError, match=r"(?s)line 2: bad body.*line 3: custom_id 'a' is on an earlier line"):
        run(tmp_path, Work())
    assert not (tmp_path / "out").exists()


def test_file_that_is_no_file_of_answers_is_left_alone(tmp_path):
    write_input(tmp_path / "in", ["a"])
    (tmp_path / "out").write_text("my diary\n")
    with pytest.raises(ConfigError, match="not a file of answers"):
        run(tmp_path, Work())
    assert (tmp_path / "out").read_text() == "my diary\n"


def test_lines_of_several_urls_are_run_as_their_routes(tmp_path):
    write_input(tmp_path / "in", ["a"])
    first = (tmp_path / "in").read_text()
    write_input(tmp_path / "in", ["b"], URLS[1])
    (tmp_path / "in").write_text(first + (tmp_path / "in").read_text())
    work = Work()
    run(tmp_path, work)
    assert work.urls == set(URLS)


@pytest.mark.parametrize("text", ["odd\x00", "{}}}"], ids=["no_text", "no_json"])
def test_other_lines_are_answered_when_one_was_changed_since_it_was_checked(tmp_path, text):
    write_input(tmp_path / "in", ["a", "b", "c"])
    files = BatchFiles(tmp_path / "in", tmp_path / "out", tmp_path / "err")
    spans = read_input(files.input_path, URLS, check_body)
    data = files.input_path.read_bytes()
    start = spans[1].offset
    files.input_path.write_bytes(data[:start] + text.encode() + data[start + len(text) :])
    progress = asyncio.run(run_file(files, spans, Work(), 3))
    assert (progress.num_done, progress.num_failed) == (3, 1)
    assert sorted(answered(tmp_path / "out")) == ["a", "c"]
    assert json.loads((tmp_path / "err").read_text())["response"]["body"]["error"]["code"] == "invalid_json_line"


def test_line_is_answered_when_its_usage_cannot_be_read(tmp_path):
    async def work(record, body):
        return Ready(b'{"usage": {"prompt_tokens": null}}')

    write_input(tmp_path / "in", ["a", "b"])
    progress = run(tmp_path, work)
    assert (progress.num_done, progress.num_failed, progress.num_input_tokens) == (2, 0, 0)
    assert sorted(answered(tmp_path / "out")) == ["a", "b"]
