"""Responses over the real application: exact bytes, the official client, tools, reasoning, errors."""

from __future__ import annotations

import asyncio
import json
import random

import openai
import pytest

from quire.serving.config import ServerConfig
from quire.serving.errors import ApiError, overloaded
from quire.serving.link.messages import ChoiceDelta
from tests.unit.serving.fakes import TOOL_TEMPLATE, FakeGateway, fake_logprobs, make_served, pieces, text_script
from tests.unit.serving.real_app import BASE, events_of, fix, names_of, running_app

PLAIN = make_served()
TOOLED = make_served(TOOL_TEMPLATE)
TOKENIZER = TOOLED.tokenizer
TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": False}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é\\n"}}\n</tool_call>'
ARGUMENTS = '{"a": "é\\n"}'


def run(work):
    return asyncio.run(work)


def script(*texts, **options):
    return text_script(TOKENIZER, *texts, **options)


def ask(play, served=TOOLED, gateway=None, **body):
    """Return the answer over HTTP, and the gateway."""

    async def work():
        where = FakeGateway(play, **(gateway or {}))
        async with running_app(where, served) as app:
            return await app.post("/v1/responses", {"model": "demo", "input": "hi", **body}), where

    return run(work())


def prompt_of(gateway, number=0):
    return TOKENIZER.decode(list(gateway.jobs[number].request.prompt_token_ids), skip_special_tokens=False)


async def with_client(play, use, served=TOOLED, gateway=None, folder=None):
    where = gateway or FakeGateway(play)
    async with running_app(where, served, folder=folder) as app:
        client = openai.AsyncOpenAI(api_key="k", base_url=f"{BASE}/v1", http_client=app.http(), max_retries=0)
        return await use(client)


def create(play, served=TOOLED, **body):
    async def use(client):
        return await client.responses.create(**{"model": "demo", "input": "hi", **body})

    return run(with_client(play, use, served))


def stream(play, served=TOOLED, **body):
    """Return the last response of a stream, and the snapshot of the client's helper where it is complete."""

    async def use(client):
        events = await client.responses.create(**{"model": "demo", "input": "hi", "stream": True, **body})
        return [event async for event in events]

    return run(with_client(play, use, served))


def comparable(response):
    return json.loads(fix(json.dumps(response.to_dict(), separators=(",", ":"))))


HEAD = (
    '"id":"resp_1","object":"response","created_at":1,"status":"STATUS","background":false,"completed_at":DONE,"error":null,'
    '"incomplete_details":null,"instructions":null,"max_output_tokens":null,"max_tool_calls":null,"model":"demo",'
    '"output":OUTPUT,"parallel_tool_calls":true,"previous_response_id":null,"prompt_cache_key":null,'
    '"reasoning":{"effort":null,"summary":null},"safety_identifier":null,"service_tier":"default","store":true,'
    '"temperature":1.0,"text":{"format":{"type":"text"}},"tool_choice":"auto","tools":[],"top_logprobs":0,"top_p":1.0,'
    '"truncation":"disabled","usage":USAGE,"user":null,"metadata":{}'
)


def head(status="in_progress", done="null", output="[]", usage="null"):
    text = HEAD.replace("STATUS", status).replace("DONE", done).replace("OUTPUT", output).replace("USAGE", usage)
    return "{" + text + "}"


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


def test_stateless_tool_round_trip_reaches_the_template():
    async def use(client):
        items = [{"role": "user", "content": "hi"}]
        first = await client.responses.create(model="demo", input=items, tools=[TOOL], store=False)
        items += [item.to_dict() for item in first.output]
        call = first.output[-1]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "42"})
        return await client.responses.create(model="demo", input=items, tools=[TOOL], store=False, instructions="Be brief.")

    gateway = FakeGateway(script(f"<think>so</think>Well{CALL}"))
    second = run(with_client(None, use, gateway=gateway))
    prompt = prompt_of(gateway, 1)
    assert "Be brief.<|im_end|>" in prompt
    assert "<think>so</think>" in prompt
    assert 'Well<tool_call>{"name": "f", "arguments": {"a": "' in prompt
    assert "<|im_start|>tool42<|im_end|>" in prompt
    assert second.instructions == "Be brief."


def test_conversation_goes_on_from_the_stored_response():
    async def use(client):
        first = await client.responses.create(model="demo", input="one", instructions="Old.", tools=[TOOL])
        call = first.output[-1]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": [{"type": "input_text", "text": "42"}]}
        second = await client.responses.create(model="demo", input=[result], previous_response_id=first.id, tools=[TOOL])
        third = await client.responses.create(model="demo", input="three", previous_response_id=second.id)
        return first, second, third

    gateway = FakeGateway(script(f"Well{CALL}"))
    first, second, third = run(with_client(None, use, gateway=gateway))
    assert (second.previous_response_id, third.previous_response_id) == (first.id, second.id)
    prompt = prompt_of(gateway, 2)
    assert "Old." not in prompt
    places = [prompt.index(text) for text in ("userone", "assistantWell", "tool42", "userthree")]
    assert places == sorted(places)


def test_what_was_asked_for_is_told_back():
    body = {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 7,
        "metadata": {"a": "b"},
        "tools": [TOOL],
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": "auto"},
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "p",
        "store": False,
        "truncation": "disabled",
        "text": {"format": {"type": "text"}},
    }
    answer, gateway = ask(script(CALL), **body, service_tier="auto", background=False, include=["reasoning.encrypted_content"])
    found = answer.json()
    assert {name: found[name] for name in body} == body
    params = gateway.jobs[0].request.params
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.9, 7)
    assert found["output"][0]["type"] == "message"
    assert "x-quire-ignored-params" not in answer.headers


def test_effort_becomes_the_switch_of_the_template():
    _, gateway = ask(script("Hi"), reasoning={"effort": "none"})
    assert prompt_of(gateway).endswith("<think>\n\n</think>\n\n")
    answer, _ = ask(script("Hi"), reasoning={"effort": "xhigh"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reasoning.effort")
    assert answer.json()["error"]["message"].startswith("reasoning.effort: ")


IMAGE = {"type": "input_image", "image_url": "http://x"}


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"input": None}, None, "input"),
        ({"input": ""}, "invalid_value", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": [{"role": "user"}]}, "missing_required_parameter", "input[0].content"),
        ({"input": [{"role": "boss", "content": "x"}]}, "invalid_value", "input[0].role"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "invalid_value", "input[0].content[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "output_text", "text": "x"}]}]},
            "invalid_value",
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "computer_call"}]}, "invalid_value", "input[0].type"),
        (
            {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
            "missing_required_parameter",
            "input[0].call_id",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "1"}]}, "invalid_value", "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_value", "tools[0].type"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "unsupported_value", "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "invalid_value", "tools[1].name"),
        ({"tools": [{**TOOL, "strict": True}]}, "invalid_value", "tools[0].strict"),
        ({"tool_choice": "required"}, "unsupported_parameter", "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "unsupported_parameter", "tool_choice"),
        ({"text": {"format": {"type": "json_object"}}}, "unsupported_parameter", "text"),
        ({"text": {"verbosity": "low"}}, "unsupported_parameter", "text"),
        ({"background": True}, "unsupported_parameter", "background"),
        ({"truncation": "auto"}, "unsupported_parameter", "truncation"),
        ({"conversation": "conv_1"}, "unsupported_parameter", "conversation"),
        ({"prompt": {"id": "x"}}, "unsupported_parameter", "prompt"),
        ({"include": ["file_search_call.results"]}, "unsupported_value", "include[0]"),
        ({"stream_options": {}}, "invalid_value", "stream_options"),
        ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
        ({"service_tier": "priority"}, "unsupported_parameter", "service_tier"),
    ],
)
def test_what_is_not_supported_is_refused(body, code, param):
    answer, gateway = ask(script("Hi"), **body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert code is None or error["code"] == code
    assert gateway.jobs == []


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (overloaded("busy", 3.0), openai.InternalServerError),
        (ApiError(429, "slow down", code="rate_limit_exceeded", retry_after_s=2), openai.RateLimitError),
        (ApiError(400, "no", param="x"), openai.BadRequestError),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_client_raises_its_class_for_an_error_before_the_first_token(error, kind, is_stream):
    async def use(client):
        with pytest.raises(kind) as caught:
            await client.responses.create(model="demo", input="hi", stream=is_stream)
        assert caught.value.code == error.code

    run(with_client(lambda job: [error], use))


def test_client_raises_for_what_is_not_there():
    async def use(client):
        for work in (
            client.responses.create(model="other", input="hi"),
            client.responses.create(model="demo", input="hi", previous_response_id="resp_none"),
            client.responses.retrieve("resp_none"),
            client.responses.delete("resp_none"),
            client.responses.cancel("resp_none"),
            client.responses.input_items.list("resp_none"),
        ):
            with pytest.raises(openai.NotFoundError):
                await work

    run(with_client(script("Hi"), use))


def failing(job):
    return [[ChoiceDelta(0, "Hi", [5])], overloaded("the engine is gone", 1.0)]


def test_error_in_mid_stream_fails_the_response_and_is_stored():
    async def use(client):
        stream = await client.responses.create(model="demo", input="hi", stream=True)
        events = [event async for event in stream]
        return events, await client.responses.retrieve(events[-1].response.id)

    events, stored = run(with_client(failing, use, served=PLAIN))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.failed"
    response = events[-1].response
    assert (response.status, response.error.code, response.error.message) == ("failed", "server_error", "the engine is gone")
    assert stored.to_dict() == response.to_dict()


def test_failed_store_fails_the_response():
    async def work():
        gateway = FakeGateway(script("Hi"))
        async with running_app(gateway, PLAIN) as app:

            async def fail(owner, record):
                raise ApiError(503, "the disk is full", code="storage_full")

            store = app.context.responses
            app.context.responses = type("Broken", (), {"put": staticmethod(fail), "history": store.history})()
            body = {"model": "demo", "input": "hi"}
            whole = await app.post("/v1/responses", body)
            streamed = await app.post("/v1/responses", {**body, "stream": True})
            app.context.responses = store
        return whole, streamed

    whole, streamed = run(work())
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "storage_full")
    assert names_of(streamed.text)[-2:] == ["response.output_item.done", "response.failed"]
    numbers = [data["sequence_number"] for _, data in events_of(streamed.text)]
    assert numbers == list(range(len(numbers)))


def test_error_after_a_comment_and_before_the_first_token_is_an_error_event():
    class SlowGateway(FakeGateway):
        def open(self, job):
            stream = super().open(job)
            play = stream._play

            async def late():
                await asyncio.sleep(0.05)
                async for delta in play():
                    yield delta

            stream._play = late
            return stream

    async def work():
        config = ServerConfig(keep_alive_comment_s=0.005)
        async with running_app(SlowGateway(lambda job: [overloaded("gone", 1.0)]), PLAIN, config) as app:
            return await app.post("/v1/responses", {"model": "demo", "input": "hi", "stream": True})

    answer = run(work())
    last = answer.text.split("\n\n")[-2]
    assert answer.text.startswith(": keep-alive\n\n")
    assert last == (
        'event: error\ndata: {"type":"error","sequence_number":0,"code":"overloaded","message":"gone","param":null}'
    )
