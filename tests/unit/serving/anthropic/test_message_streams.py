"""Streams of messages: exact bytes, and whole answers that are what streams add up to."""

from __future__ import annotations

import random

import pytest

from quire.serving.engine_client.messages import ChoiceDelta
from tests.unit.serving.anthropic.asking_messages import (
    CALL,
    INPUT,
    PLAIN,
    TOKENIZER,
    TOOL,
    USAGE,
    ask,
    comparable,
    create,
    script,
    stream,
)
from tests.unit.serving.fakes import pieces
from tests.unit.serving.real_app import events_of, fix


def test_stream_has_exactly_these_bytes():
    answer, _ = ask(script('Hi "\u2028x', tokens_per_delta=50), served=PLAIN, gateway={"num_cached_tokens": 1}, stream=True)
    count = len(TOKENIZER.encode('Hi "\u2028x', add_special_tokens=False)) + 1
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert fix(answer.text) == (
        'event: message_start\ndata: {"type":"message_start","message":{"type":"message","id":"msg_1","role":"assistant",'
        '"model":"demo","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":3,'
        + USAGE
        + '1,"output_tokens":0,"service_tier":"standard"}}}\n\n'
        'event: content_block_start\ndata: {"type":"content_block_start","index":0,'
        '"content_block":{"type":"text","text":""}}\n\n'
        'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
        '"delta":{"type":"text_delta","text":"Hi \\"\u2028x"}}\n\n'
        'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
        'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},'
        '"usage":{"input_tokens":3,'
        + USAGE
        + f'1,"output_tokens":{count},"output_tokens_details":{{"thinking_tokens":0}},"service_tier":"standard"}}}}\n\n'
        'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    )


def test_stream_with_thinking_text_and_tools_has_exactly_these_events():
    text = f"<think>so</think>Well{CALL}{CALL}"
    answer, _ = ask(script(text, tokens_per_delta=1000), stream=True, tools=[TOOL])
    signature = "SIG"
    found = []
    for _, data in events_of(fix(answer.text)):
        data.pop("type")
        if data.get("delta", {}).get("type") == "signature_delta":
            assert len(data["delta"]["signature"]) == 44
            data["delta"]["signature"] = signature
        found.append(data)
    arguments = '{"a": "é\\n", "b": [1, {"c": null}]}'
    assert found[1:-2] == [
        {"index": 0, "content_block": {"type": "thinking", "thinking": "", "signature": ""}},
        {"index": 0, "delta": {"type": "thinking_delta", "thinking": "so"}},
        {"index": 0, "delta": {"type": "signature_delta", "signature": signature}},
        {"index": 0},
        {"index": 1, "content_block": {"type": "text", "text": ""}},
        {"index": 1, "delta": {"type": "text_delta", "text": "Well"}},
        {"index": 1},
        {"index": 2, "content_block": {"type": "tool_use", "id": "call_1", "name": "f", "input": {}}},
        {"index": 2, "delta": {"type": "input_json_delta", "partial_json": arguments}},
        {"index": 2},
        {"index": 3, "content_block": {"type": "tool_use", "id": "call_2", "name": "f", "input": {}}},
        {"index": 3, "delta": {"type": "input_json_delta", "partial_json": arguments}},
        {"index": 3},
    ]
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_text_after_a_tool_call_opens_a_new_block():
    message = stream(script(f"One{CALL}Two"), tools=[TOOL])
    assert [block.type for block in message.content] == ["text", "tool_use", "text"]
    assert [message.content[0].text, message.content[1].input, message.content[2].text] == ["One", INPUT, "Two"]
    assert message.stop_reason == "tool_use"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("text", "options", "body"),
    [
        ("Été 🙂 und so weiter", {}, {}),
        (f"<think>hm 🙂\n</think>Good {CALL} and {CALL}", {}, {"tools": [TOOL]}),
        ('Hm <tool_call>{"name": "f", "arguments": {"a": "x", "b": [1, "tw', {"finish_reason": "length"}, {"tools": [TOOL]}),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', {}, {"tools": [TOOL]}),
        ("<think>never ends", {"finish_reason": "length"}, {}),
        ("", {}, {}),
    ],
)
def test_stream_read_by_the_client_is_the_whole_answer_for_any_split(text, options, body):
    rng = random.Random(text)
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)

    def play(job):
        texts = pieces(TOKENIZER, token_ids)
        at, deltas = 0, []
        while at < len(token_ids):
            size = rng.randint(1, 6)
            deltas.append([ChoiceDelta(0, "".join(texts[at : at + size]), token_ids[at : at + size])])
            at += size
        last = ChoiceDelta(0, "", [0] if options.get("finish_reason") is None else [])
        last.finish_reason = options.get("finish_reason", "stop")
        return [*deltas, [last]]

    whole = comparable(create(play, **body))
    for _ in range(6):
        assert comparable(stream(play, **body)) == whole


@pytest.mark.parametrize(
    ("finish", "stop", "max_tokens", "reason", "sequence"),
    [
        ("stop", None, 100, "end_turn", None),
        ("stop", 7, 100, "end_turn", None),
        ("stop", "END", 100, "stop_sequence", "END"),
        ("length", None, 2, "max_tokens", None),
        ("length", None, 100, "model_context_window_exceeded", None),
    ],
)
def test_stop_reason_says_why(finish, stop, max_tokens, reason, sequence):
    play = script("Hi", tokens_per_delta=50, finish_reason=finish, stop_reason=stop)
    message = create(play, served=PLAIN, max_tokens=max_tokens, stop_sequences=["END"])
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


def test_stop_string_within_a_call_is_no_tool_use():
    text = '<tool_call>{"name": "f", "arguments": {"a": "x'
    message = create(script(text, stop_reason="y"), tools=[TOOL], stop_sequences=["y"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "y")


def test_input_tokens_exclude_what_the_cache_had():
    answer, gateway = ask(script("Hi"), gateway={"num_cached_tokens": 3})
    usage = answer.json()["usage"]
    num_prompt = len(gateway.jobs[0].request.prompt_token_ids)
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (num_prompt - 3, 3)
