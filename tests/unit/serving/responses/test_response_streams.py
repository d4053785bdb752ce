"""Streams of responses: exact bytes, and whole answers that are what streams add up to."""

from __future__ import annotations

import random

import pytest

from quire.serving.engine_client.messages import ChoiceDelta
from tests.unit.serving.fakes import fake_logprobs, pieces
from tests.unit.serving.real_app import events_of, fix
from tests.unit.serving.responses.asking_responses import (
    ARGUMENTS,
    CALL,
    PLAIN,
    TOKENIZER,
    TOOL,
    ask,
    comparable,
    create,
    head,
    run,
    script,
    stream,
    with_client,
)


def test_stream_has_exactly_these_bytes():
    answer, _ = ask(script('Hi "\u2028x', tokens_per_delta=50), served=PLAIN, gateway={"num_cached_tokens": 1}, stream=True)
    count = len(TOKENIZER.encode('Hi "\u2028x', add_special_tokens=False)) + 1
    text = '"Hi \\"\u2028x"'
    part = '{"type":"output_text","text":TEXT,"annotations":[],"logprobs":[]}'
    item = (
        '{"type":"message","id":"msg_1","role":"assistant","status":"completed","content":[' + part.replace("TEXT", text) + "]}"
    )
    usage = (
        '{"input_tokens":4,"input_tokens_details":{"cached_tokens":1,"cache_write_tokens":0},"output_tokens":'
        + str(count)
        + ',"output_tokens_details":{"reasoning_tokens":0},"total_tokens":'
        + str(4 + count)
        + "}"
    )
    place = '"item_id":"msg_1","output_index":0,"content_index":0'
    added = '{"type":"message","id":"msg_1","role":"assistant","status":"in_progress","content":[]}'
    expected = [
        ("response.created", f'"response":{head()}'),
        ("response.in_progress", f'"response":{head()}'),
        ("response.output_item.added", f'"output_index":0,"item":{added}'),
        ("response.content_part.added", place + ',"part":' + part.replace("TEXT", '""')),
        ("response.output_text.delta", f'{place},"delta":{text},"logprobs":[]'),
        ("response.output_text.done", f'{place},"text":{text},"logprobs":[]'),
        ("response.content_part.done", f'{place},"part":' + part.replace("TEXT", text)),
        ("response.output_item.done", f'"output_index":0,"item":{item}'),
        ("response.completed", f'"response":{head("completed", "1", f"[{item}]", usage)}'),
    ]
    assert fix(answer.text) == "".join(
        f'event: {name}\ndata: {{"type":"{name}","sequence_number":{number},{rest}}}\n\n'
        for number, (name, rest) in enumerate(expected)
    )


def test_stream_with_reasoning_and_tools_has_these_events():
    text = f"<think>so</think>Well{CALL}{CALL}"
    answer, _ = ask(script(text, tokens_per_delta=1000), stream=True, tools=[TOOL])
    found = events_of(fix(answer.text))
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    kept = [{key: value for key, value in data.items() if key != "sequence_number"} for _, data in found[2:-1]]
    prefix = "response."

    def part_events(index, item_id, kind, text, extra):
        where = {"item_id": item_id, "output_index": index, "content_index": 0}
        return [
            {"type": f"{prefix}content_part.added", **where, "part": {"type": kind, "text": "", **extra}},
            {"type": f"{prefix}{kind}.delta", **where, "delta": text, **({"logprobs": []} if extra else {})},
            {"type": f"{prefix}{kind}.done", **where, "text": text, **({"logprobs": []} if extra else {})},
            {"type": f"{prefix}content_part.done", **where, "part": {"type": kind, "text": text, **extra}},
        ]

    def call_events(index, item_id, call_id):
        item = {"type": "function_call", "id": item_id, "call_id": call_id, "name": "f"}
        where = {"item_id": item_id, "output_index": index}
        added, done = ({**item, "arguments": a, "status": s} for a, s in (("", "in_progress"), (ARGUMENTS, "completed")))
        return [
            {"type": f"{prefix}output_item.added", "output_index": index, "item": added},
            {"type": f"{prefix}function_call_arguments.delta", **where, "delta": ARGUMENTS},
            {"type": f"{prefix}function_call_arguments.done", **where, "name": "f", "arguments": ARGUMENTS},
            {"type": f"{prefix}output_item.done", "output_index": index, "item": done},
        ]

    reasoning = {"type": "reasoning", "id": "rs_1", "summary": []}
    message = {"type": "message", "id": "msg_1", "role": "assistant"}
    text_extra = {"annotations": [], "logprobs": []}
    thought = {"type": "reasoning_text", "text": "so"}
    said = {"type": "output_text", "text": "Well", **text_extra}
    assert kept == [
        {
            "type": f"{prefix}output_item.added",
            "output_index": 0,
            "item": {**reasoning, "content": [], "status": "in_progress"},
        },
        *part_events(0, "rs_1", "reasoning_text", "so", {}),
        {
            "type": f"{prefix}output_item.done",
            "output_index": 0,
            "item": {**reasoning, "content": [thought], "status": "completed"},
        },
        {"type": f"{prefix}output_item.added", "output_index": 1, "item": {**message, "status": "in_progress", "content": []}},
        *part_events(1, "msg_1", "output_text", "Well", text_extra),
        {"type": f"{prefix}output_item.done", "output_index": 1, "item": {**message, "status": "completed", "content": [said]}},
        *call_events(2, "fc_1", "call_1"),
        *call_events(3, "fc_2", "call_2"),
    ]
    assert found[-1][0] == "response.completed"
    done = [data["item"] for name, data in found if name == "response.output_item.done"]
    assert found[-1][1]["response"]["output"] == done


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("text", "finish", "body"),
    [
        ("Été 🙂 und so weiter", "stop", {}),
        ("Été 🙂 und so", "stop", {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
        (f"<think>hm 🙂\n</think>Good {CALL} and {CALL}", "stop", {"tools": [TOOL]}),
        ('Hm <tool_call>{"name": "f", "arguments": {"a": "x", "b": [1, "tw', "length", {"tools": [TOOL]}),
        ("<think>never ends", "length", {}),
        ("", "stop", {}),
    ],
)
def test_stream_adds_up_to_the_whole_answer_for_any_split(text, finish, body):
    rng = random.Random(text)
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)

    def play(job):
        texts = pieces(TOKENIZER, token_ids)
        want = job.request.params.logprobs
        at, deltas = 0, []
        while at < len(token_ids):
            size = rng.randint(1, 6)
            ids = token_ids[at : at + size]
            logprobs = None if want is None else [fake_logprobs(token_id, want) for token_id in ids]
            deltas.append([ChoiceDelta(0, "".join(texts[at : at + size]), ids, logprobs)])
            at += size
        last = ChoiceDelta(0, "", [0] if finish == "stop" else [])
        if want is not None:
            last.logprobs = [fake_logprobs(0, want) for _ in last.token_ids]
        last.finish_reason = finish
        return [*deltas, [last]]

    whole = comparable(create(play, **body))
    for _ in range(6):
        events = stream(play, **body)
        assert comparable(events[-1].response) == whole
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        said = [part["text"] for item in whole["output"] if item["type"] == "message" for part in item["content"]]
        assert "".join(deltas) == "".join(said)
        arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert "".join(arguments) == "".join(item.get("arguments", "") for item in whole["output"])
        assert all(
            event.part.text == item["content"][0]["text"]
            for event in events
            if event.type == "response.content_part.done"
            for item in [whole["output"][event.output_index]]
        )


def test_stream_helper_of_the_client_reads_what_was_answered():
    async def use(client):
        async with client.responses.stream(model="demo", input="hi", tools=[TOOL]) as events:
            texts = [event.delta async for event in events if event.type == "response.output_text.delta"]
            return texts, await events.get_final_response()

    texts, final = run(with_client(script(f"<think>so</think>Well, 🙂{CALL}"), use))
    assert "".join(texts) == final.output_text == "Well, 🙂"
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output[2].arguments == ARGUMENTS
    assert final.usage.output_tokens_details.reasoning_tokens > 0


def test_cut_answer_is_incomplete():
    play = script("Hello there", finish_reason="length")
    events = stream(play, max_output_tokens=2)
    response = events[-1].response
    assert events[-1].type == "response.incomplete"
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"
    assert comparable(create(play, max_output_tokens=2)) == comparable(response)


def test_logprobs_come_with_their_text():
    events = stream(script("Hello there"), include=["message.output_text.logprobs"], top_logprobs=2)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert all("".join(entry.token for entry in event.logprobs) == event.delta for event in deltas)
    part = events[-1].response.output[0].content[0]
    assert len(part.logprobs) == sum(len(event.logprobs) for event in deltas)
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


def test_answer_without_a_word_is_an_empty_message():
    response = create(script(""))
    assert response.output_text == ""
    assert [item.type for item in response.output] == ["message"]
