"""An engine whose disk tier is damaged, full, slow, killed or somebody else's gives the tokens of one without tiers."""

import errno
import os
import random
import sqlite3
import subprocess
import sys
import threading
import time

import pytest

from quire.engine import disk_tier, llm_engine
from quire.kernels.native import load_native
from quire.kv.tiers import disk_store
from quire.kv.tiers.disk_folder import file_stats, verify_pages
from quire.kv.tiers.disk_store import MIN_DISK_BYTES, DiskStore
from tests.unit.engine.test_kv_tiers import OTHERS, PREFIX, make_llm, run
from tests.unit.kv.tiers.test_disk_store import disk_bytes

pytestmark = pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")


@pytest.fixture(scope="module")
def expected():
    """The tokens and log probabilities of PREFIX without tiers."""
    with make_llm(enable_prefix_caching=False) as cold:
        return run(cold, [PREFIX])[0]


@pytest.fixture
def options(tmp_path):
    return {"kv_disk_dir": str(tmp_path / "tier"), "kv_disk_bytes": 64 << 20, "kv_save": "all"}


@pytest.fixture
def warnings(monkeypatch):
    """The warnings of the disk tier."""
    found = []
    monkeypatch.setattr(disk_tier.logger, "warning", lambda text, *values: found.append(text % values))
    return found


def fill(options, prompts=(PREFIX,)):
    """Write the pages of prompts to the disk tier, and end the engine."""
    with make_llm(**options) as llm:
        run(llm, list(prompts))


WRITER = """
import sys
from tests.unit.engine.test_kv_tiers import PREFIX, make_llm, run
with make_llm(kv_disk_dir=sys.argv[1], kv_disk_bytes=int(sys.argv[2]), kv_save="all") as llm:
    for number in range(10_000):
        run(llm, [PREFIX, f"{sys.argv[3]} {number} " + PREFIX[number % 50 :]], max_tokens=2)
        print(number, flush=True)
"""


def start_writer(folder, name):
    command = [sys.executable, "-c", WRITER, str(folder), str(MIN_DISK_BYTES), name]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_only_whole_pages_are_found_after_two_engines_that_share_a_folder_were_killed(tmp_path, options):
    folder, rng, most = tmp_path / "tier", random.Random(5), 0
    for _ in range(2):
        writers = [start_writer(folder, name) for name in ("one", "two")]
        try:
            for writer in writers:
                for _ in range(45):  # 6 pages each: with those of the other one more than there is room for
                    assert writer.stdout.readline()
                    most = max(most, disk_bytes(folder))
            time.sleep(rng.random() * 0.2)
        finally:
            for writer in writers:
                writer.kill()
                writer.wait()
    assert MIN_DISK_BYTES // 2 < most <= MIN_DISK_BYTES
    assert verify_pages(folder)[1] == 0
    prompts = [f"{name} {number} " + PREFIX[number % 50 :] for name in ("one", "two") for number in range(25, 40, 3)]
    with make_llm(enable_prefix_caching=False) as cold:
        expected = run(cold, prompts)[0]
    with make_llm(**{**options, "kv_disk_bytes": MIN_DISK_BYTES}) as llm:
        found, cached = run(llm, prompts)
    assert found == expected
    assert sum(num_tokens >= 64 for num_tokens in cached) >= 2, cached


def test_damaged_pages_are_computed_again(tmp_path, options, expected):
    fill(options)
    rng, path = random.Random(3), next((tmp_path / "tier").glob("*.pages"))
    data = bytearray(path.read_bytes())
    for _ in range(10_000):
        data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
    path.write_bytes(data)
    with make_llm(**options) as llm:
        found, cached = run(llm, [PREFIX])
        stats = llm.llm_engine.stats.tiers[1]
    assert found == expected
    assert cached == [0]
    assert (stats.num_damaged, stats.num_loaded) == (1, 0)


def test_two_requests_of_one_prefix_survive_a_damaged_page(tmp_path, options):
    prompts = [PREFIX, PREFIX + OTHERS[0][:90]]
    with make_llm(enable_prefix_caching=False) as cold:
        expected = [output.outputs[0].token_ids for output in cold.generate(prompts, use_tqdm=False)]
    fill(options)
    path = next((tmp_path / "tier").glob("*.pages"))
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"damaged" * 20_000)
    with make_llm(**options) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, use_tqdm=False)]
    assert found == expected


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "I/O error")])
def test_a_disk_that_cannot_be_written_is_told_once(monkeypatch, options, expected, warnings, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(disk_store.os, "pwritev", fail)
    monkeypatch.setattr(disk_tier, "_PAUSE_S", 0.0)
    with make_llm(**options) as llm:
        assert run(llm, [PREFIX])[0] == expected
        run(llm, OTHERS)
        for _ in range(100):  # what waits to be saved is saved while the engine is idle
            llm.llm_engine.save_pages()
        assert run(llm, [PREFIX])[0] == expected
        stats = llm.llm_engine.stats.tiers[1]
    assert len(warnings) == 1
    assert str(error) in warnings[0]
    assert stats.num_saved == 0
    assert stats.num_dropped > 0


def test_thread_goes_on_after_unexpected_errors_and_each_kind_is_told_once(monkeypatch, options, caplog):
    """One request each finds errors of looking up, reading and writing; the last one finds its pages."""
    prompts = [PREFIX, *OTHERS[:3]]
    with make_llm(enable_prefix_caching=False) as cold:
        expected = [run(cold, [prompt])[0] for prompt in prompts]
    fill(options, prompts)

    def fail(*_):
        raise KeyError("unforeseen")

    with make_llm(**options) as llm:
        for name, index in (("find", 0), ("read", 1), ("read", 2)):
            with monkeypatch.context() as patch:
                patch.setattr(DiskStore, name, fail)
                assert run(llm, [prompts[index]]) == (expected[index], [0])
                assert "1 error since 20" in llm.llm_engine.stats.tiers[1].problems["error"] or index == 2
        with monkeypatch.context() as patch:
            patch.setattr(DiskStore, "write", fail)
            run(llm, [f"{number} {PREFIX}" for number in range(3)])
            while llm.llm_engine.save_pages():
                pass
            failed = llm.llm_engine.stats.tiers[1]
        found, (num_cached,) = run(llm, [prompts[3]])
        run(llm, [f"3 {PREFIX}"])
        deadline_s = time.monotonic() + 60
        while (stats := llm.llm_engine.stats.tiers[1]).problems and time.monotonic() < deadline_s:
            llm.llm_engine.save_pages()
    assert (found, num_cached >= 64) == (expected[3], True)
    assert stats.num_errors >= 4
    assert "KeyError: 'unforeseen'" in failed.problems["error"]
    assert not stats.problems, "all have worked again"
    told = [record.getMessage() for record in caplog.records if record.exc_info]
    assert len(told) == 3, told
    assert all("of the disk tier failed" in text for text in told)


def test_a_full_file_system_is_told_once(tmp_path, expected, warnings):
    """A small tmpfs, where one may be mounted: also the index cannot be written there."""
    folder = tmp_path / "small"
    folder.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("no tmpfs may be mounted here")
    try:
        with make_llm(kv_disk_dir=str(folder), kv_disk_bytes=64 << 20, kv_save="all") as llm:
            assert run(llm, [PREFIX])[0] == expected
            run(llm, OTHERS)
            assert run(llm, [PREFIX])[0] == expected
        assert len(warnings) == 1
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def other_version(folder):
    db = sqlite3.connect(folder / "index.sqlite")
    db.execute("PRAGMA user_version=99")
    db.close()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_version, "another version of quire"),
        (lambda folder: folder.chmod(0o755), "has mode 755"),
        (lambda folder: (folder / "index.sqlite").write_bytes(b"nothing" * 5000), "file is not a database"),
        (lambda folder: os.chown(folder, 4321, -1), "belongs to user 4321"),
    ],
    ids=["version", "mode", "index", "user"],
)
def test_a_folder_that_cannot_be_used_is_told_and_the_engine_runs_without(
    tmp_path, options, expected, warnings, change, message
):
    if "user" in message and os.geteuid() != 0:
        pytest.skip("only root may give a folder away")
    DiskStore(tmp_path / "tier", MIN_DISK_BYTES, {}, 5000).close()
    change(tmp_path / "tier")
    with make_llm(**options) as llm:
        assert run(llm, [PREFIX])[0] == expected
        assert [stats.tier for stats in llm.llm_engine.stats.tiers] == ["host"]
    assert len(warnings) == 1
    assert message in warnings[0]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("other", ["int8", "fp8", "turboquant_4bit", "k8v4"])
def test_pages_of_another_format_are_not_found(options, expected, other):
    fill({**options, "kv_cache_dtype": other})
    with make_llm(**options) as llm:
        found, cached = run(llm, [PREFIX])
    assert (found, cached) == (expected, [0])
    assert len(file_stats(disk_tier.Path(options["kv_disk_dir"]))) == 2


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["find", "read"])
def test_request_does_not_wait_for_a_disk_that_hangs_and_neither_does_the_end(monkeypatch, options, expected, name):
    fill(options)
    is_over = threading.Event()

    def hang(*_):
        is_over.wait(60)
        return [] if name == "find" else False

    monkeypatch.setattr(DiskStore, name, hang)
    monkeypatch.setattr(disk_tier, "_MIN_WAIT_S", 0.1)
    monkeypatch.setattr(disk_tier, "_CLOSE_S", 0.2)
    monkeypatch.setattr(llm_engine, "_CLOSE_SAVE_S", 0.2)
    try:
        with make_llm(**options) as llm:
            begin = time.monotonic()
            found, cached = run(llm, [PREFIX])
            assert time.monotonic() - begin < 20  # and not 60: most of it is computing
            assert (found, cached) == (expected, [0])
            assert llm.llm_engine.stats.tiers[1].num_late == 1
            begin = time.monotonic()
        assert time.monotonic() - begin < 20
    finally:
        is_over.set()


def test_pages_are_not_read_when_computing_is_faster(monkeypatch, options, expected):
    fill(options)
    read = DiskStore.read

    def slowly(store, key, into):
        time.sleep(0.2)
        return read(store, key, into)

    monkeypatch.setattr(DiskStore, "read", slowly)
    monkeypatch.setattr(disk_tier, "_MAX_SHARE", 0.8)
    with make_llm(**options) as llm:
        disk = llm.llm_engine.disk_tier
        assert run(llm, [OTHERS[0]])[1] == [0]  # measures computing
        disk.bytes_per_s = 1000.0  # measured before
        assert run(llm, [PREFIX]) == (expected, [0])
        assert llm.llm_engine.stats.tiers[1].num_declined == 1
        disk.bytes_per_s = 1e12
        run(llm, OTHERS)
        assert disk.stats.num_read == 0


def test_prompts_with_logprobs_of_the_prompt_are_computed_although_the_disk_has_them(options):
    with make_llm(enable_prefix_caching=False) as cold:
        expected = run(cold, [PREFIX], prompt_logprobs=1)[0]
    fill(options)
    with make_llm(**options) as llm:
        assert run(llm, [PREFIX], prompt_logprobs=1) == (expected, [0])
