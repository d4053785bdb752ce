"""ServerLauncher with a small program in place of the server: its options and keys, its end, the environment."""

import asyncio
import json
import stat
import sys
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="needs quire[server]")

from quire.fleet.config import FleetConfig, ModelEntry
from quire.fleet.manager import ModelStartError
from quire.fleet.process import ServerLauncher
from quire.serving.auth import hash_key, read_key_file
from quire.serving.config import ApiKey
from tests.ranks import wait_until

SHOW = "import os, sys, json; open(sys.argv[2] + '.seen', 'w').write(json.dumps([sys.argv[1], dict(os.environ)])); sys.exit(3)"
SLEEP = "import time; time.sleep(600)"
DEAF = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open(sys.argv[2] + '.up', 'w'); time.sleep(600)"
)
ENTRY = ModelEntry(name="org/a", memory_bytes=1, options={"model": "demo", "max-num-seqs": "4"})


def launcher_of(program, **options):
    config = FleetConfig(models=(ENTRY,), memory_bytes=1, drain_timeout_s=0, **options)
    return ServerLauncher(config, "router-key", (sys.executable, "-c", program))


def run(work):
    return asyncio.run(asyncio.wait_for(work, 60))


def test_options_keys_and_environment_of_a_process(monkeypatch):
    monkeypatch.setenv("QUIRE_SERVE_PORT", "9000")
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    key = ApiKey("one", hash_key("secret"), max_concurrent=3, weight=2.0, is_admin=True)
    with launcher_of(SHOW, api_keys=(key,), max_body_bytes=100 << 20, max_held_body_bytes=1 << 30) as launcher:
        process = launcher.launch(ENTRY)
        with pytest.raises(ModelStartError, match="ended with exit status 3"):
            run(process.wait_ready())
        folder = Path(process.address.uds).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        options = json.loads((folder / "0.json").read_text())
        assert (options["model"], options["max-num-seqs"], options["served-model-name"]) == ("demo", "4", ["org/a"])
        assert options["uds"] == process.address.uds
        assert (options["max-body-bytes"], options["max-held-body-bytes"]) == (str(100 << 20), str(1 << 30))
        keys = read_key_file(Path(options["api-key-file"]))
        assert keys[0] == key
        assert (keys[1].sha256, keys[1].is_admin) == (hash_key("router-key"), True)
        _, environment = json.loads((folder / "0.json.seen").read_text())
        assert not [name for name in environment if name.startswith("QUIRE_SERVE_") or name == "QUIRE_API_KEY"]
        assert process.address.name == "org/a"
    assert not folder.exists()


def test_process_ends_with_sigterm():
    with launcher_of(SLEEP) as launcher:
        process = launcher.launch(ENTRY)

        async def work():
            await process.stop()
            return await process.wait()

        assert "signal 15" in run(work())
        run(process.stop())  # again, without effect


def test_process_that_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr("quire.fleet.process._KILL_AFTER_S", 0.2)
    with launcher_of(DEAF) as launcher:
        process = launcher.launch(ENTRY)
        assert wait_until(Path(process.address.uds.replace(".sock", ".json.up")).exists)

        async def work():
            await process.stop()
            return await process.wait()

        assert "signal 9" in run(work())


def test_leaving_the_launcher_ends_its_processes():
    with launcher_of(SLEEP) as launcher:
        process = launcher.launch(ENTRY)
        assert process.is_running
    assert not process.is_running
