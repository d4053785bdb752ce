"""The disk tier's store: pages come back or are a miss, whatever happens to the folder, which never outgrows its bound."""

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.base.errors import ConfigError
from quire.kv.tiers import disk_folder, disk_store
from quire.kv.tiers.disk_folder import clear_folder, file_stats, is_in_use, verify_pages
from quire.kv.tiers.disk_store import MIN_DISK_BYTES, DiskStore

PAGE = 60_000


def page_of(key, size=PAGE):
    return random.Random(key).randbytes(size)


def read(store, key):
    into = bytearray(store.page_bytes)
    return bytes(into) if store.read(key, into) else None


def make_store(folder, max_bytes=MIN_DISK_BYTES, model="demo", page_bytes=PAGE):
    return DiskStore(Path(folder), max_bytes, {"model": model}, page_bytes)


def in_index(store, statement, *values):
    """Run a statement in the index of a store, as another process would."""
    db = disk_store.open_index(store.folder)
    found = db.execute(statement, values).fetchone()
    db.close()
    return found


def disk_bytes(folder):
    num_blocks = 0
    for path in Path(folder).iterdir():
        with contextlib.suppress(FileNotFoundError):  # SQLite's own, which another process has removed meanwhile
            num_blocks += path.stat().st_blocks
    return 512 * num_blocks


def test_pages_are_found_after_a_restart(tmp_path):
    folder = tmp_path / "tier"
    store = make_store(folder)
    assert store.write([(key, page_of(key)) for key in range(20)]) == 20
    assert store.write([(3, page_of(3))]) == 0
    store.close()
    store = make_store(folder)
    assert store.find([0, 1, 2, 100, 3]) == [0, 1, 2]
    assert all(read(store, key) == page_of(key) for key in range(20))
    assert read(store, 21) is None
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())


def test_another_model_finds_nothing(tmp_path):
    first, second = make_store(tmp_path / "tier"), make_store(tmp_path / "tier", model="other")
    first.write([(1, page_of(1))])
    assert read(second, 1) is None
    assert len(file_stats(tmp_path / "tier")) == 2


@pytest.mark.parametrize("num_trials", [500, pytest.param(3000, marks=pytest.mark.slow)])
def test_no_flipped_byte_gives_a_wrong_page(tmp_path, num_trials):
    store = make_store(tmp_path / "tier", page_bytes=500)
    rng = random.Random(7)
    path = next((tmp_path / "tier").glob("*.pages"))
    num_missed = 0
    for trial in range(num_trials):
        key = rng.randrange(1 << 128)
        page = page_of(key, 500)
        assert store.write([(key, page)]) == 1
        slot = store.slot_of(key)
        with open(path, "r+b") as file:
            file.seek(slot * 4096 + rng.randrange(64 + 500))
            old = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([old[0] ^ rng.randrange(1, 256)]))
        found = read(store, key)
        assert found in (None, page), trial  # padding of the header is not read
        num_missed += found is None
    assert num_missed > 0.9 * num_trials
    assert store.num_damaged == num_missed


def test_flipped_bytes_of_the_index_give_a_miss_or_an_error(tmp_path):
    folder = tmp_path / "tier"
    store = make_store(folder, page_bytes=500)
    pages = {key: page_of(key, 500) for key in range(200)}
    store.write(list(pages.items()))
    store.close()
    index = folder / "index.sqlite"
    whole = index.read_bytes()
    rng = random.Random(3)
    seen = {"error": 0, "page": 0, "miss": 0}
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(10):
            data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        index.write_bytes(data)
        try:
            store = make_store(folder, page_bytes=500)
            try:
                for key in rng.sample(range(200), 10):
                    found = read(store, key)
                    assert found in (None, pages[key])
                    seen["miss" if found is None else "page"] += 1
            finally:
                store.close()
        except (sqlite3.Error, ConfigError, ValueError, OSError, TypeError):
            seen["error"] += 1
        for name in ("index.sqlite-wal", "index.sqlite-shm"):
            (folder / name).unlink(missing_ok=True)
    assert seen["page"] > 0


def test_least_recently_used_pages_go_first_when_the_bound_is_reached(tmp_path):
    store = make_store(tmp_path / "tier")
    for first in range(0, 700, 50):
        store.write([(key, page_of(key)) for key in range(first, first + 50)])
        store.touch({0: 0.0})
        assert disk_bytes(tmp_path / "tier") <= MIN_DISK_BYTES
    assert read(store, 0) == page_of(0)
    assert read(store, 1) is None
    assert read(store, 699) == page_of(699)
    num_pages = file_stats(tmp_path / "tier")[0].num_pages
    assert num_pages == len([key for key in range(700) if read(store, key) is not None])


def test_retained_pages_outlive_those_that_were_used_later(tmp_path):
    store = make_store(tmp_path / "tier")
    store.write([(key, page_of(key)) for key in range(20)], dict.fromkeys(range(10), 3600.0))
    store.touch({10: 3600.0})
    store.touch({0: 0.0})  # does not shorten
    for first in range(1000, 1800, 50):
        store.write([(key, page_of(key)) for key in range(first, first + 50)])
    assert [key for key in range(20) if read(store, key) == page_of(key)] == list(range(11))


WRITER = """
import random, sys
from pathlib import Path
from quire.kv.tiers.disk_store import DiskStore, MIN_DISK_BYTES
store = DiskStore(Path(sys.argv[1]), MIN_DISK_BYTES, {"model": "demo"}, 60_000)
print("ready", flush=True)
rng = random.Random(int(sys.argv[2]))
for _ in range(int(sys.argv[3])):
    keys = [rng.randrange(3000) for _ in range(20)]
    store.write([(key, random.Random(key).randbytes(60_000)) for key in keys])
    into = bytearray(60_000)
    for key in keys:
        if store.read(key, into):
            assert into == random.Random(key).randbytes(60_000)
    print("written", flush=True)
"""


def start_writer(folder, seed, rounds):
    command = [sys.executable, "-c", WRITER, str(folder), str(seed), str(rounds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_two_processes_stay_within_the_bound(tmp_path):
    folder = tmp_path / "tier"
    writers = [start_writer(folder, seed, 60) for seed in range(2)]
    most = 0
    while any(writer.poll() is None for writer in writers):
        if folder.exists():
            most = max(most, disk_bytes(folder))
        time.sleep(0.02)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert MIN_DISK_BYTES // 2 < most <= MIN_DISK_BYTES
    assert verify_pages(folder)[1] == 0


@pytest.mark.slow
def test_slots_of_killed_writers_are_used_again(tmp_path):
    folder = tmp_path / "tier"
    for seed in range(4):
        writer = start_writer(folder, seed, 10_000)
        assert [writer.stdout.readline() for _ in range(2)] == ["ready\n", "written\n"]
        time.sleep(0.3)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    store = make_store(folder)
    assert in_index(store, "SELECT count(*) FROM slots WHERE writer IS NOT NULL") == (0,)
    found = [key for key in range(3000) if store.has(key)]
    assert found
    assert all(read(store, key) in (None, page_of(key)) for key in found)
    assert disk_bytes(folder) <= MIN_DISK_BYTES


def test_page_is_not_entered_when_the_disk_is_full(tmp_path, monkeypatch):
    store = make_store(tmp_path / "tier")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk_store.os, "pwritev", full)
    with pytest.raises(OSError, match="No space"):
        store.write([(1, page_of(1))])
    assert read(store, 1) is None
    monkeypatch.undo()
    assert store.write([(1, page_of(1))]) == 1
    assert read(store, 1) == page_of(1)


def test_folders_that_cannot_be_used_are_refused(tmp_path, monkeypatch):
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="has mode 755"):
        make_store(tmp_path / "open")
    with pytest.raises(ConfigError, match="kv_disk_bytes must be at least"):
        make_store(tmp_path / "small", max_bytes=1000)
    make_store(tmp_path / "tier").close()
    db = sqlite3.connect(tmp_path / "tier" / "index.sqlite")
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(ConfigError, match="another version of quire"):
        make_store(tmp_path / "tier")
    monkeypatch.setattr(disk_store.os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="belongs to user"):
        make_store(tmp_path / "tier")


def test_verify_removes_damaged_pages_and_clear_all(tmp_path):
    folder = tmp_path / "tier"
    store = make_store(folder)
    store.write([(key, page_of(key)) for key in range(5)])
    slot = store.slot_of(2)
    with open(next(folder.glob("*.pages")), "r+b") as file:
        file.seek(slot * store.slot_bytes + 1000)
        file.write(b"damaged")
    assert verify_pages(folder) == (5, 1)
    assert verify_pages(folder) == (4, 0)
    store.close()
    assert clear_folder(folder) > 0
    assert list(folder.iterdir()) == []


def test_clear_empties_a_folder_that_is_in_use(tmp_path):
    folder = tmp_path / "tier"
    store = make_store(folder)
    store.write([(key, page_of(key)) for key in range(50)])
    assert is_in_use(folder)
    assert clear_folder(folder) >= 50 * PAGE
    assert [read(store, key) for key in range(50)] == [None] * 50
    assert store.write([(key, page_of(key)) for key in range(30, 40)]) == 10
    assert [key for key in range(50) if read(store, key) == page_of(key)] == list(range(30, 40))
    assert store.usage() == (10, 10 * store.slot_bytes)
    assert disk_bytes(folder) < 20 * PAGE + (1 << 20)
    assert verify_pages(folder) == (10, 0)
    store.close()
    assert not is_in_use(folder)


def test_clear_waits_until_nothing_is_being_written(tmp_path, monkeypatch):
    folder = tmp_path / "tier"
    store = make_store(folder)
    store.write([(1, page_of(1))])
    in_index(store, "UPDATE slots SET writer=?", disk_store.own_incarnation())
    monkeypatch.setattr(disk_folder, "_CLEAR_S", 0.1)
    with pytest.raises(ConfigError, match="without a pause"):
        clear_folder(folder)
    in_index(store, "UPDATE slots SET writer=NULL")
    assert clear_folder(folder) > 0


def test_store_begins_anew_when_its_file_was_deleted(tmp_path):
    folder = tmp_path / "tier"
    idle = make_store(folder)
    idle.write([(1, page_of(1))])
    in_index(idle, "UPDATE files SET used_s=0")
    busy = make_store(folder, model="other")
    busy.write([(key, page_of(key)) for key in range(700)])
    assert read(idle, 1) is None
    in_index(busy, "UPDATE files SET used_s=0")
    assert idle.write([(key, page_of(key)) for key in range(10)]) == 10
    assert all(read(idle, key) == page_of(key) for key in range(10))
    assert verify_pages(folder)[1] == 0
    assert disk_bytes(folder) <= MIN_DISK_BYTES


def test_verify_counts_the_pages_of_a_lost_file_as_damaged(tmp_path):
    folder = tmp_path / "tier"
    make_store(folder).write([(key, page_of(key)) for key in range(5)])
    next(folder.glob("*.pages")).unlink()
    assert verify_pages(folder, is_removed=False) == (5, 5)
    assert verify_pages(folder) == (5, 5)
    assert verify_pages(folder) == (0, 0)


def test_folders_without_a_cache_are_refused_and_stay_as_they_are(tmp_path):
    (tmp_path / "other").mkdir(mode=0o700)
    for act in (file_stats, verify_pages, clear_folder):
        with pytest.raises(ConfigError, match="is not the folder of a disk tier"):
            act(tmp_path / "other")
        with pytest.raises(ConfigError, match="does not exist"):
            act(tmp_path / "none")
    assert list((tmp_path / "other").iterdir()) == []
