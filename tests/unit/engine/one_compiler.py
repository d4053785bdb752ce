"""One compiler of constraints for engines of one vocabulary: the process of each would import everything anew."""

import contextlib

import pytest

from quire.engine import llm_engine
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.sandbox import SandboxedCompiler


@contextlib.contextmanager
def one_compiler():
    """Let the engines that are made meanwhile share a compiler, which their ends leave alone."""
    made: list[GrammarCompiler] = []

    class Shared:
        def __init__(self, vocabulary):
            if not made:
                made.append(GrammarCompiler(vocabulary, SandboxedCompiler(max_cpu_s=30.0, max_wall_s=60.0)))
            self.start = made[0].start

        def close(self):
            """The others go on with it."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm_engine, "GrammarCompiler", Shared)
        yield
    for compiler in made:
        compiler.close()
