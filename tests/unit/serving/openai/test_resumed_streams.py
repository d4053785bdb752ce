"""Streams with the comments for routers: what one server has sent, and what another sends after it, make an unbroken stream."""

import asyncio
import json
import re

import pytest

from quire.api.decode import decode_body
from quire.api.openai.chat import ChatCompletionRequest
from quire.api.openai.completions import CompletionRequest
from quire.base.errors import RequestError
from quire.contracts.sampling_params import SamplingParams
from quire.serving.core.resumption import Resumption
from quire.serving.openai.chat import chat
from quire.serving.openai.completions import complete
from quire.serving.resume_wire import END_COMMENT, RESUMABLE_HEADER, read_tokens_comment
from tests.unit.serving.fakes import text_script
from tests.unit.serving.openai.asking import CALLER, USER, finish
from tests.unit.serving.openai.chatting import CALL, PLAIN, TOKENIZER, TOOL, TOOLED, context

RANDOM = re.compile(rb"call_[A-Za-z0-9]{24}")
TEXT = "Hello é 日本 there, \n\nand more."
CHAT = (chat, ChatCompletionRequest, {"messages": USER})
COMPLETION = (complete, CompletionRequest, {"prompt": "Once", "max_tokens": 40})
CASES = {
    "chat": (CHAT, TEXT, PLAIN, {}),
    "chat with usage": (CHAT, TEXT, PLAIN, {"stream_options": {"include_usage": True}}),
    "tool call": (CHAT, "I call." + CALL, TOOLED, {"tools": [TOOL]}),
    "completion": (COMPLETION, TEXT, PLAIN, {"stream_options": {"include_usage": True}}),
}


def resumed_script(text, tokens_per_delta):
    """Say a text, from where the request's output ends."""
    whole = text_script(TOKENIZER, text, tokens_per_delta=1)

    def play(job):
        if job.request.params.n > 1:
            yield from whole(job)
            return
        left = [delta for (delta,) in whole(job)][len(job.request.output_token_ids) :]
        for begin in range(0, len(left), tokens_per_delta):
            part = left[begin : begin + tokens_per_delta]
            merged = part[-1]
            merged.text = "".join(one.text for one in part)
            merged.token_ids = [token_id for one in part for token_id in one.token_ids]
            yield [merged]

    return play


def ask(name, token_ids=None, tokens_per_delta=1, **body):
    """Return the head of an answer's stream, its bytes, and the job."""
    (handler, kind, fields), text, served, options = CASES[name]
    where = context(resumed_script(text, tokens_per_delta), served)
    decoded, _ = decode_body(json.dumps({"model": "demo", "stream": True, **fields, **options, **body}).encode(), kind)
    resumption = None if token_ids is None else Resumption(77, "a" * 29, 1_700_000_000, tuple(token_ids))

    async def run():
        answer = await handler(where, decoded, CALLER, resumption)
        return getattr(answer, "headers", {}), await finish(answer)

    headers, data = asyncio.run(run())
    return headers, RANDOM.sub(b"call_1", data), where.gateway.jobs


def deltas_of(data):
    """Return (frames, tokens) for each delta of a stream."""
    assert data.endswith(END_COMMENT)
    found = []
    for part in re.findall(rb"(.*?)(: quire-tokens [0-9,]*\n\n)", data, re.DOTALL):
        found.append((part[0], read_tokens_comment(part[1])))
    assert b"".join(frames + b": quire-tokens " + b",".join(b"%d" % one for one in ids) + b"\n\n" for frames, ids in found) == (
        data.removesuffix(END_COMMENT)
    )
    return found


@pytest.mark.parametrize("name", CASES)
def test_comments_change_nothing_else(name):
    headers, marked, jobs = ask(name, ())
    assert headers == {RESUMABLE_HEADER: "1"}
    plain = ask(name)[1]
    without = b"".join(frames for frames, _ in deltas_of(marked))
    hidden = re.compile(rb'"id":"[a-z]+-[A-Za-z0-9]{29}"|"created":\d+')
    assert hidden.sub(b"", without) == hidden.sub(b"", plain)
    assert b'"created":1700000000' in without
    assert b"-" + b"a" * 29 in without
    assert jobs[0].request.seed == 77


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CASES)
def test_what_two_servers_send_is_one_stream(name):
    whole = deltas_of(ask(name, ())[1])
    expected = b"".join(frames for frames, _ in whole)
    for cut in range(1, len(whole)):
        begun = whole[:cut]
        token_ids = [token_id for _, ids in begun for token_id in ids]
        for tokens_per_delta in (1, 3):
            _, data, jobs = ask(name, token_ids, tokens_per_delta)
            assert tuple(jobs[0].request.output_token_ids) == tuple(token_ids)
            found = b"".join(frames for frames, _ in begun) + b"".join(frames for frames, _ in deltas_of(data))
            if tokens_per_delta == 1:
                assert found == expected
            assert told(found) == told(expected)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ending", ["length", "stop"])
def test_stream_whose_tokens_are_all_known_gets_only_its_end(name, ending):
    token_ids = [token_id for _, ids in deltas_of(ask(name, ())[1]) for token_id in ids]
    limits = {"max_tokens": len(token_ids)} if ending == "length" else {"stop_token_ids": token_ids[-1:], "max_tokens": 500}
    _, data, jobs = ask(name, token_ids, **limits)
    assert data == END_COMMENT
    assert not jobs


def test_output_longer_than_its_limit_is_refused():
    with pytest.raises(RequestError, match="has 3 tokens, and max_tokens is 2"):
        ask("chat", (5, 6, 7), max_tokens=2)


def told(data):
    """Return what a client makes of a stream: texts, arguments, the end, the last usage."""
    text, arguments, ends, usage = "", "", [], None
    for line in data.decode().splitlines():
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line[6:])
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            delta = choice.get("delta", {})
            text += choice.get("text") or delta.get("content") or ""
            arguments += "".join(call["function"]["arguments"] for call in delta.get("tool_calls", ()))
            ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    return text, arguments, ends, usage


def test_seed_of_the_client_stays():
    assert ask("chat", (), seed=5)[2][0].request.seed == 5


@pytest.mark.parametrize(
    "options",
    [
        {"n": 2, "temperature": 1},
        {"n": 2, "temperature": 0},
        {"logprobs": True},
        {"prompt_logprobs": 1, "stream": False},
        {"return_token_ids": True},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
)
def test_other_streams_have_no_comments_and_are_not_continued(options):
    headers, data, _ = ask("chat", (), **options)
    assert RESUMABLE_HEADER not in headers
    assert b"quire-tokens" not in data
    with pytest.raises(RequestError, match="cannot be continued|only a stream"):
        ask("chat", (5,), **options)


def test_several_prompts_are_not_continued():
    assert b"quire-tokens" not in ask("completion", (), prompt=["a", "b"])[1]
    with pytest.raises(RequestError, match="2 prompts cannot be continued"):
        ask("completion", (5,), prompt=["a", "b"])


def test_stop_string_in_the_output_is_refused():
    token_ids = TOKENIZER.encode("Hello there", add_special_tokens=False)
    assert SamplingParams(stop=["lo th"]).stop
    with pytest.raises(RequestError, match="it contains one of the stop strings"):
        ask("chat", token_ids, stop=["lo th"])
