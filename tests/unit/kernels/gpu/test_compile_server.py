"""The compile server: what is wanted first is compiled first, what fails is told, and it starts without torch."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Pipe
from pathlib import Path

import pytest

from quire.kernels.triton import compile_server
from quire.kernels.triton.compile_server import CompileServer
from quire.kernels.triton.variant import Variant

FOLDER = Path(compile_server.__file__).parent


def test_the_server_and_all_kernels_are_imported_without_torch():
    modules = ["compile_server", *(path.stem for path in FOLDER.glob("*_kernels.py"))]
    assert len(modules) > 15
    imports = "; ".join(f"import quire.kernels.triton.{name}" for name in modules)
    code = f"{imports}; import sys; sys.exit('torch' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_is_wanted_is_compiled_next_and_failures_are_told(tmp_path, monkeypatch):
    def compile_variant(variant, arch):
        while not (tmp_path / "go").exists():
            time.sleep(0.001)
        with (tmp_path / "order").open("a") as file:
            file.write(f"{variant.kernel} {arch}\n")
        if variant.kernel == "crash":
            os._exit(3)
        if variant.kernel == "wrong":
            raise ValueError("no such type")

    def serve():
        ours.close()
        CompileServer(theirs, 90, 1).serve()

    monkeypatch.setattr(compile_server, "compile_variant", compile_variant)
    ours, theirs = Pipe()
    server = get_context("fork").Process(target=serve)
    server.start()
    theirs.close()
    ours.send([Variant("quire.kernels.triton.sizes", name, (), (), ()) for name in ("first", "crash", "wrong", "wanted")])
    ours.send(3)
    ours.send(0)  # it is being compiled: nothing changes
    (tmp_path / "go").touch()
    found = [ours.recv() for _ in range(4)]
    ours.close()
    server.join(60)
    assert server.exitcode == 0
    assert (tmp_path / "order").read_text().split("\n") == ["first 90", "wanted 90", "crash 90", "wrong 90", ""]
    errors = {1: "crash: the process that compiled it ended with 3", 2: "wrong: ValueError: no such type"}
    assert found == [(index, errors.get(index)) for index in (0, 3, 1, 2)]


ORDERING = """
from quire.kernels.triton.compile_server import _SMALL
from quire.worker.device.precompile import compile_all
compile_all([_SMALL._replace(constants=(("WIDTH", 16 * i), ("BLOCK", 16), ("KIND", 0))) for i in range(1, 1000)], 90)
"""


def processes_of_group(group):
    """Return the ids of the processes that a terminal's interrupt of a group reaches."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError):
            found += [int(folder.name)] if os.getpgid(int(folder.name)) == group else []
    return found


@pytest.mark.slow
def test_an_interrupt_ends_what_is_compiled_without_errors_of_the_compiler(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", ORDERING]
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    ordering = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, process_group=0)
    while ordering.poll() is None and len(list(tmp_path.glob("*/*.cubin"))) < 5:
        time.sleep(0.01)
    reached = processes_of_group(ordering.pid)
    os.killpg(ordering.pid, signal.SIGINT)
    said = ordering.communicate(timeout=60)[1]  # until its server has ended, too, which has the same pipe
    assert reached == [ordering.pid]
    assert said.splitlines()[-1] == "KeyboardInterrupt"
    assert said.count("Traceback") == 1
    assert "ptxas" not in said
