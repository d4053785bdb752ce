"""Answers to chats: the exact bytes of streams, and whole answers that are what streams add up to."""

from __future__ import annotations

import json
import random
import threading

import pytest

from quire.serving.engine_client.messages import ChoiceDelta, TokenLogprob
from quire.serving.openai import chat_answers
from quire.serving.openai.chat_answers import ChatFold
from tests.unit.serving.fakes import pieces
from tests.unit.serving.openai.asking import ask_chat, chunks_of, fix
from tests.unit.serving.openai.chatting import (
    ARGUMENTS,
    CALL,
    TOKENIZER,
    TOOL,
    TOOLED,
    context,
    fold_stream,
    params_of,
    say,
    whole,
)

OPEN = '{"id":"ID","object":"chat.completion.chunk","created":1,"model":"demo","system_fingerprint":"FP","choices":'


def test_stream_has_exactly_these_bytes():
    found = fix(ask_chat(say('Hi "\u2028x\n', tokens_per_delta=50), stream=True))
    assert found == "".join(
        f"data: {event}\n\n"
        for event in (
            OPEN + '[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}',
            OPEN + '[{"index":0,"delta":{"content":"Hi \\"\u2028x\\n"},"logprobs":null,"finish_reason":null}]}',
            OPEN + '[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}]}',
            "[DONE]",
        )
    )


def test_stream_with_usage_has_exactly_these_bytes():
    where = say("Hi", tokens_per_delta=50, gateway={"num_cached_tokens": 1}, finish_reason="length")
    found = fix(ask_chat(where, stream=True, stream_options={"include_usage": True}, service_tier="auto"))
    head = OPEN.replace('"FP",', '"FP","service_tier":"default",')
    usage = '{"prompt_tokens":4,"completion_tokens":2,"total_tokens":6,"prompt_tokens_details":{"cached_tokens":1},'
    assert found == "".join(
        f"data: {event}\n\n"
        for event in (
            head + '[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":null}',
            head + '[{"index":0,"delta":{"content":"Hi"},"logprobs":null,"finish_reason":null}],"usage":null}',
            head + '[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}],"usage":null}',
            head + '[],"usage":' + usage + '"completion_tokens_details":{"reasoning_tokens":0}}}',
            "[DONE]",
        )
    )


def test_stream_of_a_tool_call_has_exactly_these_deltas():
    text = f"<think>\nhm</think>\n\nLet me.{CALL}{CALL}"
    chunks = chunks_of(ask_chat(say(text, served=TOOLED, tokens_per_delta=1000), stream=True, tools=[TOOL]))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[:3] == [{"role": "assistant", "content": None}, {"reasoning_content": "hm"}, {"content": "Let me."}]
    calls = [delta["tool_calls"][0] for delta in deltas[3:-1]]
    ids = [call["id"] for call in calls if "id" in call]
    assert len(set(ids)) == 2
    expected = []
    for index, call_id in enumerate(ids):
        expected.append({"index": index, "id": call_id, "type": "function", "function": {"name": "f", "arguments": ""}})
        expected.append({"index": index, "function": {"arguments": ARGUMENTS}})
    assert calls == expected
    assert deltas[-1] == {}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_whole_answer_has_exactly_these_bytes():
    text = f"<think>hm</think>Let me.{CALL}"
    where = say(text, served=TOOLED, tokens_per_delta=3)
    found = fix(ask_chat(where, tools=[TOOL]))
    arguments = json.dumps(ARGUMENTS, ensure_ascii=False)
    num_prompt = len(where.gateway.jobs[0].request.prompt_token_ids)
    num_output = len(TOKENIZER.encode(text)) + 1
    num_reasoning = json.loads(found)["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert len(TOKENIZER.encode("hm")) < num_reasoning <= len(TOKENIZER.encode("<think>hm</think>"))
    assert found == (
        '{"id":"ID","object":"chat.completion","created":1,"model":"demo","choices":[{"index":0,"message":{"role":"assistant",'
        '"content":"Let me.","refusal":null,"reasoning_content":"hm","tool_calls":[{"id":"call_1","type":"function","function":'
        f'{{"name":"f","arguments":{arguments}}}}}]}},"logprobs":null,"finish_reason":"tool_calls"}}],"usage":{{"prompt_tokens":'
        f'{num_prompt},"completion_tokens":{num_output},"total_tokens":{num_prompt + num_output},'
        f'"prompt_tokens_details":{{"cached_tokens":0}},"completion_tokens_details":{{"reasoning_tokens":{num_reasoning}}}}},'
        '"system_fingerprint":"FP"}'
    )


TEXTS = [
    "Plain text — été 🙂",
    "<think>\nOne\ntwo 日本 </think>\n\nThe answer is 4.",
    f"<think>hm</think>Before.{CALL} between {CALL}",
    f"{CALL}{CALL}",
    "<tool_call>not a call</tool_call> after",
    "<think>never closed 🙂",
    '<tool_call>{"name": "f", "arguments": {"a": [1, 2',
    "",
]


@pytest.mark.covering
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:15])
def test_stream_adds_up_to_the_whole_answer_however_it_is_cut(text, seed):
    rng = random.Random(seed)
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    parts = pieces(TOKENIZER, token_ids)

    def script(job):
        at = 0
        while at < len(token_ids):
            end = at + rng.randint(1, 6)
            marks = [[TokenLogprob(token_id, -1.0, 1)] for token_id in token_ids[at:end]]
            yield [ChoiceDelta(0, "".join(parts[at:end]), token_ids[at:end], marks)]
            at = end
        yield [ChoiceDelta(0, "", [0], [[TokenLogprob(0, -1.0, 1)]], finish_reason="stop")]

    body = {"tools": [TOOL], "logprobs": True}
    (streamed,) = fold_stream(chunks_of(ask_chat(context(script, TOOLED), stream=True, **body)))
    (choice,) = whole(context(script, TOOLED), **body)["choices"]
    message = choice["message"]
    assert streamed["content"] == message["content"]
    assert streamed.get("reasoning_content") == message.get("reasoning_content")
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    assert list(streamed["calls"].values()) == calls
    assert streamed["end"] == choice["finish_reason"]
    assert streamed["logprobs"] == choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"]).decode() == (message["content"] or "")


def test_several_choices_have_one_role_and_one_end_each():
    chunks = chunks_of(ask_chat(say("One", "Two words"), stream=True, n=3, stream_options={"include_usage": True}))
    assert [choice["content"] for choice in fold_stream(chunks)] == ["One", "Two words", "One"]
    assert chunks[-1]["choices"] == []


@pytest.mark.parametrize("is_streaming", [True, False])
def test_choices_are_copies_when_greedy(is_streaming):
    where = say(f"<think>x</think>Hi{CALL}", served=TOOLED)
    body = {"n": 3, "temperature": 0, "tools": [TOOL]}
    if is_streaming:
        choices = fold_stream(chunks_of(ask_chat(where, stream=True, **body)))
        assert [choice["content"] for choice in choices] == ["Hi"] * 3
    else:
        answer = whole(where, **body)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert {choice["message"]["content"] for choice in answer["choices"]} == {"Hi"}
        assert len({choice["message"]["tool_calls"][0]["id"] for choice in answer["choices"]}) == 3
        num_tokens = len(TOKENIZER.encode(f"<think>x</think>Hi{CALL}")) + 1
        assert answer["usage"]["completion_tokens"] == 3 * num_tokens
    assert params_of(where).n == 1


def test_continuous_usage_is_on_every_chunk():
    chunks = chunks_of(
        ask_chat(say("One two"), stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == len(TOKENIZER.encode("One two")) + 1
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert counts[0] == 0 < counts[1]
    assert all(chunk["usage"]["total_tokens"] == chunk["usage"]["completion_tokens"] + 4 for chunk in chunks)


def test_usage_is_absent_unless_asked_for():
    assert all("usage" not in chunk for chunk in chunks_of(ask_chat(say("Hi"), stream=True)))


def test_top_logprobs_leave_the_chosen_token_out_when_it_is_not_among_them():
    def script(job):
        (hi,) = TOKENIZER.encode("H", add_special_tokens=False)
        entries = [TokenLogprob(hi, float("-inf"), 9), TokenLogprob(300, -0.1, 1), TokenLogprob(301, -0.2, 2)]
        yield [ChoiceDelta(0, "H", [hi], [entries], "length")]

    (entry,) = whole(context(script), logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("H", -9999.0, [72])
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.1, -0.2]


def test_tokens_are_ids_when_asked_for():
    answer = whole(say("H"), logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    (hi,) = TOKENIZER.encode("H", add_special_tokens=False)
    assert entry["token"] == entry["top_logprobs"][0]["token"] == f"token_id:{hi}"


def test_no_top_logprobs_when_none_are_asked_for():
    answer = whole(say("H"), logprobs=True)
    assert answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_token_ids_are_returned_when_asked_for():
    ids = [*TOKENIZER.encode("Hi there 🙂", add_special_tokens=False), 0]
    where = say("Hi there 🙂")
    answer = whole(where, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == ids
    assert answer["prompt_token_ids"] == list(where.gateway.jobs[0].request.prompt_token_ids)
    chunks = chunks_of(ask_chat(say("Hi there 🙂"), stream=True, return_token_ids=True))
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert [token_id for chunk in chunks for token_id in chunk["choices"][0].get("token_ids", ())] == ids


def test_prompt_logprobs_are_returned_when_asked_for():
    found = whole(say("Hi"), prompt_logprobs=1)["prompt_logprobs"]
    assert found[0] is None
    assert len(found) == 4
    assert all(entry["logprob"] == -0.5 and entry["decoded_token"] for entry in list(found[1].values())[:1])


def test_stop_reason_is_told():
    choice = whole(say("Hi", stop_reason="X"), stop="X")["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "X")


def test_length_wins_over_tool_calls():
    where = say(CALL, served=TOOLED, finish_reason="length")
    choice = whole(where, tools=[TOOL])["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"]


def test_calls_are_text_when_there_are_no_tools_or_none_is_chosen():
    for body in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        where = say(CALL, served=TOOLED)
        message = whole(where, **body)["choices"][0]["message"]
        assert message["content"] == CALL
        assert "tool_calls" not in message
        assert '"name"' not in (where.gateway.jobs[0].request.prompt or "")


@pytest.mark.parametrize("is_streaming", [True, False])
def test_engine_is_stopped_after_the_first_call_when_parallel_calls_are_off(is_streaming):
    where = say(f"{CALL}{CALL} and more text", served=TOOLED)
    data = ask_chat(where, tools=[TOOL], parallel_tool_calls=False, stream=is_streaming)
    assert data.count(b'"call_') == 1
    assert b"more" not in data
    assert b'"finish_reason":"tool_calls"' in data
    assert where.gateway.streams[0].aborts == ["tool_cut"]
    assert where.gateway.streams[0].is_left


def test_reasoning_is_left_out_and_counted_when_not_wanted():
    answer = whole(say("<think>a b c</think>Yes", served=TOOLED), include_reasoning=False)
    assert answer["choices"][0]["message"]["content"] == "Yes"
    assert "reasoning_content" not in answer["choices"][0]["message"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 3


@pytest.mark.parametrize("many", [1, 1000])
def test_answer_is_written_in_a_thread_when_it_has_many_log_probabilities(monkeypatch, many):
    threads = []
    body = ChatFold.body

    def note(fold):
        threads.append(threading.current_thread())
        return body(fold)

    monkeypatch.setattr(ChatFold, "body", note)
    expected = fix(ask_chat(say("Hi there"), logprobs=True))
    monkeypatch.setattr(chat_answers, "MANY_POSITIONS", many)
    assert fix(ask_chat(say("Hi there"), logprobs=True)) == expected
    assert [thread is not threading.main_thread() for thread in threads] == [False, many == 1]
