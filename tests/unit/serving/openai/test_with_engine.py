"""The handlers over a real engine in this process: what its deltas add up to, token by token."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest

from quire.api.decode import decode_body
from quire.api.openai.completions import CompletionRequest
from quire.base.errors import RequestError
from quire.engine.llm_engine import LLMEngine
from quire.serving.config import ServerConfig
from quire.serving.core.served_model import load_served_model
from quire.serving.engine_client.deltas import DeltaWriter
from quire.serving.engine_client.engine_info import describe_engine
from quire.serving.errors import ApiError
from quire.serving.interfaces import Sink
from quire.serving.openai.completions import complete
from quire.serving.request_queue.stream import error_of
from tests.unit.serving.fakes import DEMO, make_context
from tests.unit.serving.openai.asking import CALLER, ask_completion, chunks_of, fix


@dataclass
class EngineStream:
    """Steps the engine whenever a delta is awaited."""

    engine: LLMEngine
    request_id: str
    waiting: dict[str, list]
    writer: DeltaWriter = field(default_factory=DeltaWriter)
    take: Sink | None = None

    def abort(self, reason):
        self.engine.abort_request(self.request_id)

    def attach_sink(self, take):
        self.take = take

    def __aiter__(self):
        return self

    async def __anext__(self):
        mine = self.waiting[self.request_id]
        while True:
            while not mine:
                for output in self.engine.step():
                    self.waiting[output.request_id].append(self.writer.write(output))
            delta = mine.pop(0)
            if (error := error_of(delta)) is not None:
                raise error
            if delta.finished or self.take is None or not self.take(delta):
                return delta

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        self.abort("cancelled")


@dataclass
class EngineGateway:
    """A Gateway without a queue."""

    engine: LLMEngine
    waiting: dict[str, list] = field(default_factory=dict)

    def holding(self, owner, call_id):
        return nullcontext()

    def open(self, job):
        request_id = job.request.request_id
        self.waiting[request_id] = []
        self.engine.submit(job.request, "delta")
        stream = EngineStream(self.engine, request_id, self.waiting)
        stream.writer.begin(request_id)
        return stream


def serve(**options):
    engine = LLMEngine(str(DEMO), max_model_len=256, max_num_seqs=8, **options)
    served = load_served_model(describe_engine(engine, 0.0), ServerConfig())
    yield make_context(EngineGateway(engine), served)
    engine.close()


@pytest.fixture(scope="module")
def context():
    yield from serve()


@pytest.fixture(scope="module", params=["demo-eagle3", pytest.param("demo-draft", marks=pytest.mark.slow)])
def drafting(request):
    yield from serve(speculative_config={"model": request.param, "num_speculative_tokens": 4, "adaptive": False})


def add_up(chunks):
    texts, tokens = {}, {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice.get("text", "")
            for entries in [choice["logprobs"]] if choice["logprobs"] else []:
                tokens.setdefault(choice["index"], []).extend(entries["tokens"])
                assert "".join(entries["tokens"]) == choice["text"]
    return texts, tokens


@pytest.mark.parametrize("is_streaming", [True, False])
def test_logprobs_spell_the_text_when_a_stop_string_cuts_it(context, is_streaming):
    body = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0, "logprobs": 1}
    full = json.loads(ask_completion(context, **body))["choices"][0]["text"]
    stop = full[21:25]
    cut = full[: full.index(stop)]
    data = ask_completion(context, stop=stop, stream=is_streaming, **body)
    if is_streaming:
        texts, tokens = {0: ""}, {0: []}
        for chunk in chunks_of(data):
            choice = chunk["choices"][0]
            texts[0] += choice["text"]
            tokens[0] += choice["logprobs"]["tokens"] if choice["logprobs"] else []
            assert texts[0].startswith("".join(tokens[0])[: len(texts[0])])
        text, joined = texts[0], "".join(tokens[0])
    else:
        (choice,) = json.loads(data)["choices"]
        text, joined = choice["text"], "".join(choice["logprobs"]["tokens"])
        assert choice["stop_reason"] == stop
    assert text == cut
    assert joined.startswith(text)
    assert len(joined) - len(text) < len(stop) + 12


def test_prompt_is_scored_as_it_was_generated(context):
    body = {"max_tokens": 12, "temperature": 0, "logprobs": 1, "return_token_ids": True}
    made = json.loads(ask_completion(context, prompt="Once upon a time", **body))["choices"][0]
    ids = made["prompt_token_ids"] + made["token_ids"]
    scored = json.loads(ask_completion(context, prompt=ids, max_tokens=0, echo=True, logprobs=1))
    (choice,) = scored["choices"]
    assert choice["text"] == "Once upon a time" + made["text"]
    start = len(made["prompt_token_ids"])
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][start:] == pytest.approx(made["logprobs"]["token_logprobs"], abs=1e-4)
    assert choice["logprobs"]["text_offset"][start:] == [len("Once upon a time") + at for at in made["logprobs"]["text_offset"]]
    for top, logprob in zip(
        choice["logprobs"]["top_logprobs"][start:], choice["logprobs"]["token_logprobs"][start:], strict=True
    ):
        assert max(top.values()) == logprob  # greedy: what an evaluation looks at
    assert scored["usage"]["completion_tokens"] == 0


GREEDY = {"prompt": "Once upon a time", "temperature": 0, "return_token_ids": True}


def answer_of(context, **body):
    """Return an answer, and the parts of its stream, which have to add up to it."""
    whole = json.loads(fix(ask_completion(context, **body)))
    chunks = chunks_of(ask_completion(context, stream=True, stream_options={"include_usage": True}, **body))
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    for choice in whole["choices"]:
        own = [part for part in parts if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert [token for part in own for token in part["token_ids"]] == choice["token_ids"]
        assert [part["finish_reason"] for part in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]
    assert chunks[-1]["usage"] == whole["usage"]
    return whole, parts


def test_stop_strings_end_an_answer_within_a_draft_and_between_two_as_without_drafts(context, drafting):
    _, steps = answer_of(drafting, max_tokens=60, **GREEDY)
    full, stops, end = "".join(step["text"] for step in steps), {"within": [], "between": []}, 0
    for step in steps[:-1]:
        start, end = end, end + len(step["text"])
        if len(step["token_ids"]) > 2 and end - start > 5:
            stops["within"].append(full[start : end - 2])
        stops["between"].append(full[end - 3 : end + 3])
    for kind in stops.values():
        chosen = [stop for stop in kind if full.count(stop) == 1][:3]
        assert chosen
        for stop in chosen:
            expected, _ = answer_of(context, max_tokens=60, stop=stop, **GREEDY)
            assert answer_of(drafting, max_tokens=60, stop=stop, **GREEDY)[0] == expected
            assert expected["choices"][0]["text"] == full[: full.index(stop)]


@pytest.mark.parametrize(
    "more", [{"max_tokens": length} for length in (1, 2, 3, 4, 6)] + [{"max_tokens": 24, "n": 3, "temperature": 0.9, "seed": 4}]
)
def test_answers_have_the_tokens_ends_and_usage_of_those_without_drafts(context, drafting, more):
    body = {**GREEDY, **more}
    found, _ = answer_of(drafting, **body)
    assert found == answer_of(context, **body)[0]
    assert {choice["finish_reason"] for choice in found["choices"]} == {"length"}
    assert found["usage"]["completion_tokens"] == more["max_tokens"] * more.get("n", 1)


def test_a_client_that_goes_while_drafts_are_verified_leaves_nothing_and_others_their_tokens(context, drafting):
    body, engine = {**GREEDY, "max_tokens": 40, "n": 2, "seed": 3, "temperature": 0.8}, drafting.gateway.engine
    expected, _ = answer_of(context, **body)

    async def open_stream(**changes):
        fields = {"model": "demo", "stream": True, **body, **changes}
        return (await complete(drafting, decode_body(json.dumps(fields).encode(), CompletionRequest)[0], CALLER)).frames

    async def run():
        stays, goes = await open_stream(), await open_stream(prompt="The detective", temperature=0)
        frames, num_tokens = [await anext(stays)], 0
        while num_tokens < 2:  # in one step
            chunks = chunks_of(await anext(goes) + b"data: [DONE]\n\n")
            num_tokens = max(len(choice["token_ids"]) for chunk in chunks for choice in chunk["choices"])
        await goes.aclose()
        return b"".join([*frames, *[frame async for frame in stays]])

    parts = [choice for chunk in chunks_of(asyncio.run(run())) for choice in chunk["choices"]]
    for choice in expected["choices"]:
        own = [token for part in parts if part["index"] == choice["index"] for token in part["token_ids"]]
        assert own == choice["token_ids"]
    assert not engine.has_unfinished_requests()
    assert engine.scheduler.kv.pool.num_free == engine.scheduler.kv.pool.num_blocks
    assert answer_of(drafting, **body)[0] == expected


def test_request_is_told_what_excludes_every_token_when_its_own_wishes_do(context):
    with pytest.raises(ApiError, match="allowed_token_ids, bad_words and min_tokens exclude every token") as caught:
        ask_completion(context, prompt="Once", allowed_token_ids=[0, 1], stop_token_ids=[0, 1], min_tokens=5, max_tokens=8)
    assert caught.value.status == 400


def test_prompts_are_refused_at_once_when_they_are_more_than_the_queue_holds(context):
    with pytest.raises(RequestError, match="256 prompts of 16 choices are more than the 1024") as caught:
        ask_completion(context, prompt=["a"] * 256, n=16, max_tokens=1)
    assert caught.value.param == "prompt"


def test_token_that_the_model_has_not_is_refused_under_the_name_that_was_sent(context):
    with pytest.raises(RequestError, match="token ids must be integers from 0") as caught:
        ask_completion(context, prompt=[999_999])
    assert caught.value.param == "prompt"
