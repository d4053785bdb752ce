"""The compile server: what is wanted first is compiled first, what fails is told, and it starts without torch."""

import json
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
import sys
from pathlib import Path
from types import SimpleNamespace
from quire.kernels.triton.compile_server import _SMALL
from quire.worker.device.precompile import CompileJob, Precompilation

class Many(CompileJob):
    def model(self, parameters):
        return SimpleNamespace(kinds=list)

    def variants(self):
        return [_SMALL._replace(constants=(("WIDTH", 16 * i), ("BLOCK", 16), ("KIND", 0))) for i in range(1, 1000)]

while True:
    ahead = Precompilation(Many(Path(), None, None, False, None, None, 90, None), {})
    sys.stdin.readline()
    ahead.stop()
    print(ahead.wait(), flush=True)
    sys.stdin.readline()
"""


def processes_with(variable):
    """Return the ids of the processes that have a variable in their environment."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            found += [int(file.parent.name)] if variable.encode() in file.read_bytes().split(b"\0") else []
    return found


def wait_for_more(cubins, process, count=2):
    """Wait until a process has compiled more."""
    before = len(cubins())
    while process.poll() is None and len(cubins()) < before + count:
        time.sleep(0.01)


@pytest.mark.slow
def test_what_is_compiled_ends_with_its_engine_and_at_an_interrupt_without_errors_of_the_compiler(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    cache, temporary = tmp_path / "cache", tmp_path / "temporary"
    temporary.mkdir()
    environment |= {"TRITON_CACHE_DIR": str(cache), "TMPDIR": str(temporary)}
    command, pipe, variable = [sys.executable, "-c", ORDERING], subprocess.PIPE, f"TRITON_CACHE_DIR={cache}"
    ordering = subprocess.Popen(
        command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True, bufsize=1, process_group=0
    )

    def cubins():
        return list(cache.glob("*/*.cubin"))

    wait_for_more(cubins, ordering)
    ordering.stdin.write("\n")
    told, after_stop = ordering.stdout.readline(), processes_with(variable)
    ordering.stdin.write("\n")
    wait_for_more(cubins, ordering)
    with_server = processes_with(variable)
    os.killpg(ordering.pid, signal.SIGINT)
    said = ordering.communicate(timeout=60)[1]  # until its server has ended, too, which has the same pipe
    assert (told, after_stop) == ("False\n", [ordering.pid])
    assert len(with_server) > 2
    assert processes_with(variable) == []
    assert list(temporary.iterdir()) == []
    assert said.splitlines()[-1] == "KeyboardInterrupt"
    assert said.count("Traceback") == 1
    assert "ptxas" not in said
    groups = [json.loads(file.read_text())["child_paths"] for file in cache.glob("*/__grp__*.json")]
    assert len(groups) >= 4
    assert [path for group in groups for path in group.values() if not Path(path).stat().st_size] == []
