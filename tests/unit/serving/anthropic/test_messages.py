"""Messages over the real application: exact bytes, the official client, tools, thinking, errors."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random

import anthropic
import httpx2
import pytest

from quire.serving.config import ApiKey, ServerConfig
from quire.serving.errors import ApiError, engine_unavailable, overloaded
from quire.serving.link.messages import ChoiceDelta
from tests.unit.serving.fakes import TOOL_TEMPLATE, FakeGateway, make_served, pieces, text_script
from tests.unit.serving.real_app import BASE, events_of, fix, names_of, running_app

PLAIN = make_served()
TOOLED = make_served(TOOL_TEMPLATE)
TOKENIZER = TOOLED.tokenizer
USER = [{"role": "user", "content": "hi"}]
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é\\n", "b": [1, {"c": null}]}}\n</tool_call>'
INPUT = {"a": "é\n", "b": [1, {"c": None}]}
USAGE = '"cache_creation_input_tokens":0,"cache_read_input_tokens":'


def run(work):
    return asyncio.run(work)


def script(*texts, **options):
    return text_script(TOKENIZER, *texts, **options)


def ask(play, path="/v1/messages", served=TOOLED, gateway=None, headers=None, **body):
    """Return the answer over HTTP, and the gateway."""

    async def work():
        where = FakeGateway(play, **(gateway or {}))
        async with running_app(where, served) as app:
            base = {"model": "demo", "messages": USER}
            if path == "/v1/messages":
                base["max_tokens"] = 100
            return await app.post(path, {**base, **body}, **(headers or {})), where

    return run(work())


def prompt_of(gateway):
    return TOKENIZER.decode(list(gateway.jobs[0].request.prompt_token_ids), skip_special_tokens=False)


async def with_client(play, use, served=TOOLED, config=None, key="k", gateway=None):
    where = gateway or FakeGateway(play)
    async with running_app(where, served, config) as app:
        client = anthropic.AsyncAnthropic(api_key=key, base_url=BASE, http_client=app.http(), max_retries=0)
        return await use(client)


def create(play, served=TOOLED, **body):
    async def use(client):
        return await client.messages.create(**{"model": "demo", "messages": USER, "max_tokens": 100, **body})

    return run(with_client(play, use, served))


def stream(play, served=TOOLED, **body):
    async def use(client):
        async with client.messages.stream(**{"model": "demo", "messages": USER, "max_tokens": 100, **body}) as events:
            return await events.get_final_message()

    return run(with_client(play, use, served))


def comparable(message):
    found = message.to_dict()
    found.pop("stop_details", None)
    for block in found["content"]:
        block.pop("parsed_output", None)
        block.update({"signature": "SIG"} if "signature" in block else {})
    return json.loads(fix(json.dumps(found, sort_keys=True, separators=(",", ":"))))


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


def test_tool_round_trip_reaches_the_template():
    async def use(client):
        first = await client.messages.create(model="demo", max_tokens=100, messages=USER, tools=[TOOL])
        call = first.content[1]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "42"}], "is_error": True}
        messages = [*USER, {"role": "assistant", "content": first.content}]
        messages.append({"role": "user", "content": [result, {"type": "text", "text": "and?"}]})
        await client.messages.create(model="demo", max_tokens=100, messages=messages, tools=[TOOL])

    gateway = FakeGateway(script(f"Well{CALL}"))
    run(with_client(None, use, gateway=gateway))
    prompt = TOKENIZER.decode(list(gateway.jobs[1].request.prompt_token_ids), skip_special_tokens=False)
    assert 'Well<tool_call>{"name": "f", "arguments": {"a": "' in prompt
    assert "<|im_start|>toolError: 42<|im_end|>" in prompt
    assert "<|im_start|>userand?<|im_end|>" in prompt


def test_own_thinking_is_shown_to_the_template_and_foreign_thinking_is_not():
    async def use(client):
        first = await client.messages.create(model="demo", max_tokens=100, messages=USER)
        assert first.content[0].thinking == "secret plan"
        for content in (
            [block.to_dict() for block in first.content],
            [{**first.content[0].to_dict(), "thinking": "other"}, first.content[1].to_dict()],
            [{"type": "redacted_thinking", "data": "x"}, first.content[1].to_dict()],
        ):
            messages = [*USER, {"role": "assistant", "content": content}, {"role": "user", "content": "go on"}]
            await client.messages.create(model="demo", max_tokens=100, messages=messages)

    gateway = FakeGateway(script("<think>secret plan</think>Hello"))
    run(with_client(None, use, gateway=gateway))
    prompts = [TOKENIZER.decode(list(job.request.prompt_token_ids), skip_special_tokens=False) for job in gateway.jobs]
    assert "<think>secret plan</think>" in prompts[1]
    assert "think>" not in prompts[2] + prompts[3]
    assert all("Hello" in prompt for prompt in prompts[1:])


def test_thinking_of_another_owner_is_not_shown():
    keys = {name: hashlib.sha256(name.encode()).digest() for name in ("ann", "bob")}
    config = ServerConfig(api_keys=tuple(ApiKey(name, digest) for name, digest in keys.items()))
    gateway = FakeGateway(script("<think>secret</think>Hello"))

    async def work():
        async with running_app(gateway, TOOLED, config) as app:
            ann, bob = (
                anthropic.AsyncAnthropic(api_key=name, base_url=BASE, http_client=app.http(), max_retries=0) for name in keys
            )
            first = await ann.messages.create(model="demo", max_tokens=100, messages=USER)
            messages = [*USER, {"role": "assistant", "content": first.content}, *USER]
            for client in (ann, bob):
                await client.messages.create(model="demo", max_tokens=100, messages=messages)

    run(work())
    shown = ["secret" in TOKENIZER.decode(list(job.request.prompt_token_ids)) for job in gateway.jobs]
    assert shown == [False, True, False]


@pytest.mark.parametrize(
    ("thinking", "is_off"),
    [({"type": "disabled"}, True), ({"type": "enabled", "budget_tokens": 2000}, False), ({"type": "adaptive"}, False)],
)
def test_thinking_becomes_the_switch_of_the_template(thinking, is_off):
    _, gateway = ask(script("Hi"), thinking=thinking)
    assert prompt_of(gateway).endswith("<think>\n\n</think>\n\n") == is_off


@pytest.mark.parametrize(
    ("template", "thinking", "shown"),
    [
        ("{{ reasoning_effort }} 'low' 'medium' 'high'", {"type": "enabled", "budget_tokens": 2000}, "low"),
        ("{{ reasoning_effort }} 'low' 'medium' 'high'", {"type": "enabled", "budget_tokens": 9000}, "medium"),
        ("{{ reasoning_effort }} 'low' 'medium' 'high'", {"type": "enabled", "budget_tokens": 30000}, "high"),
        ("{{ messages[0].content }}", {"type": "disabled"}, "hi"),
        ("{{ messages[0].content }}", {"type": "adaptive"}, "hi"),
        ("{{ messages[0].content }}", {"type": "enabled", "budget_tokens": 2000}, None),
        ("{{ messages[0].content }}<think></think>{{ messages[0].content }}", {"type": "disabled"}, None),
    ],
)
def test_thinking_fits_the_template_or_is_refused(template, thinking, shown):
    answer, gateway = ask(script("Hi"), served=make_served(template), thinking=thinking)
    if shown is None:
        assert answer.status_code == 400
        assert "thinking" in answer.json()["error"]["message"]
    else:
        assert prompt_of(gateway).startswith(shown)


def test_effort_that_the_template_does_not_know_is_refused():
    answer, _ = ask(script("Hi"), output_config={"effort": "max"})
    assert answer.status_code == 400
    assert "output_config.effort" in answer.json()["error"]["message"]


def test_omitted_thinking_is_left_out():
    answer, _ = ask(script("<think>x</think>Hi"), thinking={"type": "adaptive", "display": "omitted"})
    assert [block["type"] for block in answer.json()["content"]] == ["text"]


def test_system_blocks_lose_the_billing_header():
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: cc=1; h=abc"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"type": "text", "text": "Be kind."},
    ]
    _, gateway = ask(script("Hi"), system=blocks)
    assert "<|im_start|>systemBe brief.\nBe kind.<|im_end|>" in prompt_of(gateway)
    assert "billing" not in prompt_of(gateway)


def test_last_message_of_the_assistant_is_continued():
    messages = [*USER, {"role": "assistant", "content": "The answer is ("}]
    _, gateway = ask(script("Hi"), messages=messages)
    assert prompt_of(gateway).endswith("<|im_start|>assistantThe answer is (")


def test_turns_of_the_user_in_a_row_are_one():
    _, gateway = ask(script("Hi"), messages=[*USER, {"role": "user", "content": [{"type": "text", "text": "there"}]}])
    assert "<|im_start|>userhi\nthere<|im_end|>" in prompt_of(gateway)


def test_tool_choice_none_hides_the_tools():
    answer, gateway = ask(script(CALL), tools=[TOOL], tool_choice={"type": "none"})
    assert answer.json()["content"][0]["type"] == "text"
    assert "description" not in prompt_of(gateway)


def test_disabled_parallel_tool_use_ends_after_the_first_call():
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    answer, gateway = ask(script(f"{CALL}{CALL}"), tools=[TOOL], tool_choice=choice)
    assert [block["type"] for block in answer.json()["content"]] == ["tool_use"]
    assert gateway.streams[0].aborts == ["tool_cut"]


def test_count_of_tokens_is_that_of_the_prompt():
    body = {"system": "Be brief.", "tools": [TOOL], "thinking": {"type": "disabled"}}
    counted, _ = ask(script("Hi"), path="/v1/messages/count_tokens", **body)
    answer, gateway = ask(script("Hi"), **body)
    assert counted.json() == {"input_tokens": len(gateway.jobs[0].request.prompt_token_ids)}
    assert answer.json()["usage"]["input_tokens"] == counted.json()["input_tokens"]


def test_sampling_fields_reach_the_engine():
    _, gateway = ask(script("Hi"), temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["a", "b"], max_tokens=9)
    params = gateway.jobs[0].request.params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.9, 7, 9)
    assert list(params.stop) == ["a", "b"]


HINTS = {
    "cache_control": {"type": "ephemeral"},
    "metadata": {"user_id": "u"},
    "service_tier": "standard_only",
    "speed": "standard",
    "container": None,
}


def test_hints_are_accepted():
    answer, _ = ask(script("Hi"), headers={"anthropic-version": "2023-06-01", "anthropic-beta": "x"}, **HINTS)
    assert answer.status_code == 200
    assert "x-quire-ignored-params" not in answer.headers


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
RESULT = {"type": "tool_result", "tool_use_id": "nobody"}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, ["max_tokens"]),
        ({"max_tokens": 0}, ["max_tokens"]),
        ({"messages": []}, ["messages"]),
        ({"messages": [{"role": "tool", "content": "x"}]}, ["messages[0].role"]),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, ["messages[0].content[0].type", "image", "text"]),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, ["document", "text"]),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, ["messages[0].content[0].tool_use_id", "nobody"]),
        ({"messages": [{"role": "user", "content": [{**RESULT, "content": [IMAGE]}]}]}, ["content[0].content[0].type"]),
        ({"messages": [*USER, {"role": "assistant", "content": [USE]}]}, ["messages[1]", "tool_result"]),
        ({"tools": [TOOL, TOOL]}, ["tools", "'f'"]),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, ["tools", "web_search_20250305"]),
        ({"tools": [{**TOOL, "strict": True}]}, ["strict"]),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, ["tool_choice", "constrained"]),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, ["tool_choice", "constrained"]),
        ({"output_config": {"format": {"type": "json_schema"}}}, ["output_config", "constrained"]),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, ["budget_tokens"]),
        ({"temperature": 1.5}, ["temperature"]),
        ({"container": "c"}, ["container"]),
        ({"mcp_servers": [{}]}, ["mcp_servers"]),
        ({"speed": "fast"}, ["speed"]),
        ({"stop_sequences": [""]}, ["stop_sequences[0]"]),
    ],
)
def test_what_is_not_supported_is_refused_in_the_shape_of_the_api(body, words):
    answer, gateway = ask(script("Hi"), **body)
    found = answer.json()
    assert answer.status_code == 400
    assert found["type"] == "error"
    assert found["request_id"] == answer.headers["request-id"]
    assert found["error"]["type"] == "invalid_request_error"
    assert all(word in found["error"]["message"] for word in words)
    assert gateway.jobs == []


def test_prompt_that_is_too_long_is_refused():
    def refuse(job):
        return [ApiError(400, "the prompt is too long for max_model_len", code="context_length_exceeded", param="prompt")]

    answer, _ = ask(refuse, messages=[{"role": "user", "content": "a b c"}])
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (overloaded("busy", 3.0), anthropic.InternalServerError),
        (engine_unavailable("loading"), anthropic.InternalServerError),
        (ApiError(429, "slow down", code="rate_limit_exceeded", retry_after_s=2), anthropic.RateLimitError),
        (ApiError(400, "no", param="x"), anthropic.BadRequestError),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_client_raises_its_class_for_an_error_before_the_first_token(error, kind, is_stream):
    async def use(client):
        with pytest.raises(kind) as caught:
            await client.messages.create(model="demo", max_tokens=10, messages=USER, stream=is_stream)
        assert caught.value.request_id.startswith("req_")
        assert caught.value.status_code == (529 if error.code == "overloaded" else error.status)
        assert caught.value.response.headers.get("retry-after") == error.headers().get("retry-after")
        assert caught.value.body["error"]["message"].endswith(error.message)

    run(with_client(lambda job: [error], use))


def test_client_raises_for_a_model_that_is_not_served_and_a_key_that_is_not_known():
    async def missing(client):
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(model="other", max_tokens=10, messages=USER)

    async def unknown(client):
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await client.messages.create(model="demo", max_tokens=10, messages=USER)
        assert caught.value.body["error"]["type"] == "authentication_error"

    run(with_client(script("Hi"), missing))
    config = ServerConfig(api_keys=(ApiKey("ann", hashlib.sha256(b"ann").digest()),))
    run(with_client(script("Hi"), unknown, config=config))


def test_error_in_mid_stream_is_an_event():
    def play(job):
        return [[ChoiceDelta(0, "Hi", [5])], overloaded("the engine is gone", 1.0)]

    answer, _ = ask(play, served=PLAIN, stream=True)
    assert names_of(answer.text)[-2:] == ["content_block_delta", "error"]
    assert events_of(answer.text)[-1][1]["error"] == {"type": "overloaded_error", "message": "the engine is gone"}

    async def use(client):
        with pytest.raises(anthropic.APIStatusError, match="the engine is gone"):
            async with client.messages.stream(model="demo", max_tokens=10, messages=USER) as events:
                await events.get_final_message()

    run(with_client(play, use, served=PLAIN))


def test_client_that_goes_aborts_the_request():
    async def work():
        gateway = FakeGateway(script("Hello there you all"), blocks_after=2)
        async with running_app(gateway, PLAIN) as app:
            messages, gone = [], asyncio.Event()
            body = json.dumps({"model": "demo", "max_tokens": 9, "messages": USER, "stream": True}).encode()
            parts = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive():
                if parts:
                    return parts.pop()
                await gone.wait()
                return {"type": "http.disconnect"}

            async def send(message):
                messages.append(message)
                if len(messages) == 3:
                    gone.set()

            request = httpx2.Request("POST", f"{BASE}/v1/messages", content=body, headers={"content-type": "application/json"})
            scope = {
                "type": "http",
                "asgi": {"version": "3.0"},
                "http_version": "1.1",
                "method": "POST",
                "path": "/v1/messages",
                "raw_path": b"/v1/messages",
                "root_path": "",
                "scheme": "http",
                "query_string": b"",
                "headers": [(key.lower(), value) for key, value in request.headers.raw],
                "client": ("127.0.0.1", 1),
                "server": ("127.0.0.1", 80),
            }
            await app.transport.app(scope, receive, send)
        assert gateway.streams[0].aborts == ["cancelled"]
        assert gateway.streams[0].is_left

    run(work())
