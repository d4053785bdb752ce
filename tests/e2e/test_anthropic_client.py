"""The official Anthropic client against a real server, synchronous and asynchronous."""

import asyncio
import json

import anthropic
import pytest

from tests.e2e.tooled_model import KEY, MAX_BODY_BYTES, SCHEMA, fits_schema

MESSAGES = [{"role": "user", "content": "Tell me of the sea."}]
TOOLS = [{"name": "weather", "description": "The weather.", "input_schema": SCHEMA}]
GREEDY = {"temperature": 0}  # older clients state it themselves


@pytest.fixture(scope="module", params=["sync", "async"])
def call(request, tooled_server):
    """Return what calls a method of a client and returns its result, events of streams as a list."""
    options = {"base_url": tooled_server.url, "api_key": KEY, "max_retries": 0}
    if request.param == "sync":
        with anthropic.Anthropic(**options) as client:

            def ask(method, **fields):
                found = method(client)(**fields)
                return list(found) if fields.get("stream") else found

            yield ask
        return
    with asyncio.Runner() as runner:
        client = anthropic.AsyncAnthropic(**options)

        async def go(method, fields):
            found = await method(client)(**fields)
            return [event async for event in found] if fields.get("stream") else found

        yield lambda method, **fields: runner.run(go(method, fields))
        runner.run(client.close())


def create(client):
    return client.messages.create


def count(client):
    return client.messages.count_tokens


def message(call, **fields):
    body = {"model": "demo", "messages": MESSAGES, "max_tokens": 12, "extra_body": GREEDY, **fields}
    return call(create, **body)


def text_of(answer):
    return "".join(block.text for block in answer.content if block.type == "text")


def refusal(call, method=create, **fields):
    with pytest.raises(anthropic.APIStatusError) as caught:
        call(method, **{"model": "demo", "messages": MESSAGES, "max_tokens": 5, **fields})
    return caught.value


def test_message_has_text_and_usage(call, tooled_server):
    answer = message(call)
    assert (answer.type, answer.role, answer.model, answer.stop_reason) == ("message", "assistant", "demo", "max_tokens")
    assert answer.usage.output_tokens == 12
    chat = {"model": "demo", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    other = tooled_server.post("/v1/chat/completions", chat).json()
    assert text_of(answer) == other["choices"][0]["message"]["content"] != ""


def test_events_of_a_stream_come_in_order_and_join_to_the_message(call):
    events = message(call, stream=True)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) <= {"content_block_delta", "ping"}
    text = "".join(event.delta.text for event in events if event.type == "content_block_delta")
    assert text == text_of(message(call))
    assert (events[-2].delta.stop_reason, events[-2].usage.output_tokens) == ("max_tokens", 12)


def test_stop_sequence_ends_the_message_and_is_named(call):
    whole = text_of(message(call, max_tokens=30))
    stop = whole.split()[3]
    answer = message(call, max_tokens=30, stop_sequences=["never said", stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert text_of(answer) == whole[: whole.index(stop)]
    events = message(call, max_tokens=30, stop_sequences=[stop], stream=True)
    assert (events[-2].delta.stop_reason, events[-2].delta.stop_sequence) == ("stop_sequence", stop)


def test_system_is_a_part_of_the_prompt_as_text_and_as_blocks(call):
    plain, blocks = (message(call, system=system) for system in ("Be brief.", [{"type": "text", "text": "Be brief."}]))
    assert text_of(plain) == text_of(blocks)
    assert text_of(plain) != text_of(message(call))
    assert num_input(plain) == num_input(blocks) > num_input(message(call))


def num_input(answer):
    return answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize("more", [{}, {"system": "Be brief."}, {"tools": TOOLS}])
def test_tokens_are_counted_as_a_message_uses_them(call, more):
    counted = call(count, model="demo", messages=MESSAGES, **more)
    assert counted.input_tokens == num_input(message(call, max_tokens=1, **more))


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}], ids=lambda choice: choice["type"])
def test_tool_is_called_with_an_input_of_its_schema_when_it_has_to_be(call, choice):
    fields = {"tools": TOOLS, "tool_choice": {**choice, "disable_parallel_tool_use": True}, "max_tokens": 200}
    answer = message(call, **fields)
    assert answer.stop_reason == "tool_use"
    (used,) = [block for block in answer.content if block.type == "tool_use"]
    assert used.name == "weather"
    assert fits_schema(used.input)
    events = message(call, **fields, stream=True)
    pieces = [event.delta.partial_json for event in events if event.type == "content_block_delta"]
    assert json.loads("".join(pieces)) == used.input


def test_conversation_goes_on_with_what_the_tool_returned(call):
    used = message(call, tools=TOOLS, tool_choice={"type": "any"}, max_tokens=200).content[-1]
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": [used.model_dump()]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": used.id, "content": "Rain."}]},
    ]
    answer = message(call, messages=turns, tools=TOOLS, tool_choice={"type": "none"})
    assert answer.stop_reason == "max_tokens"
    assert num_input(answer) > call(count, model="demo", messages=MESSAGES).input_tokens
    turns[-1]["content"][0]["tool_use_id"] = "toolu_unknown"
    assert "tool_use_id" in str(refusal(call, messages=turns, tools=TOOLS))


def test_message_is_json_of_a_schema_when_one_is_given(call):
    wanted = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = message(call, max_tokens=200, output_config=wanted)
    assert answer.stop_reason == "end_turn"
    assert fits_schema(json.loads(text_of(answer)))


def test_answer_goes_on_with_the_last_message_of_the_assistant(call):
    beginning = "The sea was"
    answer = message(call, messages=[*MESSAGES, {"role": "assistant", "content": beginning}])
    assert not text_of(answer).startswith(beginning)
    assert text_of(answer) != text_of(message(call))


@pytest.mark.parametrize(
    ("fields", "kind", "word"),
    [
        ({"model": "other"}, anthropic.NotFoundError, "other"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
        ({"messages": []}, anthropic.BadRequestError, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, anthropic.BadRequestError, "messages[0].content[0]"),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, anthropic.BadRequestError, "thinking"),
        ({"extra_body": {"stop": ["a"]}}, anthropic.BadRequestError, "stop_sequences"),
        ({"messages": [{"role": "user", "content": "sea " * 2000}]}, anthropic.BadRequestError, "max_model_len"),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_refusal_is_the_exception_of_its_kind_and_says_what_is_wrong(call, fields, kind, word):
    error = refusal(call, **fields)
    assert type(error) is kind
    assert word in str(error)
    assert error.body["type"] == "error"
    assert error.request_id.startswith("req_")


def test_body_that_is_too_long_is_refused_by_its_status(call):
    error = refusal(call, messages=[{"role": "user", "content": "x" * MAX_BODY_BYTES}])
    assert error.status_code == 413
    assert error.body["error"]["type"] == "request_too_large"


def test_wrong_key_is_an_authentication_error(tooled_server):
    client = anthropic.Anthropic(base_url=tooled_server.url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as caught:
        client.messages.create(model="demo", messages=MESSAGES, max_tokens=5)
    assert caught.value.body["error"]["type"] == "authentication_error"


def test_stream_helpers_give_the_whole_message(tooled_server):
    options = {"base_url": tooled_server.url, "api_key": KEY, "max_retries": 0}
    body = {"model": "demo", "messages": MESSAGES, "max_tokens": 12, "extra_body": GREEDY}
    tool = {**body, "tools": TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "max_tokens": 200}
    client = anthropic.Anthropic(**options)
    with client.messages.stream(**body) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    whole = client.messages.create(**body)
    assert "".join(texts) == text_of(final) == text_of(whole)
    assert final.usage.output_tokens == whole.usage.output_tokens

    async def go():
        async with anthropic.AsyncAnthropic(**options) as other, other.messages.stream(**tool) as stream:
            return await stream.get_final_message()

    assert asyncio.run(go()).content[-1].input == client.messages.create(**tool).content[-1].input


def test_request_ends_when_the_client_leaves_its_stream(tooled_server):
    before = tooled_server.metric("quire:stream_aborts_total", reason="disconnect")

    async def go():
        async with anthropic.AsyncAnthropic(base_url=tooled_server.url, api_key=KEY, max_retries=0) as client:
            body = {"model": "demo", "messages": MESSAGES, "max_tokens": 900, "extra_body": {**GREEDY}}
            async with client.messages.stream(**body) as stream:
                async for _ in stream.text_stream:
                    break

    asyncio.run(go())
    tooled_server.wait_for(tooled_server.is_idle)
    assert tooled_server.metric("quire:stream_aborts_total", reason="disconnect") >= before


def test_many_messages_at_once_have_the_text_of_one_alone(tooled_server):
    async def go():
        async with anthropic.AsyncAnthropic(base_url=tooled_server.url, api_key=KEY, max_retries=0) as client:

            async def one(word):
                body = {"model": "demo", "messages": [{"role": "user", "content": word}], "max_tokens": 8, "extra_body": GREEDY}
                return text_of(await client.messages.create(**body))

            words = ["sea", "wind", "rain", "snow"]
            return await asyncio.gather(*[one(word) for word in words * 4]), [await one(word) for word in words]

    together, alone = asyncio.run(go())
    assert together == alone * 4
