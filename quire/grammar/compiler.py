"""GrammarCompiler: compiles constraints beside the engine's steps, each one once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

from quire.base.errors import RequestError, UnsupportedError
from quire.base.logging import get_logger
from quire.contracts.constraint import Constraint, Grammar
from quire.grammar.errors import GrammarError
from quire.grammar.matcher import Backend
from quire.grammar.probing import Prober
from quire.grammar.vocabulary import Vocabulary

logger = get_logger(__name__)

_NUM_THREADS = 4
_MAX_CACHED = 256


class Compilation:
    """A constraint that is being compiled, or has been."""

    def __init__(self, future: Future[Grammar], constraint: Constraint) -> None:
        self._future = future
        self._constraint = constraint

    @property
    def is_done(self) -> bool:
        """Whether result returns at once."""
        return self._future.done()

    def result(self) -> Grammar:
        """Return the grammar, when it is there. Raises RequestError, naming the constraint's field, where there is none."""
        try:
            return self._future.result()
        except GrammarError as error:
            raise error.for_request(self._constraint) from None
        except CancelledError:
            raise RequestError("the engine has been closed", self._constraint.param) from None

    def notify(self, call: Callable[[], None]) -> None:
        """Have something called when it is done, from some thread; at once where it is."""
        self._future.add_done_callback(lambda _: call())


class GrammarCompiler:
    """Compiles in threads of its own; what was compiled lately, refusals too, is kept. Thread-safe.

    read_vocabulary  makes the vocabulary when it is first needed; it may raise RequestError
    prober           for tests
    """

    def __init__(
        self, read_vocabulary: Callable[[], Vocabulary], prober: Prober | None = None, max_cached: int = _MAX_CACHED
    ) -> None:
        self._read_vocabulary = read_vocabulary
        self.prober = Prober() if prober is None else prober
        self._max_cached = max_cached
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="quire-grammar")
        self._lock = threading.Lock()
        self._found: OrderedDict[Constraint, Future[Grammar]] = OrderedDict()
        self._backend_lock = threading.Lock()
        self._backends: dict[str, Backend] = {}
        self._is_closed = False
        self.num_compiled = 0

    def start(self, constraint: Constraint) -> Compilation:
        """Begin to compile, unless that was done before. Raises RequestError after `close`."""
        with self._lock:
            future = self._found.get(constraint)
            if future is None:
                if self._is_closed:
                    raise RequestError("the engine has been closed", constraint.param)
                future = self._threads.submit(self._compile, constraint)
                self._found[constraint] = future
                if len(self._found) > self._max_cached:
                    self._found.popitem(last=False)
            else:
                self._found.move_to_end(constraint)
        return Compilation(future, constraint)

    def warm(self) -> None:
        """Read the vocabulary and start a process now. Without llguidance nothing happens: requests are then told."""
        try:
            self._get_backend("llguidance")
        except (UnsupportedError, GrammarError, RequestError) as error:
            logger.info("constraints on outputs are not available: %s", error)
            return
        try:
            self.start(Constraint(kind="json_object")).result()
        except RequestError as error:
            logger.warning("constraints on outputs cannot be compiled: %s", error)

    def close(self) -> None:
        """End the threads and processes; what is being compiled fails."""
        with self._lock:
            self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.prober.close()
        self._threads.shutdown()
        for backend in self._backends.values():
            backend.close()

    def _compile(self, constraint: Constraint) -> Grammar:
        try:
            grammar = self._get_backend("xgrammar" if constraint.backend == "xgrammar" else "llguidance").compile(constraint)
        except (UnsupportedError, RequestError) as error:
            raise GrammarError(str(error)) from None
        with self._lock:
            self.num_compiled += 1
        return grammar

    def _get_backend(self, name: str) -> Backend:
        with self._backend_lock:
            if name not in self._backends:
                try:
                    self._backends[name] = _make_backend(name, self._read_vocabulary(), self.prober)
                except ImportError as error:
                    raise UnsupportedError(
                        f"the backend {name!r} of constraints is not installed ({error}): pip install 'quire[grammar]' "
                        "for llguidance, xgrammar for the other one"
                    ) from None
            return self._backends[name]


def _make_backend(name: str, vocabulary: Vocabulary, prober: Prober) -> Backend:
    if name == "xgrammar":
        from quire.grammar.xgrammar_backend import XgrammarBackend

        return XgrammarBackend(vocabulary, prober)
    from quire.grammar.llguidance_backend import LlguidanceBackend

    return LlguidanceBackend(vocabulary, prober)
