"""GrammarCompiler: compiles constraints in the background of the engine's steps, each one once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass

from quire.base.errors import RequestError, UnsupportedError
from quire.base.logging import get_logger
from quire.contracts.constraint import Constraint, Grammar
from quire.grammar.bad_words import BannedGrammar, BannedPhrases, TokenIndex, can_continue, without_bad_words
from quire.grammar.errors import GrammarError, PassingError
from quire.grammar.free_text import FreeGrammar
from quire.grammar.length_bounded import LengthBoundedGrammar
from quire.grammar.matcher import Backend
from quire.grammar.reasoning_prefix import ReasoningPrefix, text_before
from quire.grammar.sandbox import SandboxedCompiler
from quire.grammar.schema_faults import NOTHING_MATCHES
from quire.grammar.shortest_completion import ShortestCompletions
from quire.grammar.special_tokens import SpecialTexts
from quire.grammar.spelling_check import check_places, check_texts
from quire.grammar.string_forms import NO_FORMS, StringForms, string_forms_of
from quire.grammar.vocabulary import Vocabulary

logger = get_logger(__name__)

_NUM_THREADS = 64
"""Most threads wait for a place in the SandboxedCompiler, which limits how many compile."""
_MAX_CACHED = 256


@dataclass(frozen=True, slots=True)
class GrammarKey:
    """The key of a compiled grammar: a constraint, banned phrases, or both."""

    constraint: Constraint | None
    bad_words: tuple[str, ...] = ()

    @property
    def text_before(self) -> ReasoningPrefix | None:
        """The text before the JSON of an output, None if the output is anything else than JSON after such a text."""
        if self.constraint is None or self.constraint.kind not in ("json_schema", "json_object", "structural_tag"):
            return None
        return text_before(self.constraint.source) if self.constraint.kind == "structural_tag" else ReasoningPrefix()

    @property
    def string_forms(self) -> StringForms:
        """The string constraints of the schemas."""
        return NO_FORMS if self.constraint is None else string_forms_of(self.constraint.kind, self.constraint.source)

    def explain(self, error: GrammarError) -> RequestError:
        """Return the error for a request with this key."""
        if self.constraint is None:
            return RequestError(f"bad_words: {error}", "bad_words")
        return error.for_request(self.constraint)


@dataclass(frozen=True, slots=True)
class GrammarContext:
    """Properties of the request that a grammar depends on.

    prompt_token_ids  the prompt, in which a banned phrase may begin
    max_tokens        within which JSON is completed; None: it may be truncated
    """

    prompt_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None


class Compilation:
    """A grammar that is being compiled, or has been."""

    def __init__(self, future: Future[Grammar], demand: GrammarKey, finish: Callable[[Grammar], Grammar]) -> None:
        self._future = future
        self._demand = demand
        self._finish = finish

    @property
    def is_done(self) -> bool:
        """Whether `result` returns at once."""
        return self._future.done()

    @property
    def has_failed(self) -> bool:
        """Whether the available result is an error."""
        return self._future.cancelled() or self._future.exception() is not None

    def result(self) -> Grammar:
        """Return the grammar, waiting for it. Raises RequestError, naming the constraint's field, if it cannot be compiled."""
        try:
            return self._finish(self._future.result())
        except GrammarError as error:
            raise self._demand.explain(error) from None
        except CancelledError:
            raise self._demand.explain(GrammarError("the engine has been closed")) from None

    def notify(self, call: Callable[[], None]) -> None:
        """Call a function when it is done, from some thread; at once if it is done already."""
        self._future.add_done_callback(lambda _: call())


class GrammarCompiler:
    """Compiles in its own threads; recent results are cached, including errors. Thread-safe.

    read_vocabulary  creates the vocabulary when it is first needed; it may raise RequestError
    sandbox           for tests
    """

    def __init__(
        self, read_vocabulary: Callable[[], Vocabulary], sandbox: SandboxedCompiler | None = None, max_cached: int = _MAX_CACHED
    ) -> None:
        self.read_vocabulary = read_vocabulary
        self.sandbox = SandboxedCompiler() if sandbox is None else sandbox
        self._max_cached = max_cached
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="quire-grammar")
        self._lock = threading.Lock()
        self._found: OrderedDict[GrammarKey, Future[Grammar]] = OrderedDict()
        self._making = {name: threading.Lock() for name in ("vocabulary", "index", "endings", "llguidance", "xgrammar")}
        self._backends: dict[str, Backend] = {}
        self._vocabulary: Vocabulary | None = None
        self._index: TokenIndex | None = None
        self._endings: ShortestCompletions | None = None
        self._is_closed = False
        self.num_compiled = 0
        self.num_sent_on = 0  # schemas that llguidance refused and xgrammar compiled

    def start(
        self, constraint: Constraint | None, bad_words: tuple[str, ...] = (), use: GrammarContext | None = None
    ) -> Compilation:
        """Begin to compile, unless the result is cached. Raises RequestError after `close`."""
        demand = GrammarKey(constraint, bad_words)
        with self._lock:
            future = self._found.get(demand)
            is_new = future is None
            if future is None:
                if self._is_closed:
                    raise demand.explain(GrammarError("the engine has been closed"))
                try:
                    future = self._threads.submit(self._compile, demand)
                except RuntimeError as error:  # the system has no thread for it
                    raise demand.explain(PassingError(f"it could not be compiled: {error}: try again")) from None
                self._found[demand] = future
                if len(self._found) > self._max_cached:
                    self._found.popitem(last=False)
            else:
                self._found.move_to_end(demand)
        if is_new:  # outside of the lock: it may be called at once
            future.add_done_callback(lambda done: self._forget_passing(demand, done))
        return Compilation(
            future, demand, lambda grammar: self._finish(grammar, demand, GrammarContext() if use is None else use)
        )

    def _forget_passing(self, demand: GrammarKey, future: Future[Grammar]) -> None:
        if not future.cancelled() and isinstance(future.exception(), PassingError):
            with self._lock:
                if self._found.get(demand) is future:
                    del self._found[demand]

    def _finish(self, grammar: Grammar, demand: GrammarKey, use: GrammarContext) -> Grammar:
        """Return the grammar for a request."""
        if isinstance(grammar, BannedGrammar) and use.prompt_token_ids:
            grammar = grammar.after_prompt(use.prompt_token_ids)
        text = None if use.max_tokens is None else demand.text_before
        if text is not None and use.max_tokens is not None:
            endings = self.shortest_completions().behind(text, demand.string_forms)
            grammar = LengthBoundedGrammar(grammar, endings, use.max_tokens)
        return grammar

    def warm(self) -> None:
        """Read the vocabulary and start a process now. Does nothing without llguidance; requests then get an error."""
        try:
            self._get_backend("llguidance")
        except (UnsupportedError, GrammarError, RequestError) as error:
            logger.info("constraints on outputs are not available: %s", error)
            return
        try:
            self.start(Constraint(kind="json_object")).result()
        except RequestError as error:
            if not self._is_closed:  # an engine with little work may be closed already
                logger.warning("constraints on outputs cannot be compiled: %s", error)

    def close(self) -> None:
        """Stop the threads and processes; running compilations fail."""
        with self._lock:
            self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.sandbox.close()
        self._threads.shutdown()
        for backend in self._backends.values():
            backend.close()

    def _compile(self, demand: GrammarKey) -> Grammar:
        try:
            if demand.constraint is None:
                grammar: Grammar = FreeGrammar(self._get_vocabulary())
            else:
                grammar = self._compile_without(demand.constraint, demand.bad_words)
            if demand.bad_words:
                grammar = BannedGrammar(grammar, self._ban(demand.bad_words))
            if demand.text_before is not None:
                self.shortest_completions()  # slow the first time, like the next line
                _ = demand.string_forms
        except GrammarError:
            raise
        except (UnsupportedError, RequestError) as error:
            raise GrammarError(str(error)) from None
        except Exception as error:
            logger.exception("a constraint could not be compiled")
            raise PassingError(f"it could not be compiled: {type(error).__name__}: {error}") from None
        with self._lock:
            self.num_compiled += 1
        return grammar

    def _compile_without(self, constraint: Constraint, bad_words: tuple[str, ...]) -> Grammar:
        """Compile without banned texts, which would be dead ends."""
        left = without_bad_words(constraint, _phrases_of(bad_words)) if bad_words else constraint
        if left is constraint:
            return self._compile_constraint(constraint)
        is_for_other = constraint.backend == "xgrammar" != left.backend  # only to check that something is left
        try:
            grammar = self._compile_constraint(left)
            is_kept = not is_for_other and (left.kind == "choice" or can_continue(grammar))  # expressions have more states
            return grammar if is_kept else self._compile_constraint(constraint)
        except PassingError:
            raise
        except UnsupportedError:
            if not is_for_other:
                raise
            return self._compile_constraint(constraint)
        except GrammarError as error:
            grammar = self._compile_constraint(constraint)
            if NOTHING_MATCHES in str(error):
                raise GrammarError(f"bad_words leave nothing of it: {error}") from None
            return grammar

    def _compile_constraint(self, constraint: Constraint) -> Grammar:
        """Compile a constraint and check that the tokens can spell it. Raises GrammarError."""
        vocabulary = self._get_vocabulary()
        check_texts(constraint, vocabulary)
        grammar = self._compile_by_backend(constraint)
        check_places(grammar, vocabulary)
        return grammar

    def _compile_by_backend(self, constraint: Constraint) -> Grammar:
        """Compile with the requested backend; schemas that llguidance refuses are compiled by xgrammar, if it can."""
        if constraint.backend == "xgrammar":
            return self._get_backend("xgrammar").compile(constraint)
        try:
            return self._get_backend("llguidance").compile(constraint)
        except GrammarError as error:
            if constraint.backend != "auto" or not _enforces(constraint, self._get_vocabulary()):
                raise
            try:
                grammar = self._get_backend("xgrammar").compile(constraint)
            except (GrammarError, UnsupportedError) as other:
                logger.debug("xgrammar has not compiled a schema that llguidance refuses: %s", other)
                raise error from None
        with self._lock:
            self.num_sent_on += 1
        return grammar

    def _ban(self, words: tuple[str, ...]) -> BannedPhrases:
        vocabulary = self._get_vocabulary()
        with self._making["index"]:
            if self._index is None:
                self._index = TokenIndex(vocabulary)
        return BannedPhrases(_phrases_of(words), vocabulary, self._index)

    def shortest_completions(self) -> ShortestCompletions:
        """Return the shortest endings of texts in the vocabulary; the first call takes seconds."""
        if self._endings is None:  # the stepping thread only asks after it was created, and never waits
            vocabulary = self._get_vocabulary()
            with self._making["endings"]:
                if self._endings is None:
                    self._endings = ShortestCompletions(vocabulary)
        return self._endings

    def _get_vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            with self._making["vocabulary"]:
                if self._vocabulary is None:
                    self._vocabulary = self.read_vocabulary()
        return self._vocabulary

    def _get_backend(self, name: str) -> Backend:
        vocabulary = self._get_vocabulary()
        with self._making[name]:
            if name not in self._backends:
                try:
                    self._backends[name] = _make_backend(name, vocabulary, self.sandbox)
                except ImportError as error:
                    raise UnsupportedError(
                        f"the backend {name!r} of constraints is not installed ({error}): pip install 'quire[grammar]' "
                        "for llguidance, 'quire[xgrammar]' for the other one"
                    ) from None
            return self._backends[name]


def _phrases_of(words: tuple[str, ...]) -> list[str]:
    """Return the banned phrases: words are also banned without a leading space."""
    return [word.lstrip() or word for word in words]


def _enforces(constraint: Constraint, vocabulary: Vocabulary) -> bool:
    """Return whether xgrammar enforces all of a schema, or of a structural tag with schemas."""
    from quire.grammar.xgrammar_backend import check_for_xgrammar

    if constraint.kind not in ("json_schema", "structural_tag"):
        return False
    try:
        check_for_xgrammar(constraint, SpecialTexts.of(vocabulary))
    except GrammarError:
        return False
    return True


def _make_backend(name: str, vocabulary: Vocabulary, sandbox: SandboxedCompiler) -> Backend:
    if name == "xgrammar":
        from quire.grammar.xgrammar_backend import XgrammarBackend

        return XgrammarBackend(vocabulary, sandbox)
    from quire.grammar.llguidance_backend import LlguidanceBackend

    return LlguidanceBackend(vocabulary, sandbox)
