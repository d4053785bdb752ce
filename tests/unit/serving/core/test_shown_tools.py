"""Tool calls of models whose chat template shows no tools: the prompt, the grammar, and what clients get."""

from __future__ import annotations

import asyncio
import json

import httpx2
import openai
import pytest

from quire.engine.llm_engine import LLMEngine
from quire.serving.config import ServerConfig
from quire.serving.core.plan import ChatInput
from quire.serving.core.served_model import load_served_model
from quire.serving.core.shown_tools import show_tools
from quire.serving.endpoint import bind
from quire.serving.engine_client.engine_info import describe_engine
from quire.serving.http.app import make_app
from quire.serving.openai.endpoints import ENDPOINTS
from tests.unit.serving.fakes import DEMO, FakeGateway, make_served, text_script
from tests.unit.serving.openai.test_with_engine import EngineGateway
from tests.unit.serving.real_app import BASE, running_app

PLAIN = make_served()
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather.", "parameters": CITY, "strict": True},
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
USER = [{"role": "user", "content": "hi"}]
CALLS = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n' * 2
RESULTS = [
    *USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
            {"id": "b", "type": "function", "function": {"name": "clock", "arguments": "not JSON"}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "rain"},
    {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "noon"}]},
    {"role": "user", "content": "and now?"},
]


def run(use, gateway, served=PLAIN):
    async def work():
        async with running_app(gateway, served) as app:
            made = make_app(app.parts, bind(ENDPOINTS, app.responses.server))
            plain = httpx2.AsyncClient(transport=httpx2.ASGITransport(made))
            client = openai.AsyncOpenAI(api_key="k", base_url=f"{BASE}/v1", http_client=plain, max_retries=0)
            return await use(client)

    return asyncio.run(work())


def chat(gateway, served=PLAIN, **body):
    body = {"model": served.name, "messages": USER, "tools": [WEATHER, CLOCK], **body}
    return run(lambda client: client.chat.completions.create(**body), gateway, served)


def scripted(*texts):
    return FakeGateway(text_script(PLAIN.tokenizer, *texts))


def test_fallback_is_chosen_for_a_template_without_tools_only():
    assert PLAIN.parsers.tool_format == "json"
    assert make_served(config=ServerConfig(tool_call_parser="none")).parsers.tool_format is None
    assert make_served(config=ServerConfig(tool_call_parser="mistral")).parsers.tool_format == "mistral"


def test_tools_are_explained_in_the_prompt_and_calls_are_read():
    gateway = scripted(CALLS)
    message = chat(gateway).choices[0].message
    prompt = gateway.jobs[0].request.prompt
    assert '{"name": "weather", "description": "The weather.", "parameters": {' in prompt
    assert prompt.index("clock") < prompt.index("hi")
    assert message.content.startswith("Let me see.")
    assert [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls] == [
        ("weather", {"city": "Oslo"})
    ] * 2


def test_calls_are_streamed():
    async def use(client):
        chunks = await client.chat.completions.create(
            model="demo", messages=USER, tools=[WEATHER], stream=True, parallel_tool_calls=False
        )
        return [chunk async for chunk in chunks]

    chunks = run(use, scripted(CALLS))
    calls = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    assert [call.function.name for call in calls if call.function.name] == ["weather"]
    assert json.loads("".join(call.function.arguments or "" for call in calls)) == {"city": "Oslo"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_arguments_that_are_nested_too_deeply_are_shown_as_they_are():
    arguments = "[" * 100_000
    messages = [{"role": "assistant", "tool_calls": [{"function": {"name": "clock", "arguments": arguments}}]}]
    shown = show_tools(messages, ChatInput(messages=messages), "")
    assert arguments in shown[0]["content"]


def test_calls_and_results_become_messages_of_assistant_and_user():
    shown = show_tools(RESULTS, ChatInput(messages=RESULTS, tools=[WEATHER]), "{{ 'system' }}")
    assert [message["role"] for message in shown] == ["system", "user", "assistant", "user"]
    assert shown[2]["content"] == (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": not JSON}\n</tool_call>'
    )
    assert shown[3]["content"] == ("<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>\nand now?")
    assert "tool_calls" not in shown[2]


@pytest.mark.parametrize("source", ["{{ messages }}", "{{ raise_exception('System role not supported') }}"])
def test_explanation_is_in_the_first_message_of_the_user_where_the_template_takes_no_system_message(source):
    shown = show_tools(USER, ChatInput(messages=USER, tools=[WEATHER]), source)
    assert [message["role"] for message in shown] == ["user"]
    assert shown[0]["content"].startswith("You can call functions.")
    assert shown[0]["content"].endswith("\n\nhi")


def test_explanation_follows_the_system_message_of_the_client():
    messages = [{"role": "system", "content": "Be kind."}, *USER]
    chosen = ChatInput(messages=messages, tools=[WEATHER, CLOCK], forced_tools=("clock",), parallel_tool_calls=False)
    text = show_tools(messages, chosen, "system")[0]["content"]
    assert text.startswith("Be kind.\n\nYou can call functions.")
    assert "You have to call clock now." in text
    assert "Write only one such block." in text


def test_messages_without_tools_are_shown_as_they_are():
    messages = [*USER, *USER, {"role": "assistant", "content": "x"}]
    assert show_tools(messages, ChatInput(messages=messages), "system") == messages


@pytest.fixture(scope="module")
def engine():
    engine = LLMEngine(str(DEMO), max_model_len=1024, max_num_seqs=8, complete_json_within_max_tokens=True)
    yield engine
    engine.close()


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"weather", "clock"}), ({"type": "function", "function": {"name": "weather"}}, {"weather"})],
    ids=["required", "named"],
)
def test_model_that_knows_no_tools_calls_one_when_it_has_to(engine, choice, names):
    served = load_served_model(describe_engine(engine, 0.0), ServerConfig())
    options = {"tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 200, "seed": 1}
    answer = chat(EngineGateway(engine), served, **options).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name in names
    arguments = json.loads(call.function.arguments)
    assert isinstance(arguments, dict)
    if call.function.name == "weather":
        assert arguments in ({"city": "Oslo"}, {"city": "Rome"})


def test_calls_are_held_to_json_when_the_model_decides():
    gateway = scripted("No.")
    chat(gateway, tools=[CLOCK])
    constraint = gateway.jobs[0].request.params.constraint
    wanted = json.loads(constraint.source)["format"]
    assert (constraint.kind, wanted["type"], wanted["triggers"]) == ("structural_tag", "triggered_tags", ["<tool_call>"])
