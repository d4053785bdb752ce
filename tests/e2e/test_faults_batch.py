"""The server is killed in the middle of batches, or its disk is full: every line is answered exactly once."""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.batching import ENDED, custom_ids, ended_batch, start_batch, upload, upload_bytes
from tests.e2e.server_process import ServerProcess, serving
from tests.e2e.wire import PROMPT, Wire, assert_recovered, completion

NUM_LINES = 150


def make_lines(num, max_tokens=20):
    return [
        {
            "custom_id": f"r{n}",
            "method": "POST",
            "url": "/v1/completions",
            "body": completion(max_tokens, prompt=f"{PROMPT} {n}"),
        }
        for n in range(num)
    ]


def check_database(folder):
    database = sqlite3.connect(folder / "batches.sqlite")
    with contextlib.closing(database):
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def status_of(server, batch_id):
    return server.get(f"/v1/batches/{batch_id}").json()


def assert_every_line_once(server, batch_id, num_lines):
    batch = server.wait_for(lambda: ended_batch(server, batch_id))
    counts = batch["request_counts"]
    assert (counts["total"], counts["completed"] + counts["failed"]) == (num_lines, num_lines)
    found = custom_ids(server, batch)
    assert sorted(found) == sorted(f"r{n}" for n in range(num_lines))
    return batch


def kill_when(server, condition):
    server.wait_for(condition)
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    server.kill()


@pytest.mark.slow
def test_batch_has_every_line_once_when_the_server_is_killed_while_it_runs(tmp_path):
    options = ("--data-dir", str(tmp_path), "--no-page")
    with serving(*options) as server:
        batch_id = start_batch(server, make_lines(150))
        kill_when(server, lambda: status_of(server, batch_id)["request_counts"]["completed"] > 0)
    check_database(tmp_path)
    with serving(*options) as server:
        batch = assert_every_line_once(server, batch_id, 150)
        assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 150)
        assert_recovered(server)
        assert server.stop() == 0
    check_database(tmp_path)


def steps_of_a_batch(server, lines, progress):
    """Upload, run and, every other time, cancel; what it got to is in `progress`. Ends when the server is gone."""
    with contextlib.suppress(httpx.TransportError, KeyError):
        progress["stage"] = "upload"
        file_id = upload(server, lines)
        progress["stage"] = "create"
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        headers = {**server.headers, "idempotency-key": progress["key"]}
        progress["id"] = server.post("/v1/batches", body, headers=headers).json()["id"]
        while True:
            batch = status_of(server, progress["id"])
            progress["stage"] = batch["status"]
            if progress["cancels"] and batch["request_counts"]["completed"] > 10:
                server.post(f"/v1/batches/{progress['id']}/cancel", {})
                progress["cancels"] = False
            if batch["status"] in ENDED:
                return


def run_and_kill(server, lines, progress, delay_s):
    """Kill the server some time after the batch was begun; return the stage that it was in."""
    worker = threading.Thread(target=steps_of_a_batch, args=(server, lines, progress))
    worker.start()
    time.sleep(delay_s)
    server.process.kill()
    server.process.wait()
    worker.join()


@pytest.mark.slow
def test_batches_have_every_line_once_when_the_server_is_killed_anywhere(tmp_path):
    generator = random.Random(7)
    options = ("--data-dir", str(tmp_path), "--no-page")
    lines = make_lines(NUM_LINES, max_tokens=8)
    ids = {}
    for attempt in range(3):
        progress = {"stage": "", "key": f"key-{attempt}", "cancels": generator.random() < 0.5}
        with serving(*options) as server:
            run_and_kill(server, lines, progress, generator.choice([0.05, 0.2, 1.0]) * (0.2 + generator.random()))
            server.kill()
        check_database(tmp_path)
        if "id" in progress:
            ids[progress["id"]] = progress
    with serving(*options) as server:
        for batch in server.get("/v1/batches").json()["data"]:  # also those of which the client never heard
            assert_every_line_once(server, batch["id"], NUM_LINES)
        assert set(ids) <= {batch["id"] for batch in server.get("/v1/batches").json()["data"]}
        assert_recovered(server)
        assert server.stop() == 0
    check_database(tmp_path)


@pytest.mark.slow
def test_batch_ends_cancelled_when_the_server_is_killed_after_the_cancel(tmp_path):
    options = ("--data-dir", str(tmp_path), "--no-page")
    with serving(*options) as server:
        batch_id = start_batch(server, make_lines(600))
        server.wait_for(lambda: status_of(server, batch_id)["request_counts"]["completed"] > 10)
        server.post(f"/v1/batches/{batch_id}/cancel", {})
        server.process.kill()
        server.kill()
    with serving(*options) as server:
        batch = assert_every_line_once(server, batch_id, 600)
        assert batch["status"] == "cancelled"


@pytest.fixture
def small_disk():
    """A disk of six MiB; without the right to mount one there is no test."""
    folder = Path(tempfile.mkdtemp(prefix="quire-"))  # a socket's path has to be short
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    if mount is None or os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        folder.rmdir()
        pytest.skip("a small disk cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
    folder.rmdir()


@pytest.mark.slow
def test_batch_resumes_and_chat_goes_on_when_the_disk_was_full(small_disk):
    with serving("--data-dir", str(small_disk), "--no-page", env={"TMPDIR": str(small_disk)}) as server:
        batch_id = start_batch(server, make_lines(600, max_tokens=20))
        server.wait_for(lambda: status_of(server, batch_id)["request_counts"]["completed"] > 0)
        ballast = small_disk / "ballast"
        fill(ballast)
        for num_bytes in (200_000, 3_000_000):  # the larger one is on the disk before all of it has come
            refused = upload_bytes(server, b"x" * num_bytes)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "storage_full")
            assert int(refused.headers["retry-after"]) >= 1
        server.wait_for_log("the batch store failed")
        assert server.post("/v1/completions", completion(4)).status_code == 200
        body = {"model": "demo", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
        assert server.post("/v1/chat/completions", body).status_code == 200
        server.wait_for_log(f"batch {batch_id} waits")
        assert status_of(server, batch_id)["status"] in ("in_progress", "finalizing")
        assert not list((small_disk / "files").glob("*.tmp"))
        ballast.unlink()
        batch = assert_every_line_once(server, batch_id, 600)
        assert batch["status"] == "completed"
        assert_recovered(server)
    check_database(small_disk)


def fill(path):
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 4096)


@pytest.mark.slow
def test_server_says_why_when_its_data_folder_cannot_be_opened(tmp_path):
    (tmp_path / "batches.sqlite").write_bytes(b"this is not a database" * 100)
    with pytest.raises(AssertionError, match=r"the server ended with 1:\s+error: data_dir .*file is not a database"):
        ServerProcess("--data-dir", str(tmp_path), "--no-page")


@pytest.mark.slow
def test_one_batch_is_made_when_the_same_request_comes_ten_times_at_once(server):
    body = {"input_file_id": upload(server, make_lines(3)), "endpoint": "/v1/completions", "completion_window": "24h"}

    async def go():
        wires = [await Wire.send(server, "/v1/batches", body, "idempotency-key: the-one") for _ in range(10)]
        return [await wire.answer() for wire in wires]

    answers = asyncio.run(go())
    assert [status for status, _, _ in answers] == [200] * 10
    assert len({batch["id"] for _, _, batch in answers}) == 1
    assert_every_line_once(server, answers[0][2]["id"], 3)


@pytest.mark.slow
def test_online_request_waits_for_no_line_when_long_lines_hold_every_seat():
    lines = [{**line, "body": {**line["body"], "ignore_eos": True}} for line in make_lines(6, max_tokens=800)]
    with serving("--max-num-seqs", "4") as server:
        batch_id = start_batch(server, lines)
        server.wait_for(lambda: server.metric("quire:generation_tokens_total") > 40)
        for _ in range(6):
            assert server.post("/v1/completions", completion(4)).status_code == 200
        assert status_of(server, batch_id)["request_counts"]["completed"] == 0
        assert server.metric("quire:num_preemptions_total") > 0
        batch = assert_every_line_once(server, batch_id, len(lines))
        assert batch["request_counts"]["failed"] == 0
        assert_recovered(server)
