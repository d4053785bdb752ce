"""Beam search on top of the engine: one token a step for every hypothesis, which share their KV by the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from quire.base.errors import InvariantError, RequestError
from quire.base.ids import RequestId
from quire.base.logging import get_logger
from quire.contracts.constraint import GrammarMatcher
from quire.contracts.outputs import BeamSearchOutput, BeamSearchSequence
from quire.contracts.request import FinishReason, Request
from quire.contracts.sampling_params import BeamSearchParams, SamplingParams
from quire.grammar.matcher import ForkedGrammar

if TYPE_CHECKING:
    from quire.engine.llm import LLM

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Beam:
    """A hypothesis: prompt and output, the log probability of the output, and where it stands in its grammar."""

    token_ids: tuple[int, ...]
    logprob: float = 0.0
    matcher: GrammarMatcher | None = None

    def with_token(self, token_id: int, logprob: float) -> _Beam:
        """Return the hypothesis with one more token, and all of its log probability."""
        matcher = None if self.matcher is None else self.matcher.fork()
        error = None if matcher is None else matcher.advance(token_id)
        if error is not None:
            raise InvariantError(f"a token of the mask does not fit: {error}")
        return _Beam((*self.token_ids, token_id), logprob, matcher)


@dataclass(slots=True)
class _Search:
    """The hypotheses of one prompt; those in `ended` have an end-of-sequence token, or nothing can follow, and compete again at
    the end."""

    request: Request
    live: list[_Beam]
    ended: list[_Beam] = field(default_factory=list)


def search_beams(llm: LLM, requests: list[Request], params: BeamSearchParams) -> list[BeamSearchOutput]:
    """Search the most likely continuations of every prompt, all prompts and hypotheses in one batch.

    Every step takes, of all one-token extensions of a prompt's hypotheses, the beam_width best; of those that fit, where the
    requests have a grammar.
    """
    max_model_len = llm.llm_engine.report.memory.max_model_len
    for request in requests:
        num_prompt = len(request.prompt_token_ids)
        if num_prompt + params.max_tokens > max_model_len:
            raise RequestError(
                f"{num_prompt} prompt tokens and max_tokens {params.max_tokens} exceed the model's {max_model_len} tokens",
                "max_tokens",
            )
    if not llm.llm_engine.config.enable_prefix_caching:
        logger.warning("beam search without prefix caching computes every hypothesis anew for every token")
    searches = [
        _Search(
            request, [_Beam(request.prompt_token_ids, 0.0, None if request.grammar is None else request.grammar.new_matcher())]
        )
        for request in requests
    ]
    for _ in range(params.max_tokens):
        if not any(search.live for search in searches):
            break
        _extend(llm, searches, params)
    return [_conclude(llm, search, params) for search in searches]


def _extend(llm: LLM, searches: list[_Search], params: BeamSearchParams) -> None:
    """Grow every live hypothesis by its best tokens and keep the best of each prompt."""
    grown = [_one_step(search, index, beam, params) for search in searches for index, beam in enumerate(search.live)]
    outputs = iter(llm.run(grown, use_tqdm=False))
    for search in searches:
        eos = frozenset[int]() if params.ignore_eos else search.request.eos_token_ids
        extended: list[tuple[float, _Beam, int]] = []
        errors: list[str] = []
        for beam in search.live:
            output = next(outputs)
            if output.error is not None:
                errors.append(output.error)
                continue
            for token_id, entry in (output.outputs[0].logprobs or [{}])[0].items():
                if token_id in eos:
                    search.ended.append(_Beam((*beam.token_ids, token_id), beam.logprob + entry.logprob))
                else:
                    extended.append((beam.logprob + entry.logprob, beam, token_id))
        # A hypothesis that no token of its grammar can follow is given up, as long as there is another.
        if errors and (search.request.grammar is None or not (extended or search.ended)):
            raise RequestError(errors[0], "prompt")
        extended.sort(key=lambda candidate: -candidate[0])
        kept = [beam.with_token(token_id, total) for total, beam, token_id in extended[: params.beam_width]]
        search.ended += [beam for beam in kept if _is_complete(beam)]
        search.live = [beam for beam in kept if not _is_complete(beam)]


def _one_step(search: _Search, index: int, beam: _Beam, params: BeamSearchParams) -> Request:
    """Return a request for the best tokens behind a hypothesis."""
    ending = () if beam.matcher is None or params.ignore_eos else tuple(sorted(search.request.eos_token_ids))
    step = SamplingParams(
        temperature=0.0,
        max_tokens=1,
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


def _conclude(llm: LLM, search: _Search, params: BeamSearchParams) -> BeamSearchOutput:
    candidates = [_describe(llm, search.request, beam, params, "stop") for beam in search.ended]
    candidates += [_describe(llm, search.request, beam, params, "length") for beam in search.live]
    candidates.sort(key=lambda candidate: -candidate.score)
    return BeamSearchOutput(candidates[: params.beam_width])


def _describe(llm: LLM, request: Request, beam: _Beam, params: BeamSearchParams, reason: FinishReason) -> BeamSearchSequence:
    output = list(beam.token_ids[len(request.prompt_token_ids) :])
    tokenizer = llm.llm_engine.tokenizer
    text = "" if tokenizer is None else tokenizer.decode(output)
    score = beam.logprob / len(output) ** params.length_penalty
    return BeamSearchSequence(list(beam.token_ids), beam.logprob, score, text, reason)
