"""Counting the tokens of an input without answering it, and neighbouring routes that do not exist."""

from __future__ import annotations

import openai
import pytest

from tests.unit.serving.fakes import FakeGateway
from tests.unit.serving.real_app import running_app
from tests.unit.serving.responses.asking_responses import TOOL, TOOLED, run, script, with_client

BODY = {"model": "demo", "input": "hi", "instructions": "Be brief.", "tools": [TOOL], "tool_choice": "auto"}


def test_count_is_that_of_the_prompt_when_the_same_is_asked_for_as_a_response():
    async def use(client):
        counted = await client.responses.input_tokens.count(**BODY)
        first = await client.responses.create(**BODY)
        again = {**BODY, "previous_response_id": first.id, "input": "and now?"}
        return counted, first, await client.responses.input_tokens.count(**again), await client.responses.create(**again)

    counted, first, counted_next, second = run(with_client(script("Hi"), use))
    assert counted.object == "response.input_tokens"
    assert (counted.input_tokens, counted_next.input_tokens) == (first.usage.input_tokens, second.usage.input_tokens)
    assert counted_next.input_tokens > counted.input_tokens


def test_count_needs_no_engine_and_changes_nothing_by_fields_of_an_answer():
    async def work():
        gateway = FakeGateway(script("Hi"))
        async with running_app(gateway, TOOLED) as app:
            plain = await app.post("/v1/responses/input_tokens", BODY)
            more = await app.post("/v1/responses/input_tokens", {**BODY, "max_output_tokens": 5, "text": {}})
            return plain, more, gateway.jobs

    plain, more, jobs = run(work())
    assert plain.status_code == more.status_code == 200
    assert plain.json() == more.json()
    assert jobs == []


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"input": ""}, 400, "input"),
        ({"tools": [{"type": "code_interpreter"}]}, 400, "tools[0].type"),
        ({"truncation": "auto"}, 400, "truncation"),
        ({"conversation": "conv_1"}, 404, "conversation"),
        ({"model": "other"}, 404, "model"),
        ({"previous_response_id": "resp_x"}, 404, "previous_response_id"),
    ],
)
def test_field_at_fault_is_named_when_an_input_cannot_be_counted(body, status, param):
    async def work():
        async with running_app(FakeGateway(script("Hi")), TOOLED) as app:
            return await app.post("/v1/responses/input_tokens", {**BODY, **body})

    answer = run(work())
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_compaction_says_that_it_is_not_supported():
    async def use(client):
        with pytest.raises(openai.NotFoundError, match="compaction is not supported") as caught:
            await client.responses.compact(model="demo", input="hi")
        return caught.value.code

    assert run(with_client(script("Hi"), use)) == "unsupported_endpoint"


@pytest.mark.parametrize("path", ["/v1/responses/input_tokens", "/v1/responses/compact"])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_route_is_not_taken_for_a_response_when_its_method_is_another(method, path):
    async def work():
        async with running_app(FakeGateway(script("Hi")), TOOLED) as app, app.http() as client:
            return await client.request(method, path)

    answer = run(work())
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["code"] == "method_not_allowed"
