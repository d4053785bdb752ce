"""Constraints of the Anthropic and the Responses API, over a real engine in this process."""

from __future__ import annotations

import asyncio
import json
from typing import Literal

import anthropic
import openai
import pydantic
import pytest

pytest.importorskip("llguidance")

from quire.engine.llm_engine import LLMEngine
from quire.serving.config import ServerConfig
from quire.serving.core.served_model import load_served_model
from quire.serving.engine_client.engine_info import describe_engine
from tests.unit.serving.fakes import DEMO
from tests.unit.serving.openai.test_with_engine import EngineGateway
from tests.unit.serving.real_app import BASE, running_app

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": CITY, "person": PERSON}
MESSAGE_TOOLS = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
RESPONSE_TOOLS = [{"type": "function", "name": name, "parameters": schema} for name, schema in SCHEMAS.items()]
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def engine():
    engine = LLMEngine(str(DEMO), max_model_len=256, max_num_seqs=8, complete_json_within_max_tokens=True)
    yield engine
    engine.close()


def ask(engine, path, parser="hermes", **body):
    served = load_served_model(describe_engine(engine, 0.0), ServerConfig(tool_call_parser=parser, reasoning_parser="none"))

    async def work():
        async with running_app(EngineGateway(engine), served) as app:
            return await app.post(path, {"model": served.name, **body})

    return asyncio.run(work())


def ask_message(engine, **body):
    return ask(engine, "/v1/messages", **{"messages": USER, "max_tokens": 120, **body})


def ask_response(engine, **body):
    return ask(engine, "/v1/responses", **{"input": "hi", "max_output_tokens": 120, **body})


def check(name, arguments):
    if name == "weather":
        assert arguments in ({"city": "Oslo"}, {"city": "Rome"})
    else:
        assert list(arguments) == ["name", "age"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_message_calls_a_tool_when_tool_choice_demands_it(engine, choice):
    answer = ask_message(engine, tools=MESSAGE_TOOLS, tool_choice={**choice, "disable_parallel_tool_use": True}).json()
    (block,) = answer["content"]
    assert (answer["stop_reason"], block["type"]) == ("tool_use", "tool_use")
    assert block["name"] == choice.get("name", block["name"])
    check(block["name"], block["input"])


def test_message_is_of_the_schema_when_output_config_has_one(engine):
    answer = ask_message(engine, output_config={"format": {"type": "json_schema", "schema": PERSON}}).json()
    (block,) = answer["content"]
    check("person", json.loads(block["text"]))


CHOICES = [
    "required",
    {"type": "function", "name": "weather"},
    {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "person"}]},
]


@pytest.mark.parametrize("choice", CHOICES, ids=["required", "named", "allowed"])
def test_response_calls_a_tool_when_tool_choice_demands_it(engine, choice):
    answer = ask_response(engine, tools=RESPONSE_TOOLS, tool_choice=choice, parallel_tool_calls=False).json()
    (item,) = answer["output"]
    assert (item["type"], answer["tool_choice"]) == ("function_call", choice)
    if choice != "required":
        assert item["name"] == choice.get("name", "person")
    check(item["name"], json.loads(item["arguments"]))


@pytest.mark.parametrize(
    "form",
    [{"type": "json_schema", "name": "p", "schema": PERSON, "strict": True, "description": "d"}, {"type": "json_object"}],
    ids=["schema", "object"],
)
def test_response_is_json_when_its_text_has_a_format(engine, form):
    answer = ask_response(engine, text={"format": form}, seed=4).json()
    assert answer["text"]["format"] == form
    (item,) = answer["output"]
    if form["type"] == "json_schema":
        check("person", json.loads(item["content"][0]["text"]))
    else:
        assert item["content"][0]["text"].startswith("{")


STRICT = [{**tool, "strict": True} for tool in MESSAGE_TOOLS]


@pytest.mark.parametrize(
    ("send", "body", "param"),
    [
        (
            ask_message,
            {"output_config": {"format": {"type": "json_schema", "schema": {"not": {"minimum": 1}}}}},
            "output_config.format.schema",
        ),
        (
            ask_response,
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"not": {"minimum": 1}}}}},
            "text.format.schema",
        ),
    ],
)
def test_schema_is_refused_by_its_field_when_it_cannot_be_enforced(engine, send, body, param):
    answer = send(engine, **body)
    assert answer.status_code == 400
    assert param in answer.json()["error"]["message"]


def test_client_is_at_fault_when_its_schema_turns_out_too_complex_before_anything_is_sent(engine):
    schema = {"type": "string", "pattern": "^[a-z]{30}(a|aa)+(b?){30}c{1000}{1000}$"}
    asked = {"format": {"type": "json_schema", "schema": schema}}
    for is_streaming in (False, True):  # the first finds out after some tokens; what it has found the second knows at once
        answer = ask_message(engine, output_config=asked, stream=is_streaming)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["message"].startswith("output_config.format.schema: the grammar cannot go on: ")


class City(pydantic.BaseModel):
    """What the official clients make a schema of."""

    city: Literal["Oslo", "Rome"]


def test_official_clients_parse_what_they_asked_for(engine):
    served = load_served_model(describe_engine(engine, 0.0), ServerConfig(tool_call_parser="hermes", reasoning_parser="none"))

    async def work():
        async with running_app(EngineGateway(engine), served) as app:
            options = {"http_client": app.http(), "max_retries": 0}
            one = openai.AsyncOpenAI(api_key="k", base_url=f"{BASE}/v1", **options)
            two = anthropic.AsyncAnthropic(api_key="k", base_url=BASE, **options)
            tool = openai.pydantic_function_tool(City, name="weather")["function"]
            response = await one.responses.parse(model=served.name, input="hi", text_format=City, max_output_tokens=60)
            called = await one.responses.parse(
                model=served.name,
                input="hi",
                tools=[{"type": "function", **tool}],
                tool_choice="required",
                parallel_tool_calls=False,
                max_output_tokens=60,
            )
            message = await two.messages.parse(model=served.name, messages=USER, max_tokens=60, output_format=City)
            return response.output_parsed, json.loads(called.output[0].arguments), message.parsed_output

    for found in asyncio.run(work()):
        assert City.model_validate(found).city in ("Oslo", "Rome")
