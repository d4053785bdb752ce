"""Completions: exact bytes, many prompts, echo, log probabilities, and stream against whole answer."""

from __future__ import annotations

import json
import random

import pytest

from quire.base.errors import RequestError
from quire.serving.engine_client.messages import ChoiceDelta, TokenLogprob
from quire.serving.errors import ApiError, engine_unavailable
from tests.unit.serving.fakes import FakeGateway, fake_logprobs, make_context, make_served, pieces, text_script
from tests.unit.serving.openai.asking import ask_completion, chunks_of, fix

SERVED = make_served()
TOKENIZER = SERVED.tokenizer
OPEN = '{"id":"ID","object":"text_completion","created":1,"model":"demo","system_fingerprint":"FP","choices":['


def say(*texts, **options):
    return make_context(FakeGateway(text_script(TOKENIZER, *texts, **options)), SERVED)


def whole(where, **body):
    return json.loads(ask_completion(where, **body))


def ids_of(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_stream_has_exactly_these_bytes():
    found = fix(ask_completion(say(' "x', tokens_per_delta=9), stream=True, stream_options={"include_usage": True}))
    num = len(ids_of(' "x')) + 1
    usage = f'"completion_tokens":{num},"total_tokens":{num + 2},"prompt_tokens_details":{{"cached_tokens":0}},'
    assert found == "".join(
        f"data: {event}\n\n"
        for event in (
            OPEN + '{"index":0,"text":" \\"x","logprobs":null,"finish_reason":null}],"usage":null}',
            OPEN + '{"index":0,"text":"","logprobs":null,"finish_reason":"stop"}],"usage":null}',
            OPEN + '],"usage":{"prompt_tokens":2,' + usage + '"completion_tokens_details":{"reasoning_tokens":0}}}',
            "[DONE]",
        )
    )


def test_whole_answer_has_exactly_these_bytes():
    found = fix(ask_completion(say("Hi", finish_reason="length"), logprobs=1))
    first, second = ids_of("Hi")
    assert found == (
        '{"id":"ID","object":"text_completion","created":1,"model":"demo","choices":[{"index":0,"text":"Hi","logprobs":'
        '{"tokens":["H","i"],"token_logprobs":[-0.5,-0.5],"top_logprobs":[{"H":-0.5},{"i":-0.5}],"text_offset":[0,1]},'
        '"finish_reason":"length"}],"usage":{"prompt_tokens":2,"completion_tokens":2,"total_tokens":4,'
        '"prompt_tokens_details":{"cached_tokens":0},"completion_tokens_details":{"reasoning_tokens":0}},'
        '"system_fingerprint":"FP"}'
    )
    assert (first, second) == (ids_of("H")[0], ids_of("i")[0])


@pytest.mark.parametrize("prompt", ["Once", ["Once"], [47, 1229], [[47, 1229]]], ids=str)
def test_every_form_of_prompt_is_taken(prompt):
    where = say("Hi")
    assert whole(where, prompt=prompt)["choices"][0]["text"] == "Hi"
    assert where.gateway.jobs[0].request.prompt_token_ids == tuple(ids_of("Once"))


@pytest.mark.parametrize("is_streaming", [True, False])
def test_choices_of_many_prompts_are_numbered_prompt_by_prompt(is_streaming):
    def script(job):
        return text_script(TOKENIZER, f"{job.request.prompt} first", f"{job.request.prompt} second")(job)

    where = make_context(FakeGateway(script), SERVED)
    prompts = [f"p{index}" for index in range(20)]
    data = ask_completion(where, prompt=prompts, n=2, stream=is_streaming)
    texts = [""] * 40
    if is_streaming:
        ends = []
        for chunk in chunks_of(data):
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
                ends += [choice["index"]] if choice["finish_reason"] else []
        assert sorted(ends) == list(range(40))
    else:
        answer = json.loads(data)
        texts = [choice["text"] for choice in answer["choices"]]
        assert [choice["index"] for choice in answer["choices"]] == list(range(40))
        assert answer["usage"]["prompt_tokens"] == sum(len(ids_of(prompt)) for prompt in prompts)
    assert texts == [f"{prompt} {word}" for prompt in prompts for word in ("first", "second")]
    assert len({job.request.request_id for job in where.gateway.jobs}) == 20


@pytest.mark.parametrize("is_streaming", [True, False])
def test_all_prompts_are_aborted_when_one_fails(is_streaming):
    def script(job):
        yield [ChoiceDelta(0, "a", [5])]
        if job.request.prompt == "b":
            yield engine_unavailable("gone")
        yield [ChoiceDelta(0, "a", [5])]
        for _ in range(1000):
            yield [ChoiceDelta(0, "a", [5])]
        yield [ChoiceDelta(0, "", [5], finish_reason="stop")]

    where = make_context(FakeGateway(script), SERVED)
    with pytest.raises(ApiError, match="gone"):
        ask_completion(where, prompt=["a", "b", "c"], stream=is_streaming)
    assert all(stream.is_left for stream in where.gateway.streams)
    assert [bool(stream.aborts) for stream in where.gateway.streams][::2] == [True, True]


@pytest.mark.covering(keep=False)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    "body", [{}, {"logprobs": 2}, {"logprobs": 1, "echo": True}, {"echo": True}, {"n": 2, "logprobs": 0}], ids=str
)
def test_stream_adds_up_to_the_whole_answer_however_it_is_cut(body, seed):
    rng = random.Random(seed)
    text = " upon a time — été 🙂🙂 and 日本語."
    token_ids, parts = ids_of(text), pieces(TOKENIZER, ids_of(text))

    def script(job):
        at = [0, 0]
        while min(at[: job.request.params.n]) < len(token_ids):
            step = []
            for index in range(job.request.params.n):
                start, at[index] = at[index], at[index] + rng.randint(1, 5)
                ids = token_ids[start : at[index]]
                if ids:
                    marks = [fake_logprobs(token_id, 2) for token_id in ids]
                    end = "length" if at[index] >= len(token_ids) else None
                    step.append(ChoiceDelta(index, "".join(parts[start : at[index]]), ids, marks, end))
            yield step

    def context():
        return make_context(FakeGateway(script), SERVED)

    added: dict[int, dict] = {}
    for chunk in chunks_of(ask_completion(context(), stream=True, **body)):
        for choice in chunk["choices"]:
            found = added.setdefault(choice["index"], {"text": "", "logprobs": None, "end": None})
            found["text"] += choice["text"]
            found["end"] = found["end"] or choice["finish_reason"]
            for name, values in (choice["logprobs"] or {}).items():
                found["logprobs"] = found["logprobs"] or {}
                found["logprobs"][name] = found["logprobs"].get(name, []) + values
    for choice in whole(context(), **body)["choices"]:
        found = added[choice["index"]]
        assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == (found["text"], found["logprobs"], found["end"])
        assert choice["text"] == ("Once" if body.get("echo") else "") + text
        if choice["logprobs"] is not None:
            offsets = choice["logprobs"]["text_offset"]
            assert offsets == sorted(offsets)
            assert choice["text"][offsets[-1] :] == "."


def test_prompt_alone_is_scored_when_nothing_is_to_be_generated():
    where = say("X")
    answer = whole(where, prompt=ids_of("Once upon"), max_tokens=0, echo=True, logprobs=1, temperature=0)
    params = where.gateway.jobs[0].request.params
    assert (params.max_tokens, params.prompt_logprobs, params.logprobs) == (1, 1, None)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Once upon", "length")
    assert choice["logprobs"]["token_logprobs"] == [None] + [-0.5] * (len(ids_of("Once upon")) - 1)
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 1, 4]
    assert answer["usage"]["completion_tokens"] == 0
    chunks = chunks_of(ask_completion(say("X"), prompt="Once upon", max_tokens=0, echo=True, logprobs=1, stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Once upon", ""]


def test_last_token_can_be_dropped_by_who_scores_a_prompt_with_one_token_more():
    ids = ids_of("Once upon")
    choice = whole(say("X"), prompt=ids, max_tokens=1, echo=True, logprobs=1)["choices"][0]
    assert choice["logprobs"]["token_logprobs"][:-1] == [None] + [-0.5] * (len(ids) - 1)


def test_several_choices_of_a_prompt_alone_are_copies():
    answer = whole(say("X"), max_tokens=0, echo=True, n=2, temperature=1)
    assert [choice["text"] for choice in answer["choices"]] == ["Once", "Once"]


def test_likelier_counts_when_two_tokens_have_one_text():
    def script(job):
        (hi,) = ids_of("H")
        part, other = ids_of("é")
        marks = [[TokenLogprob(hi, -0.1, 1), TokenLogprob(part, -2.0, 2), TokenLogprob(other, -3.0, 3)]]
        yield [ChoiceDelta(0, "H", [hi], marks, "length")]

    where = make_context(FakeGateway(script), SERVED)
    logprobs = whole(where, logprobs=3)["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"H": -0.1, "\ufffd": -2.0}]
    logprobs = whole(where, logprobs=3, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert len(logprobs["top_logprobs"][0]) == 3
    assert logprobs["tokens"] == [f"token_id:{ids_of('H')[0]}"]


def test_best_of_reaches_the_engine_and_is_copied_when_greedy():
    where = say("Hi", "Ho")
    whole(where, best_of=3, n=2)
    assert (where.gateway.jobs[0].request.params.best_of, where.gateway.jobs[0].request.params.n) == (3, 2)
    where = say("Hi")
    answer = whole(where, best_of=3, n=2, temperature=0)
    assert [choice["text"] for choice in answer["choices"]] == ["Hi", "Hi"]
    assert where.gateway.jobs[0].request.params.best_of is None
    with pytest.raises(RequestError, match="leave stream out"):
        ask_completion(say("Hi"), best_of=3, n=2, stream=True)
    with pytest.raises(RequestError, match="at least n"):
        whole(say("Hi"), best_of=1, n=2)


def test_field_at_fault_is_named_when_best_of_asks_for_too_much():
    where = say("Hi")
    with pytest.raises(RequestError) as caught:
        whole(where, best_of=where.config.max_n + 1)
    assert caught.value.param == "best_of"
    for n in (17, 129, 1 << 70):
        with pytest.raises(RequestError, match="n: this server gives at most 16 choices"):
            whole(where, n=n)
    num_prompts = where.config.max_queued_requests // 8 + 1
    with pytest.raises(RequestError, match="8 choices"):
        whole(where, prompt=["a"] * num_prompts, n=1, best_of=8)


def test_defaults_of_the_api_are_taken():
    where = say("Hi")
    whole(where)
    params = where.gateway.jobs[0].request.params
    assert (params.max_tokens, params.logprobs, params.temperature) == (16, None, 1.0)


def test_limit_reaches_the_engine_by_either_name():
    for name in ("max_tokens", "max_completion_tokens"):
        context = say("Hi")
        ask_completion(context, **{name: 7})
        assert context.gateway.jobs[0].request.params.max_tokens == 7
        with pytest.raises(RequestError) as caught:
            ask_completion(context, **{name: 100_000})
        assert caught.value.param == name


def test_text_after_a_stop_string_has_no_logprobs():
    text = "One two three"
    token_ids, parts = ids_of(text), pieces(TOKENIZER, ids_of(text))

    def script(job):
        marks = [fake_logprobs(token_id, 1) for token_id in token_ids]
        yield [ChoiceDelta(0, parts[0], token_ids[:1], marks[:1])]
        yield [ChoiceDelta(0, "", token_ids[1:2], marks[1:2])]  # held: the stop string may have begun
        rest = "One t"[len(parts[0]) :]
        yield [ChoiceDelta(0, rest, token_ids[2:], marks[2:], "stop", "wo")]

    choice = whole(make_context(FakeGateway(script), SERVED), logprobs=1, stop="wo")["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("One t", "wo")
    joined = "".join(choice["logprobs"]["tokens"])
    assert joined.startswith("One t")
    assert "three" not in joined


def test_token_ids_are_returned_when_asked_for():
    choice = whole(say("Hi"), return_token_ids=True)["choices"][0]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([*ids_of("Hi"), 0], ids_of("Once"))
    chunks = chunks_of(ask_completion(say("Hi"), return_token_ids=True, stream=True))
    assert chunks[0]["choices"][0]["prompt_token_ids"] == ids_of("Once")
    assert [token_id for chunk in chunks for token_id in chunk["choices"][0]["token_ids"]] == [*ids_of("Hi"), 0]


def test_prompt_logprobs_are_told_with_the_choices():
    answer = whole(say("Hi"), prompt=["Once", "Upon"], prompt_logprobs=0)
    assert [len(choice["prompt_logprobs"]) for choice in answer["choices"]] == [2, 2]
    assert answer["choices"][1]["prompt_logprobs"][1] == {
        str(ids_of("Upon")[1]): {"logprob": -0.5, "rank": 1, "decoded_token": "pon"}
    }


def test_token_id_that_the_model_lacks_is_refused():
    with pytest.raises(RequestError, match="from 0 to 4095"):
        whole(say("Hi"), prompt=[5000])
