"""The compile server: what is wanted first is compiled first, what fails is told, and it starts without torch."""

import os
import signal
import subprocess
import sys
import time
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


@pytest.mark.slow
def test_an_interrupt_of_the_terminal_is_left_to_the_parent(tmp_path):
    """The server compiles on, and says nothing, until its connection ends."""
    ours, theirs = Pipe()
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "quire.kernels.triton.compile_server", str(theirs.fileno()), "90"]
    server = subprocess.Popen(command, env=environment, pass_fds=(theirs.fileno(),), stderr=subprocess.PIPE, process_group=0)
    theirs.close()
    small = compile_server._SMALL
    ours.send([small])
    assert ours.recv() == (0, None)
    os.killpg(server.pid, signal.SIGINT)
    ours.send([small._replace(constants=(*small.constants[:-1], ("KIND", 1)))])
    assert ours.recv() == (1, None)
    ours.close()
    assert (server.communicate()[1], server.returncode) == (b"", 0)
