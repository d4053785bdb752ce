"""POST /v1/score and /v1/rerank, with their other paths: scores of pairs of texts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.api.openai.answers import PromptUsage
from quire.api.openai.pooled_answers import Ranked, RankedDocument, Ranking, Score, Scores
from quire.api.openai.pooling import RerankRequest, ScoreRequest
from quire.contracts.pooling_params import PoolingParams
from quire.engine.scoring import cosine, encode_pair, make_pairs
from quire.serving.answers import Answer, Ready, Unary
from quire.serving.context import ServerContext
from quire.serving.core.caller import Caller
from quire.serving.core.prepare import need_tokenizer, renamed
from quire.serving.core.served_model import ServedModel
from quire.serving.endpoint import Call
from quire.serving.openai.frames import encode_json
from quire.serving.openai.handlers import caller_of
from quire.serving.openai.pooled import PooledRequests, count_tokens, pool_all


@dataclass(frozen=True, slots=True)
class _Texts:
    """Pairs of texts, and the fields of the first and second texts."""

    pairs: Sequence[tuple[str, str]]
    first_field: str
    second_field: str
    second_limit: int | None = None


async def post_score(context: ServerContext, call: Call) -> Answer:
    """Score pairs of texts."""
    context.check_accepting()
    return await score(context, await call.body(ScoreRequest), caller_of(call, is_streaming=False))


async def post_rerank(context: ServerContext, call: Call) -> Answer:
    """Order documents."""
    context.check_accepting()
    return await rerank(context, await call.body(RerankRequest), caller_of(call, is_streaming=False))


async def score(context: ServerContext, body: ScoreRequest, caller: Caller) -> Answer:
    """Return the answer to a request for scores. Raises ApiError and RequestError."""
    served = context.check_model(body.model)
    (first_field, first), (second_field, second) = body.pairs()
    texts = _Texts(make_pairs(first, second, first_field, second_field), first_field, second_field)
    scoring = await _prepare(context, body, caller, served, texts, "score-")

    async def work() -> Ready:
        data = [Score(index, "score", found) for index, found in enumerate(await scoring.run(context, caller))]
        return Ready(encode_json(Scores(scoring.id, "list", int(time.time()), served.name, data, scoring.usage)))

    return Unary(work)


async def rerank(context: ServerContext, body: RerankRequest, caller: Caller) -> Answer:
    """Return the answer to a rerank request. Raises ApiError and RequestError."""
    served = context.check_model(body.model)
    documents = body.texts()
    pairs = [(body.query, document) for document in documents]
    texts = _Texts(pairs, "query", "documents", body.max_tokens_per_doc)
    scoring = await _prepare(context, body, caller, served, texts, "rerank-")

    async def work() -> Ready:
        scores = await scoring.run(context, caller)
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
        shows = body.return_documents is not False
        results = [Ranked(index, scores[index], RankedDocument(documents[index]) if shows else None) for index in best]
        return Ready(encode_json(Ranking(scoring.id, served.name, scoring.usage, results)))

    return Unary(work)


@dataclass(frozen=True, slots=True)
class _Scoring:
    """The requests of the scores. `pairs` has the indexes of the two embeddings of each pair, None for a classifier."""

    requests: PooledRequests
    pairs: Sequence[tuple[int, int]] | None

    @property
    def id(self) -> str:
        return self.requests.id

    @property
    def usage(self) -> PromptUsage:
        num_tokens = count_tokens(self.requests.made)
        return PromptUsage(num_tokens, num_tokens)

    async def run(self, context: ServerContext, caller: Caller) -> list[float]:
        """Return the scores in order."""
        found = await pool_all(context.gateway, [caller.job(request, is_streaming=False) for request in self.requests.made])
        if self.pairs is None:
            return [scores[0] for scores in found]
        return [cosine(found[first], found[second]) for first, second in self.pairs]


async def _prepare(
    context: ServerContext, body: ScoreRequest | RerankRequest, caller: Caller, served: ServedModel, texts: _Texts, prefix: str
) -> _Scoring:
    params = PoolingParams(task="score", use_activation=body.use_activation, truncate_prompt_tokens=body.truncate_prompt_tokens)

    def make() -> _Scoring:
        if served.info.pooler.task == "embed":
            by_cosine = replace(params, task="embed", normalize=True)
            return _by_embeddings(PooledRequests(served, by_cosine, caller.owner, body.cache_salt, prefix), texts)
        served.info.pooler.resolve(params, served.info.hidden_size)  # checks that the model can score
        return _by_pairs(served, PooledRequests(served, params, caller.owner, body.cache_salt, prefix), texts)

    return await context.prepare(caller.owner, caller.call_id, body, make)


def _by_pairs(served: ServedModel, requests: PooledRequests, texts: _Texts) -> _Scoring:
    tokenizer = need_tokenizer(served)
    for first, second in texts.pairs:
        requests.check_length(len(first), texts.first_field)
        requests.check_length(len(second), texts.second_field)
        with renamed("prompt", texts.second_field):
            kept = _cut(served, second, texts.second_limit)
            requests.add_tokens(encode_pair(tokenizer, first, kept, requests.limit), texts.second_field)
    return _Scoring(requests, None)


def _by_embeddings(requests: PooledRequests, texts: _Texts) -> _Scoring:
    places: dict[tuple[str, str], int] = {}
    for pair in texts.pairs:
        for field, text in zip((texts.first_field, texts.second_field), pair, strict=True):
            if (field, text) not in places:
                places[field, text] = len(requests.made)
                requests.add(text, field)
    first, second = texts.first_field, texts.second_field
    return _Scoring(requests, [(places[first, one], places[second, other]) for one, other in texts.pairs])


def _cut(served: ServedModel, text: str, limit: int | None) -> str:
    """Return the beginning of a document with at most this many tokens."""
    if limit is None:
        return text
    tokenizer = need_tokenizer(served)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return text if len(token_ids) <= limit else tokenizer.decode(token_ids[:limit])
