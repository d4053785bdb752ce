"""`quire cache` counts, checks and deletes the pages of a folder, and says what is wrong with another one."""

import json

from quire.cli.main import main
from quire.kv.tiers.disk_store import MIN_DISK_BYTES, DiskStore


def make_store(folder):
    return DiskStore(folder, MIN_DISK_BYTES, {"model": "demo"}, 5000)


def damage(folder, offset):
    with next(folder.glob("*.pages")).open("r+b") as file:
        file.seek(offset)
        file.write(b"damaged")


def test_stats_verify_and_clear_while_a_store_is_open(tmp_path, capsys):
    folder = tmp_path / "tier"
    store = make_store(folder)
    store.write([(key, bytes([key]) * 5000) for key in range(6)])
    assert main(["cache", "stats", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "6 pages" in shown
    assert "in use by an engine" in shown
    assert "demo" in shown
    assert main(["cache", "stats", "--json", str(folder)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["is_in_use"]
    assert found["files"][0]["num_pages"] == 6
    assert main(["cache", "verify", str(folder)]) == 0
    damage(folder, 1000)
    assert main(["cache", "verify", "--keep", str(folder)]) == 1
    assert main(["cache", "verify", str(folder)]) == 1
    assert "6 pages, 1 damaged, which are removed" in capsys.readouterr().out
    assert main(["cache", "verify", str(folder)]) == 0
    assert main(["cache", "clear", str(folder)]) == 0
    assert store.find([5]) == []
    store.close()
    assert main(["cache", "stats", str(folder)]) == 0
    assert "0 pages" in capsys.readouterr().out


def test_other_folders_are_errors(tmp_path, capsys):
    tmp_path.chmod(0o700)
    assert main(["cache", "clear", str(tmp_path)]) == 1
    assert "is not the folder of a disk tier" in capsys.readouterr().err
    assert main(["cache", "stats", str(tmp_path / "none")]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_a_damaged_index_is_an_error_until_it_is_cleared(tmp_path, capsys):
    folder = tmp_path / "tier"
    make_store(folder).close()
    (folder / "index.sqlite").write_bytes(b"no database at all, but long enough" * 100)
    assert main(["cache", "stats", str(folder)]) == 1
    assert "quire cache clear" in capsys.readouterr().err
    assert main(["cache", "clear", str(folder)]) == 0
    make_store(folder).close()
    assert main(["cache", "verify", str(folder)]) == 0
