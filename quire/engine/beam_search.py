"""Beam search on top of the engine: one token per step for every hypothesis; hypotheses share KV blocks by the prefix cache.

If a hypothesis's grammar forces tokens, one request computes the forced tokens and the log probabilities after each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from quire.base.errors import InvariantError, RequestError
from quire.base.ids import RequestId
from quire.base.logging import get_logger
from quire.contracts.constraint import GrammarMatcher
from quire.contracts.outputs import BeamSearchOutput, BeamSearchSequence, Logprob, RequestOutput
from quire.contracts.request import FinishReason, Request
from quire.contracts.sampling_params import BeamSearchParams, SamplingParams
from quire.engine.llm_engine import LLMEngine
from quire.engine.replica_engine import ReplicaEngine
from quire.grammar.matcher import ForkedGrammar
from quire.text.detokenizer import IncrementalDetokenizer

logger = get_logger(__name__)


class _TokenResult(NamedTuple):
    """A result for a hypothesis: the next token, and the log probabilities of all possible tokens."""

    token_id: int
    entries: Mapping[int, Logprob]


@dataclass(frozen=True, slots=True)
class _Beam:
    """A hypothesis: prompt and output, the log probability of the output, the state of its grammar, and the results for
    it and its forced continuation."""

    token_ids: tuple[int, ...]
    logprob: float = 0.0
    matcher: GrammarMatcher | None = None
    results: Sequence[_TokenResult] = ()

    def num_forced(self, most: int) -> int:
        """Return how many tokens its grammar forces next, at most `most`."""
        return 0 if self.matcher is None or most <= 0 else min(most, len(self.matcher.forced_tokens()))

    def with_token(self, token_id: int, logprob: float) -> _Beam:
        """Return the hypothesis with one more token and its log probability. Raises RequestError if its grammar gives up."""
        matcher = None if self.matcher is None else self.matcher.fork()
        error = None if matcher is None else matcher.advance(token_id)
        if matcher is not None and error is not None:
            if matcher.has_given_up:
                raise RequestError(error, "structured_outputs")
            raise InvariantError(f"a token of the mask does not fit: {error}")
        results = self.results[1:] if self.results and self.results[0].token_id == token_id else ()
        return _Beam((*self.token_ids, token_id), logprob, matcher, results)


@dataclass(slots=True)
class _Search:
    """The hypotheses of one prompt; those in `ended` have an end-of-sequence token or cannot continue, and compete again at
    the end."""

    request: Request
    live: list[_Beam]
    ended: list[_Beam] = field(default_factory=list)


class BeamSearch:
    """Searches the most likely continuations of prompts.

    engine  whose tokenizer and limits are used
    run     runs requests of one step and returns their last outputs in order
    """

    def __init__(
        self,
        engine: LLMEngine | ReplicaEngine,
        run: Callable[[list[Request]], list[RequestOutput]],
        params: BeamSearchParams,
    ) -> None:
        self._engine = engine
        self._run_steps = run
        self._params = params

    def run(self, requests: list[Request]) -> list[BeamSearchOutput]:
        """Search the continuations of all prompts and hypotheses in one batch.

        Every step keeps the beam_width best of all one-token extensions of a prompt's hypotheses (with a grammar, of those that
        it allows).
        """
        params = self._params
        max_model_len = self._engine.report.memory.max_model_len
        for request in requests:
            num_prompt = len(request.prompt_token_ids)
            if num_prompt + params.max_tokens > max_model_len:
                raise RequestError(
                    f"{num_prompt} prompt tokens and max_tokens {params.max_tokens} exceed the model's {max_model_len} tokens",
                    "max_tokens",
                )
        if not self._engine.config.enable_prefix_caching:
            logger.warning("beam search without prefix caching computes every hypothesis anew for every token")
        if self._engine.config.speculative_config is not None:
            logger.info("beam search only drafts tokens that constraints force, as hypotheses change after every token")
        searches = [_Search(request, [_first_beam(request)]) for request in requests]
        for num_left in range(params.max_tokens, 0, -1):
            if not any(search.live for search in searches):
                break
            self._extend(searches, num_left)
        return [self._conclude(search) for search in searches]

    def _extend(self, searches: list[_Search], num_left: int) -> None:
        """Extend every hypothesis by its best tokens and keep the best of each prompt. num_left: the remaining tokens."""
        params = self._params
        asked = [
            _next_steps(search, index, beam, params, 1 + beam.num_forced(num_left - 1))
            for search in searches
            for index, beam in enumerate(search.live)
            if not beam.results
        ]
        outputs = iter(self._run_steps(asked) if asked else ())
        for search in searches:
            eos = frozenset[int]() if params.ignore_eos else search.request.eos_token_ids
            extended: list[tuple[float, _Beam, int]] = []
            errors: list[RequestError] = []
            for known in search.live:
                beam = known
                if not known.results:
                    output = next(outputs)
                    beam = replace(known, results=_token_results(output))
                    if not beam.results:
                        if output.error is not None:
                            errors.append(RequestError(output.error, output.error_param or "prompt"))
                        continue
                for token_id, entry in beam.results[0].entries.items():
                    if token_id in eos:
                        search.ended.append(_Beam((*beam.token_ids, token_id), beam.logprob + entry.logprob))
                    else:
                        extended.append((beam.logprob + entry.logprob, beam, token_id))
            # A hypothesis without any allowed next token is dropped, as long as there is another one.
            if errors and (search.request.grammar is None or not (extended or search.ended)):
                raise errors[0]
            extended.sort(key=lambda candidate: -candidate[0])
            kept: list[_Beam] = []
            for total, beam, token_id in extended[: params.beam_width]:
                try:
                    kept.append(beam.with_token(token_id, total))
                except RequestError as error:
                    errors.append(error)
            if errors and not (kept or search.ended):
                raise errors[0]
            search.ended += [beam for beam in kept if _is_complete(beam)]
            search.live = [beam for beam in kept if not _is_complete(beam)]

    def _conclude(self, search: _Search) -> BeamSearchOutput:
        candidates = [self._describe(search.request, beam, "stop") for beam in search.ended]
        candidates += [self._describe(search.request, beam, "length") for beam in search.live]
        candidates.sort(key=lambda candidate: -candidate.score)
        return BeamSearchOutput(candidates[: self._params.beam_width])

    def _describe(self, request: Request, beam: _Beam, reason: FinishReason) -> BeamSearchSequence:
        output = list(beam.token_ids[len(request.prompt_token_ids) :])
        tokenizer = self._engine.tokenizer
        text = ""
        if tokenizer is not None:
            is_exact = request.params.constraint is not None
            detokenizer = IncrementalDetokenizer(tokenizer, after=request.prompt_token_ids, is_exact=is_exact)
            text = detokenizer.append(output) + detokenizer.finish()
        score = beam.logprob / len(output) ** self._params.length_penalty
        return BeamSearchSequence(list(beam.token_ids), beam.logprob, score, text, reason)


def _first_beam(request: Request) -> _Beam:
    return _Beam(request.prompt_token_ids, matcher=None if request.grammar is None else request.grammar.new_matcher())


def _token_results(output: RequestOutput) -> tuple[_TokenResult, ...]:
    """Return the results of a request, for all tokens before it ended or failed."""
    if not output.outputs:
        return ()
    found = output.outputs[0]
    return tuple(map(_TokenResult, found.token_ids, found.logprobs or ()))


def _next_steps(search: _Search, index: int, beam: _Beam, params: BeamSearchParams, count: int) -> Request:
    """Return a request for the best tokens after a hypothesis, and after its forced tokens; count tokens in total."""
    ending = () if beam.matcher is None or params.ignore_eos else tuple(sorted(search.request.eos_token_ids))
    step = SamplingParams(
        temperature=0.0,
        max_tokens=count,
        logprobs=2 * params.beam_width,
        ignore_eos=True,
        stop_token_ids=ending,
        detokenize=False,
    )
    return replace(
        search.request,
        request_id=RequestId(f"{search.request.request_id}-beam-{index}"),
        prompt_token_ids=beam.token_ids,
        params=step,
        grammar=None if beam.matcher is None else ForkedGrammar(beam.matcher),
        lists_allowed=True,
    )


def _is_complete(beam: _Beam) -> bool:
    return beam.matcher is not None and beam.matcher.is_complete
