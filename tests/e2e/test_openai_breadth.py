"""The official OpenAI client, synchronous and asynchronous, over responses, tools, embeddings, files and batches."""

import asyncio
import json

import openai
import pydantic
import pytest

from tests.e2e.tooled_model import KEY, MAX_BODY_BYTES, SCHEMA, fits_schema

MESSAGES = [{"role": "user", "content": "Tell me of the sea."}]
INPUT = "Tell me of the sea."
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA}}
FLAT_TOOL = {"type": "function", "name": "weather", "description": "The weather.", "parameters": SCHEMA, "strict": True}
NAMED = {"type": "function", "function": {"name": "weather"}}
FORMAT = {"type": "json_schema", "name": "trip", "schema": SCHEMA, "strict": True}


class Trip(pydantic.BaseModel):
    """What SCHEMA says, for the helpers that take a class."""

    model_config = {"extra": "forbid"}
    city: str = pydantic.Field(max_length=12)
    days: int = pydantic.Field(ge=0, le=9)


@pytest.fixture(scope="module", params=["sync", "async"])
def ask(request, tooled_server):
    """Return what runs `work(client, go)`: `go(call)` is the result of a method of either client, a stream as a list."""
    options = {"base_url": f"{tooled_server.url}/v1", "api_key": KEY, "max_retries": 0}

    async def go_async(call):
        found = await call
        return [event async for event in found] if isinstance(found, openai.AsyncStream) else found

    async def go_sync(found):
        return list(found) if isinstance(found, openai.Stream) else found

    is_async = request.param == "async"
    with asyncio.Runner() as runner:
        client = openai.AsyncOpenAI(**options) if is_async else openai.OpenAI(**options)
        yield lambda work: runner.run(work(client, go_async if is_async else go_sync))
        closed = client.close()
        if is_async:
            runner.run(closed)


def chat_of(ask, **fields):
    body = {"model": "demo", "messages": MESSAGES, "max_tokens": 12, "temperature": 0, **fields}
    return ask(lambda client, go: go(client.chat.completions.create(**body)))


def response_of(ask, **fields):
    body = {"model": "demo", "input": INPUT, "max_output_tokens": 12, "temperature": 0, **fields}
    return ask(lambda client, go: go(client.responses.create(**body)))


def refusal(ask, call):
    with pytest.raises(openai.APIStatusError) as caught:
        ask(lambda client, go: go(call(client)))
    return caught.value


# Chats with tools.


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_tool_is_called_with_arguments_of_its_schema_when_it_has_to_be(ask, choice):
    fields = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 200}
    (choice_of_answer,) = chat_of(ask, **fields).choices
    (used,) = choice_of_answer.message.tool_calls
    assert used.function.name == "weather"
    assert fits_schema(json.loads(used.function.arguments))
    pieces, names, ids = "", [], []
    for chunk in chat_of(ask, **fields, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            names += [call.function.name] if call.function.name else []
            ids += [call.id] if call.id else []
            pieces += call.function.arguments or ""
    assert (names, len(ids)) == (["weather"], 1)
    assert json.loads(pieces) == json.loads(used.function.arguments)


def test_tools_are_shown_and_need_not_be_called_when_the_choice_is_free(ask):
    (choice,) = chat_of(ask, tools=[TOOL], tool_choice="auto").choices
    assert choice.finish_reason in ("length", "stop", "tool_calls")
    shown, hidden = (chat_of(ask, tools=[TOOL], tool_choice=name).usage.prompt_tokens for name in ("auto", "none"))
    assert shown > hidden == chat_of(ask).usage.prompt_tokens


def test_chat_goes_on_with_what_the_tool_returned(ask):
    (choice,) = chat_of(ask, tools=[TOOL], tool_choice="required", max_tokens=200).choices
    call = choice.message.tool_calls[0]
    turns = [*MESSAGES, choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "Rain."}]
    assert chat_of(ask, messages=turns, tools=[TOOL]).usage.prompt_tokens > chat_of(ask).usage.prompt_tokens


def test_helper_parses_an_answer_into_a_class(ask):
    body = {"model": "demo", "messages": MESSAGES, "max_tokens": 200, "temperature": 0, "response_format": Trip}
    (choice,) = ask(lambda client, go: go(client.chat.completions.parse(**body))).choices
    assert isinstance(choice.message.parsed, Trip)


def test_n_answers_have_logprobs_in_a_stream(ask):
    chunks = chat_of(ask, n=2, temperature=1, seed=4, logprobs=True, top_logprobs=2, stream=True)
    for index in range(2):
        pieces = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == index]
        tokens = [entry for piece in pieces if piece.logprobs for entry in piece.logprobs.content]
        assert len(tokens) == 12
        assert "".join(piece.delta.content or "" for piece in pieces) == b"".join(bytes(one.bytes) for one in tokens).decode()


# Responses.


def test_response_is_stored_listed_and_deleted(ask):
    made = response_of(ask, metadata={"a": "b"})
    assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert made.usage.output_tokens == 12
    assert made.output_text == chat_of(ask).choices[0].message.content
    found = ask(lambda client, go: go(client.responses.retrieve(made.id)))
    assert (found.output_text, found.metadata) == (made.output_text, {"a": "b"})

    async def work(client, go):
        page = await go(client.responses.input_items.list(made.id))
        await go(client.responses.delete(made.id))
        return page.data

    (item,) = ask(work)
    assert item.content[0].text == INPUT
    assert refusal(ask, lambda client: client.responses.retrieve(made.id)).status_code == 404


def test_response_goes_on_from_a_stored_one_as_from_its_items(ask):
    first = response_of(ask)
    following = response_of(ask, input="And of the wind?", previous_response_id=first.id)
    said = [{"role": "user", "content": INPUT}, *[item.model_dump() for item in first.output]]
    repeated = response_of(ask, input=[*said, {"role": "user", "content": "And of the wind?"}], store=False)
    assert following.output_text == repeated.output_text
    assert refusal(ask, lambda client: client.responses.retrieve(repeated.id)).status_code == 404


def test_events_of_a_response_are_numbered_and_join_to_the_whole(ask):
    events = response_of(ask, stream=True)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.incomplete"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == response_of(ask).output_text


def test_response_is_json_of_a_schema_when_one_is_given(ask):
    found = response_of(ask, text={"format": FORMAT}, max_output_tokens=200)
    assert found.status == "completed"
    assert fits_schema(json.loads(found.output_text))
    body = {"model": "demo", "input": INPUT, "max_output_tokens": 200, "temperature": 0, "text_format": Trip}
    assert isinstance(ask(lambda client, go: go(client.responses.parse(**body))).output_parsed, Trip)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}], ids=["required", "named"])
def test_function_is_called_in_a_response_when_it_has_to_be(ask, choice):
    fields = {"tools": [FLAT_TOOL], "tool_choice": choice, "parallel_tool_calls": False, "max_output_tokens": 200}
    made = response_of(ask, **fields)
    (used,) = [item for item in made.output if item.type == "function_call"]
    assert fits_schema(json.loads(used.arguments))
    events = response_of(ask, **fields, stream=True)
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == used.arguments
    result = {"type": "function_call_output", "call_id": used.call_id, "output": "Rain."}
    assert response_of(ask, input=[result], previous_response_id=made.id).status == "incomplete"


def test_helper_of_streams_gives_the_whole_response(tooled_server):
    client = openai.OpenAI(base_url=f"{tooled_server.url}/v1", api_key=KEY, max_retries=0)
    body = {"model": "demo", "input": INPUT, "max_output_tokens": 200, "temperature": 0, "text": {"format": FORMAT}}
    with client.responses.stream(**body) as stream:
        final = stream.get_final_response()
    assert final.output_text == client.responses.create(**body).output_text
    client.close()


# Embeddings, files, batches.


def test_embedding_does_not_depend_on_its_neighbours(ask):
    def embedded(texts):
        return ask(lambda client, go: go(client.embeddings.create(model="demo", input=texts)))

    both, alone = embedded(["The sea.", "A cold morning."]), embedded("A cold morning.")
    assert both.data[1].embedding == alone.data[0].embedding
    assert both.usage.total_tokens > alone.usage.total_tokens


def batch_lines(count):
    body = {"model": "demo", "prompt": "It was", "max_tokens": 3}
    lines = [{"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions", "body": body} for n in range(count)]
    return "\n".join(json.dumps(line) for line in lines).encode()


def test_files_are_listed_page_by_page_and_deleted(ask):
    async def work(client, go):
        made = [await go(client.files.create(file=(f"{n}.jsonl", batch_lines(1)), purpose="batch")) for n in range(3)]
        first = await go(client.files.list(purpose="batch", limit=2, order="desc"))
        second = await go(client.files.list(purpose="batch", limit=2, order="desc", after=first.data[-1].id))
        listed = [file.id for file in [*first.data, *second.data]][:3]
        content = await go(client.files.content(made[0].id))
        deleted = [(await go(client.files.delete(file.id))).deleted for file in made]
        return made, listed, content.content, deleted

    made, listed, content, deleted = ask(work)
    assert sorted(listed) == sorted(file.id for file in made)
    assert content == batch_lines(1)
    assert deleted == [True] * 3
    error = refusal(ask, lambda client: client.files.list(after="zz"))
    assert (error.status_code, error.param) == (400, "after")
    error = refusal(ask, lambda client: client.batches.list(after=made[0].id))
    assert (error.status_code, error.param) == (400, "after")
    assert refusal(ask, lambda client: client.files.retrieve(made[0].id)).status_code == 404


def test_batch_goes_from_upload_to_output_and_can_be_cancelled_once(ask):
    async def work(client, go):
        file = await go(client.files.create(file=("in.jsonl", batch_lines(4)), purpose="batch"))
        fields = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = await go(client.batches.create(**fields, metadata={"who": "ann"}))
        while (batch := await go(client.batches.retrieve(batch.id))).status not in ("completed", "failed"):
            await asyncio.sleep(0.05)
        output = await go(client.files.content(batch.output_file_id))
        listed = await go(client.batches.list(limit=1))
        return batch, output.text, listed.data

    batch, output, listed = ask(work)
    assert (batch.status, batch.request_counts.completed, batch.metadata) == ("completed", 4, {"who": "ann"})
    assert {json.loads(line)["custom_id"] for line in output.splitlines()} == {"r0", "r1", "r2", "r3"}
    assert [one.id for one in listed] == [batch.id]
    assert refusal(ask, lambda client: client.batches.cancel(batch.id)).code == "batch_not_cancellable"


def test_cancelled_batch_is_no_client_that_went(tooled_server):
    def counts():
        aborted = tooled_server.metric("quire:stream_aborts_total", reason="cancelled")
        return aborted, tooled_server.metric("quire:client_disconnects_total")

    def num_dispatched():
        return tooled_server.metric("quire:queue_wait_seconds_count", **{"class": "batch"})

    client = openai.OpenAI(base_url=f"{tooled_server.url}/v1", api_key=KEY, max_retries=0)
    tooled_server.wait_for(tooled_server.is_idle)
    (num_cancelled, num_gone), num_before = counts(), num_dispatched()
    body = {"model": "demo", "prompt": "It was", "max_tokens": 900, "ignore_eos": True}
    data = json.dumps({"custom_id": "r", "method": "POST", "url": "/v1/completions", "body": body}).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    with tooled_server.frozen_engine():
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        # A batch is in progress before its line is: one that the engine does not have yet is cancelled without an abort.
        tooled_server.wait_for(lambda: num_dispatched() == num_before + 1)
        client.batches.cancel(batch.id)
    tooled_server.wait_for(lambda: client.batches.retrieve(batch.id).status == "cancelled")
    tooled_server.wait_for(lambda: counts()[0] == num_cancelled + 1)
    assert counts()[1] == num_gone
    client.close()


# Refusals.


@pytest.mark.parametrize(
    ("call", "kind", "param"),
    [
        (lambda client: client.models.retrieve("other"), openai.NotFoundError, "model"),
        (lambda client: client.responses.create(model="demo", input=[]), openai.BadRequestError, "input"),
        (
            lambda client: client.responses.create(
                model="demo", input="x", tools=[{"type": "code_interpreter", "container": {"type": "auto"}}]
            ),
            openai.BadRequestError,
            "tools[0].type",
        ),
        (lambda client: client.embeddings.create(model="demo", input=""), openai.BadRequestError, "input"),
        (
            lambda client: client.chat.completions.create(model="demo", messages=MESSAGES, verbosity="low"),
            openai.BadRequestError,
            "verbosity",
        ),
        (
            lambda client: client.chat.completions.create(
                model="demo", messages=MESSAGES, extra_body={"enable_thinking": True}
            ),
            openai.BadRequestError,
            "enable_thinking",
        ),
        (
            lambda client: client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "sea " * 2000}]),
            openai.BadRequestError,
            "messages",
        ),
        (lambda client: client.responses.create(model="demo", input="sea " * 2000), openai.BadRequestError, "input"),
        (
            lambda client: client.completions.create(model="demo", prompt="x" * MAX_BODY_BYTES),
            openai.APIStatusError,
            None,
        ),
    ],
)
def test_refusal_is_the_exception_of_its_kind_and_names_the_field(ask, call, kind, param):
    error = refusal(ask, call)
    assert isinstance(error, kind)
    assert error.param == param
    assert error.request_id.startswith("req_")


def test_unknown_fields_are_told_with_their_paths(ask):
    async def work(client, go):
        messages = [{"role": "user", "content": "x", "mood": "calm"}]
        extra = {"colour": "blue", "chat_template_kwargs": {"depth": 3}}
        fields = {"model": "demo", "messages": messages, "max_tokens": 2, "extra_body": extra}
        return await go(client.chat.completions.with_raw_response.create(**fields))

    told = ask(work).headers["x-quire-ignored-params"].split(",")
    assert set(told) == {"messages[0].mood", "colour", "chat_template_kwargs.depth"}


def test_wrong_key_is_an_authentication_error(tooled_server):
    client = openai.OpenAI(base_url=f"{tooled_server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as caught:
        client.models.list()
    assert caught.value.code == "invalid_api_key"
    client.close()
