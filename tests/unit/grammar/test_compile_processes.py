"""How the processes that compile constraints are kept, bounded and ended."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("llguidance")
from quire.base.errors import RequestError
from quire.base.sandbox_server import SandboxServerError
from quire.contracts.constraint import Constraint
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.errors import GrammarError
from quire.grammar.sandbox import SandboxedCompiler
from tests.ranks import command_lines_of_children, is_alive
from tests.unit.engine.held_masks import HeldCompiler
from tests.unit.grammar.byte_vocabulary import accepts, make_vocabulary
from tests.unit.grammar.test_compiler import compile_one

TEXTS = ("ab", "ba", "abb", "bba", "a0", '"a', " a", "yes", "no")
HANG = """
import time
from quire.grammar import sandbox_main
class Hang:
    def compile(self, constraint):
        if "hang" in constraint.source:
            time.sleep(600)
sandbox_main._COMPILERS["llguidance"] = lambda setup: Hang()
sandbox_main.main()
"""
SPIN = """
import itertools
from quire.grammar import sandbox_main
class Spin:
    def compile(self, constraint):
        if "spin" in constraint.source:
            [None for _ in itertools.count() if False]
sandbox_main._COMPILERS["llguidance"] = lambda setup: Spin()
sandbox_main.main()
"""
REST = """
import time
from quire.grammar import sandbox_main
class Rest:
    def compile(self, constraint):
        time.sleep(0.1 if "rest" in constraint.source else 0)
sandbox_main._COMPILERS["llguidance"] = lambda setup: Rest()
sandbox_main.main()
"""
HOARD = """
from quire.grammar import sandbox_main
class Hoard:
    def compile(self, constraint):
        held = []
        while constraint.source == "hoard":
            held.append(bytearray(1 << 24))
sandbox_main._COMPILERS["llguidance"] = lambda setup: Hoard()
sandbox_main.main()
"""
KILLED = """
import os, signal, time
from quire.grammar import sandbox_main
class Killed:
    def compile(self, constraint):
        marker, rest_s, whom = constraint.source.split(" ")
        time.sleep(float(rest_s))
        if not os.path.exists(marker):
            if whom != "always":
                open(marker, "w").close()
            if whom == "both":
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
sandbox_main._COMPILERS["llguidance"] = lambda setup: Killed()
sandbox_main.main()
"""
TOLD = """
from pathlib import Path
from quire.grammar import sandbox_main
class Told:
    def compile(self, constraint):
        raise sandbox_main.GrammarError("told: " + Path("/proc/self/oom_score_adj").read_text().strip())
sandbox_main._COMPILERS["llguidance"] = lambda setup: Told()
sandbox_main.main()
"""


@pytest.fixture(scope="module")
def vocabulary():
    return make_vocabulary(TEXTS, size=300)


@contextlib.contextmanager
def compiling(vocabulary, script, **limits):
    """A compiler whose processes run a script, and its sandbox."""
    sandbox = SandboxedCompiler((sys.executable, "-c", script), **limits)
    compiler = GrammarCompiler(lambda: vocabulary, sandbox)
    try:
        yield compiler, sandbox
    finally:
        compiler.close()


def test_process_is_killed_and_the_constraint_refused_when_compiling_does_not_end(vocabulary):
    with compiling(vocabulary, HANG, max_wall_s=1.0) as (compiler, sandbox):
        compile_one(compiler, "regex", "a")
        with pytest.raises(RequestError, match="takes more than"):
            compile_one(compiler, "regex", "hang")
        compile_one(compiler, "regex", "b")
        assert sandbox.num_killed == 1


def test_process_is_ended_by_the_system_when_compiling_computes_for_too_long(vocabulary):
    with compiling(vocabulary, SPIN, max_cpu_s=0.1, max_wall_s=600) as (compiler, sandbox):
        with pytest.raises(RequestError, match="takes more than"):
            compile_one(compiler, "regex", "spin")
        assert sandbox.num_killed == 1


@pytest.mark.slow
def test_constraint_is_refused_when_compiling_takes_too_much_memory(vocabulary):
    with compiling(vocabulary, HOARD, memory_bytes=1 << 30, max_cpu_s=60) as (compiler, _):
        with pytest.raises(RequestError, match="memory|MemoryError"):
            compile_one(compiler, "regex", "hoard")
        compile_one(compiler, "regex", "a")


@pytest.mark.covering
@pytest.mark.parametrize("whom", ["one", "both"])
@pytest.mark.parametrize("rest_s", [0, 0.1], ids=["quick", "slow"])
def test_constraint_is_compiled_when_it_comes_again_after_the_system_had_killed_its_process(vocabulary, tmp_path, rest_s, whom):
    """Alone, or with the one that had forked it, as where all that a container runs is killed."""
    source = f"{tmp_path / 'marker'} {rest_s} {whom}"
    with compiling(vocabulary, KILLED, max_wall_s=600, quick_s=0.05) as (compiler, sandbox):
        with pytest.raises(RequestError, match="the system has ended the process"):
            compile_one(compiler, "regex", source)
        assert accepts(compile_one(compiler, "regex", source), source.replace(".", "x"))
        assert sandbox.num_killed == 0


@pytest.mark.parametrize("rest_s", [0, 0.1], ids=["quick", "slow"])
def test_constraint_whose_processes_the_system_has_killed_again_and_again_is_refused_for_good(vocabulary, tmp_path, rest_s):
    """It may be the one that takes all memory; others are compiled all the while, and it does not come to a process again."""
    source, known = f"{tmp_path / 'marker'} {rest_s} always", f"{os.devnull} 0 one"
    with compiling(vocabulary, KILLED, max_wall_s=600, quick_s=0.05) as (compiler, sandbox):
        for _ in range(2):
            with pytest.raises(RequestError, match="try again"):
                compile_one(compiler, "regex", source)
            compile_one(compiler, "regex", known)
        for _ in range(2):
            with pytest.raises(RequestError, match="3 times.*make it simpler"):
                compile_one(compiler, "regex", source)
        assert sandbox.num_killed == 1


@pytest.mark.skipif(not Path("/proc/self/oom_score_adj").exists(), reason="the system does not say whom it would end first")
def test_process_that_compiles_is_the_first_that_the_system_ends_where_memory_does(vocabulary):
    with compiling(vocabulary, TOLD) as (compiler, _), pytest.raises(RequestError, match="told: 1000$"):
        compile_one(compiler, "regex", "a")


def test_limit_of_what_is_open_is_probed_too(vocabulary):
    """What a process compiles is what is compiled afterwards, with every option."""
    seen = []

    class Recorder(SandboxedCompiler):
        def probe(self, setup, constraint):
            seen.append(constraint)
            return super().probe(setup, constraint)

    compiler = GrammarCompiler(lambda: vocabulary, Recorder())
    nested = {"type": "array", "items": {"type": "array", "items": {"type": "array", "items": {"type": "string"}}}}
    try:
        grammar = compile_one(compiler, "json_schema", nested, max_open_length=2)
        assert accepts(grammar, '[[["aa"]]]')
        assert not accepts(grammar, '[[["aaa"]]]')
        assert len(seen) == 1
    finally:
        compiler.close()


def wait_until(is_so):
    end_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def group_of(server):
    """Return the numbers of a server's process and of those that it has forked."""
    return [server.pid, *command_lines_of_children(server.pid)]


def test_no_process_is_left_when_the_compiler_is_closed(vocabulary):
    sandbox = SandboxedCompiler((sys.executable, "-c", HANG), max_wall_s=600, quick_s=0.01)
    compiler = GrammarCompiler(lambda: vocabulary, sandbox)
    compile_one(compiler, "regex", "a")
    pending = [compiler.start(Constraint(kind="regex", source=f"hang{number}")) for number in range(5)]
    wait_until(lambda: sandbox.num_slow == 5)
    (server,) = sandbox.servers
    pids = group_of(server)
    assert len(pids) >= 6
    compiler.close()
    assert not any(map(is_alive, pids))
    for compilation in pending:
        with pytest.raises(RequestError, match="the engine has been closed"):
            compilation.result()
    with pytest.raises(RequestError, match="closed"):
        compiler.start(Constraint(kind="regex", source="b"))


def test_no_process_is_left_when_what_started_it_is_killed(vocabulary):
    """One that stands still could not see that its input has ended."""
    sandbox = SandboxedCompiler((sys.executable, "-c", HANG), max_wall_s=600, quick_s=0.01)
    compiler = GrammarCompiler(lambda: vocabulary, sandbox)
    for number in range(4):
        compiler.start(Constraint(kind="regex", source=f"hang{number}"))
    wait_until(lambda: sandbox.num_slow == 4)
    (server,) = sandbox.servers
    pids = group_of(server)
    server.control.shutdown(socket.SHUT_RDWR)  # as the system does for a process that has ended
    wait_until(lambda: not any(map(is_alive, pids)))
    compiler.close()


def test_server_that_was_ended_by_the_system_is_started_again(vocabulary):
    compiler = GrammarCompiler(lambda: vocabulary)
    try:
        compile_one(compiler, "regex", "a")
        (server,) = compiler.sandbox.servers
        pids = group_of(server)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, pids)))
        assert accepts(compile_one(compiler, "regex", "b"), "b")
    finally:
        compiler.close()


def test_constraint_whose_process_ended_with_a_closed_server_may_come_again(vocabulary):
    """Where another constraint finds first that the system has ended the one that forks."""
    with compiling(vocabulary, HANG, max_wall_s=600, quick_s=0.01) as (compiler, sandbox):
        pending = compiler.start(Constraint(kind="regex", source="hang"))
        wait_until(lambda: sandbox.num_slow == 1)
        (server,) = sandbox.servers
        server.close()
        with pytest.raises(RequestError, match="the system has ended the process"):
            pending.result()
        assert sandbox.num_killed == 0


def test_server_whose_reply_was_late_is_asked_no_more_and_another_begins(vocabulary):
    """Its reply would be taken for that to the next demand, and so on."""
    compiler = GrammarCompiler(lambda: vocabulary)
    try:
        compile_one(compiler, "regex", "a")
        (server,) = compiler.sandbox.servers
        server.control.settimeout(0.2)
        os.kill(server.pid, signal.SIGSTOP)
        with pytest.raises(SandboxServerError):
            server.fork()
        os.kill(server.pid, signal.SIGCONT)
        with pytest.raises(SandboxServerError, match="late"):
            server.fork()
        compiler.sandbox.idle.clear()
        assert accepts(compile_one(compiler, "regex", "b"), "b")
        assert server not in compiler.sandbox.servers
    finally:
        compiler.close()


def test_failure_that_is_no_fault_of_the_constraint_refuses_its_request_and_is_not_kept(vocabulary, monkeypatch):
    """An engine that cannot open a file must neither end nor refuse that constraint from then on."""
    sandbox = SandboxedCompiler()
    compiler = GrammarCompiler(lambda: vocabulary, sandbox)

    def fail_to_pair(*args):
        raise OSError(24, "Too many open files")

    def fail(*args):
        raise RuntimeError("odd")

    try:
        with monkeypatch.context() as patch:
            patch.setattr(socket, "socketpair", fail_to_pair)
            with pytest.raises(RequestError, match="Too many open files"):
                compile_one(compiler, "regex", "a")
        with monkeypatch.context() as patch:
            patch.setattr(SandboxedCompiler, "_give", fail)
            with pytest.raises(RequestError, match="RuntimeError: odd"):
                compile_one(compiler, "regex", "a")
        assert accepts(compile_one(compiler, "regex", "a"), "a")
    finally:
        compiler.close()


def test_slow_constraint_goes_on_when_its_process_may_not_be_made_nicer(vocabulary, monkeypatch):
    """An engine at a niceness above may not lower it."""

    def refuse(*args):
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    with compiling(vocabulary, REST, quick_s=0.01) as (compiler, _):
        assert accepts(compile_one(compiler, "regex", "rest"), "rest")


def test_constraint_is_ready_when_twenty_others_do_not_end(vocabulary):
    """Two go on, sixteen stand still, and three keep their places among the quick ones, of which there are four."""
    with compiling(vocabulary, HANG, max_wall_s=600, quick_s=0.01) as (compiler, _):
        pending = [compiler.start(Constraint(kind="regex", source=f"hang{number}")) for number in range(21)]
        assert accepts(compile_one(compiler, "regex", "a"), "a")
        assert not any(compilation.is_done for compilation in pending)


def test_constraint_that_is_slow_is_compiled_behind_those_that_are_quick(vocabulary):
    with compiling(vocabulary, REST, quick_s=0.01) as (compiler, _):
        slow = [compiler.start(Constraint(kind="regex", source=f"rest{number}")) for number in range(5)]
        assert accepts(compile_one(compiler, "regex", "a"), "a")
        for number, compilation in enumerate(slow):
            assert accepts(compilation.result(), f"rest{number}")
        wait_until(lambda: compiler.sandbox.num_slow == 0)


def test_process_that_was_being_started_ends_when_the_compiler_is_closed(monkeypatch):
    sandbox = SandboxedCompiler()
    begun = []

    def close_then_start(*args, **kwargs):
        closing.start()
        wait_until(lambda: sandbox.is_closed)
        begun.append(start(*args, **kwargs))
        return begun[0]

    closing = threading.Thread(target=sandbox.close)
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", close_then_start)
    with (
        pytest.raises(GrammarError, match="closed"),
        sandbox.probe(
            {"backend": "llguidance", "size": 300, "special": [], "spelled": []}, Constraint(kind="regex", source="a")
        ),
    ):
        pass
    closing.join()
    assert begun[0].poll() is not None


def test_constraint_compiles_in_a_process_whose_pipes_have_large_numbers(vocabulary):
    """A server with a thousand connections has such numbers, which select() refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip(f"only {hard} files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    with contextlib.ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            files.enter_context(open(os.devnull))
        compiler = GrammarCompiler(lambda: vocabulary)
        files.callback(compiler.close)
        assert accepts(compile_one(compiler, "regex", "ab"), "ab")


def test_constraint_is_ready_when_another_is_still_being_compiled(vocabulary):
    sandbox = HeldCompiler()
    compiler = GrammarCompiler(lambda: vocabulary, sandbox)
    try:
        slow = compiler.start(Constraint(kind="regex", source="slow"))
        assert accepts(compile_one(compiler, "regex", "quick"), "quick")
        assert not slow.is_done
        sandbox.go_on.set()
        assert accepts(slow.result(), "slow")
    finally:
        compiler.close()


def test_process_that_compiles_ends_quietly_when_nobody_listens_any_more():
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.close()
    setup = {"backend": "llguidance", "size": 300, "special": [], "spelled": []}
    with theirs:
        ended = subprocess.run(
            [sys.executable, "-m", "quire.grammar.sandbox_main", str(theirs.fileno())],
            input=json.dumps({"setup": setup, "limits": {}}).encode(),
            pass_fds=[theirs.fileno()],
            capture_output=True,
            timeout=60,
        )
    assert (ended.returncode, ended.stderr) == (0, b"")
