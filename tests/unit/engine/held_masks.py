"""Grammars that are compiled, or whose masks come, when a test lets them: what a slow grammar is, without a clock."""

import contextlib
import threading
from dataclasses import replace

from quire.grammar.errors import GrammarError
from quire.grammar.matcher import WrappingMatcher


class Gate:
    """Holds the threads that fill masks until they are let through, one mask each, or for good."""

    def __init__(self):
        self._news = threading.Condition()
        self._num_permits, self._is_open = 0, False
        self.num_held = 0
        self.violations = []

    def pass_through(self):
        with self._news:
            self.num_held += 1
            self._news.notify_all()
            self._news.wait_for(lambda: self._is_open or self._num_permits > 0)
            self._num_permits -= 0 if self._is_open else 1
            self.num_held -= 1
            self._news.notify_all()

    def let(self, count):
        with self._news:
            self._num_permits += count
            self._news.notify_all()

    def open(self):
        with self._news:
            self._is_open = True
            self._news.notify_all()

    def wait_until_held(self, count=1):
        with self._news:
            assert self._news.wait_for(lambda: self.num_held == count, 60)


class HeldGrammar:
    def __init__(self, grammar, gate):
        self._grammar, self._gate = grammar, gate

    def new_matcher(self):
        return HeldMatcher(self._grammar.new_matcher(), self._gate)


class HeldMatcher(WrappingMatcher):
    """Fills its masks after the gate opens, and records concurrent accesses."""

    first_mask_s = float("inf")

    def __init__(self, inner, gate):
        super().__init__(inner)
        self._gate, self._is_held = gate, False

    @property
    def source(self):
        return self

    def fill(self, matcher, words):
        assert matcher is self
        self._check("fill")
        self._is_held = True
        self._gate.pass_through()
        self._is_held = False
        return self.inner.source.fill(self.inner, words)

    def restrict(self, words):
        self.inner.restrict(words)

    def advance(self, token_id):
        self._check("advance")
        return self.inner.advance(token_id)

    def retreat(self, num_tokens):
        self._check("retreat")
        return self.inner.retreat(num_tokens)

    def num_fitting(self, token_ids):
        self._check("num_fitting")
        return super().num_fitting(token_ids)

    def forced_tokens(self):
        self._check("forced_tokens")
        return self.inner.forced_tokens()

    def fork(self):
        self._check("fork")
        return HeldMatcher(self.inner.fork(), self._gate)

    def _check(self, name):
        if self._is_held:
            self._gate.violations.append(name)


def submit(engine, name, prompt, params, gate=None):
    """Queue a request; with a gate its masks wait there."""
    request = engine.make_request(name, prompt, params)
    if gate is not None:
        request = replace(request, grammar=HeldGrammar(engine.start_compilation(request).result(), gate))
    engine.submit(request)


def run(engine, between=lambda: None, until=lambda outputs: False):
    """Step until all has ended, or `until` says so; return the last output of every request."""
    outputs = {}
    while engine.has_unfinished_requests() and not until(outputs):
        for output in engine.step():
            outputs[output.request_id] = output
        between()
    return outputs


def said(output):
    return [
        (choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason, choice.logprobs) for choice in output.outputs
    ]


class HeldCompiler:
    """Lets constraints with "slow" in them wait until it is told; refuses those with "wrong"."""

    def __init__(self):
        self.go_on = threading.Event()

    @contextlib.contextmanager
    def probe(self, setup, constraint):
        if "slow" in constraint.source:
            self.go_on.wait()
        if "wrong" in constraint.source:
            raise GrammarError("it is wrong", "/here")
        yield {}

    def close(self):
        self.go_on.set()
