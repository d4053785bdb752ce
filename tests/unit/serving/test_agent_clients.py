"""What coding agents send with every request, which their users cannot leave out, and how custom tools are called."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from quire.serving.config import ServerConfig
from tests.unit.serving.fakes import TOOL_TEMPLATE, FakeGateway, make_served, text_script
from tests.unit.serving.real_app import BASE, events_of, running_app

TOOLED = make_served(TOOL_TEMPLATE)  # which reasons, and has a switch
NO_REASONING = make_served(
    TOOL_TEMPLATE.replace("{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}", "")
    .replace("<think>{{ message.reasoning_content }}</think>", "")
)  # fmt: skip
SHELL = {
    "type": "function",
    "name": "shell",
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "array", "items": {"type": "string"}}},
        "required": ["command"],
        "additionalProperties": False,
    },
    "strict": False,
}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Change files."}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
CODEX = {
    "model": "demo",
    "stream": True,
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "client_metadata": {"session": "1"},
    "instructions": "Be brief.",
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "say hi"}]}],
    "tools": [
        SHELL,
        {"type": "web_search", "external_web_access": True},
        {"type": "image_generation"},
        {**PATCH, "format": GRAMMAR},
        {"type": "namespace", "name": "mcp.files", "tools": [SHELL]},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "prompt_cache_key": "k",
}
SKIPPED = "tools[1].web_search,tools[2].image_generation,tools[3].custom,tools[4].namespace"
CLAUDE_CODE = {
    "model": "demo",
    "max_tokens": 64,
    "stream": True,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "say hi"}]}],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "metadata": {"user_id": "u"},
}


def ask(path, body, text="Hi", served=NO_REASONING, config=None):
    """Return the answer, and the gateway."""

    async def work():
        gateway = FakeGateway(text_script(served.tokenizer, text))
        async with running_app(gateway, served, config) as app:
            return await app.post(path, body), gateway

    return asyncio.run(work())


def ignored(answer):
    return answer.headers.get("x-quire-ignored-params")


def prompt_of(gateway):
    return NO_REASONING.tokenizer.decode(list(gateway.jobs[0].request.prompt_token_ids), skip_special_tokens=False)


def test_codex_is_answered_and_told_which_tools_are_left_out():
    answer, gateway = ask("/v1/responses", CODEX)
    assert answer.status_code == 200
    assert ignored(answer) == f"{SKIPPED},client_metadata"
    shown = prompt_of(gateway)
    assert '"name": "shell"' in shown
    assert "apply_patch" not in shown
    assert [tool["name"] for tool in events_of(answer.text)[-1][1]["response"]["tools"]] == ["shell"]


def test_codex_is_answered_when_its_effort_means_nothing_to_the_model():
    answer, _ = ask("/v1/responses", {**CODEX, "tools": [], "reasoning": {"effort": "medium", "summary": "auto"}})
    assert (answer.status_code, ignored(answer)) == (200, "client_metadata,reasoning.effort")


def test_strict_server_refuses_what_it_would_ignore():
    answer, _ = ask("/v1/responses", CODEX, config=ServerConfig(strict=True))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unknown_parameter")
    answer, _ = ask("/v1/messages", CLAUDE_CODE, config=ServerConfig(strict=True))
    assert answer.status_code == 400
    assert "context_management" in answer.json()["error"]["message"]


def test_claude_code_is_answered_and_told_what_has_no_effect():
    answer, _ = ask("/v1/messages", CLAUDE_CODE)
    assert (answer.status_code, ignored(answer)) == (200, "context_management,thinking,output_config.effort")
    answer, _ = ask("/v1/messages", CLAUDE_CODE, served=TOOLED)
    assert (answer.status_code, ignored(answer)) == (200, "context_management")


def test_claude_code_may_count_the_tokens_of_what_it_sends():
    body = {name: value for name, value in CLAUDE_CODE.items() if name not in ("max_tokens", "stream", "metadata")}
    answer, _ = ask("/v1/messages/count_tokens", body)
    assert (answer.status_code, ignored(answer)) == (200, "context_management,thinking,output_config.effort")
    assert answer.json()["input_tokens"] > 0


def test_tools_that_only_the_vendor_runs_are_left_out_of_messages():
    tool = {"name": "f", "input_schema": {"type": "object"}}
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    answer, gateway = ask("/v1/messages", {**CLAUDE_CODE, "thinking": None, "output_config": None, "tools": [tool, search]})
    assert answer.status_code == 200
    assert ignored(answer) == "tools[1].web_search_20250305,context_management"
    assert '"name": "f"' in prompt_of(gateway)
    assert "web_search" not in prompt_of(gateway)


@pytest.mark.parametrize("edits", [None, [], [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}]])
def test_context_management_that_keeps_all_is_taken(edits):
    answer, _ = ask("/v1/messages", {**CLAUDE_CODE, "context_management": {"edits": edits}})
    assert answer.status_code == 200


def call(arguments):
    return f'<tool_call>\n{{"name": "apply_patch", "arguments": {arguments}}}\n</tool_call>'


TEXT = '*** Begin "Patch"\né\n'
CUSTOM = {"model": "demo", "input": "hi", "tools": [PATCH, SHELL]}


def test_custom_tool_of_any_text_is_offered_as_a_function_of_one_string_and_called_as_a_custom_tool():
    answer, gateway = ask("/v1/responses", CUSTOM, call(json.dumps({"input": TEXT})))
    assert (answer.status_code, ignored(answer)) == (200, None)
    assert '"input": {"type": "string"}' in prompt_of(gateway)
    (item,) = answer.json()["output"]
    assert (item["type"], item["name"], item["input"], item["status"]) == ("custom_tool_call", "apply_patch", TEXT, "completed")
    assert item["id"].startswith("ctc_")
    assert answer.json()["tools"][0] == {**PATCH, "format": {"type": "text"}}


def test_custom_tool_has_all_arguments_as_its_input_when_they_are_not_its_one_string():
    answer, _ = ask("/v1/responses", CUSTOM, call('{"patch": "x"}'))
    assert json.loads(answer.json()["output"][0]["input"]) == {"patch": "x"}


def test_call_of_a_custom_tool_is_streamed_with_its_own_events_and_read_by_the_official_client():
    async def work():
        async with running_app(FakeGateway(text_script(TOOLED.tokenizer, call(json.dumps({"input": TEXT})))), TOOLED) as app:
            client = openai.AsyncOpenAI(api_key="k", base_url=f"{BASE}/v1", http_client=app.http(), max_retries=0)
            async with client.responses.stream(model="demo", input="hi", tools=[PATCH]) as stream:
                events = [event async for event in stream]
                return events, await stream.get_final_response()

    events, response = asyncio.run(work())
    assert response.output[0].type == "custom_tool_call"
    assert response.output[0].input == TEXT
    pieces = [event for event in events if event.type.startswith("response.custom_tool_call_input")]
    assert [(event.type.rpartition(".")[2], getattr(event, "delta", None) or event.input) for event in pieces] == [
        ("delta", TEXT),
        ("done", TEXT),
    ]
    assert not any(event.type.startswith("response.function_call") for event in events)


def test_call_of_a_custom_tool_and_its_output_are_shown_to_the_model_again():
    history = [
        {"role": "user", "content": "hi"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": TEXT},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done."},
    ]
    answer, gateway = ask("/v1/responses", {**CUSTOM, "input": history})
    assert answer.status_code == 200
    shown = prompt_of(gateway)
    assert "apply_patch" in shown
    assert "Begin" in shown
    assert "Done." in shown


def test_custom_tool_can_be_demanded_by_its_name():
    choice = {"type": "custom", "name": "apply_patch"}
    answer, _ = ask("/v1/responses", {**CUSTOM, "tool_choice": choice}, call(json.dumps({"input": "x"})))
    assert answer.status_code == 200
    assert answer.json()["output"][0]["type"] == "custom_tool_call"
    answer, _ = ask("/v1/responses", {**CUSTOM, "tools": [{**PATCH, "format": GRAMMAR}, SHELL], "tool_choice": choice})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")


def test_stored_response_with_a_custom_call_can_be_continued():
    async def work():
        script = text_script(TOOLED.tokenizer, call(json.dumps({"input": TEXT})))
        gateway = FakeGateway(script)
        async with running_app(gateway, TOOLED) as app:
            first = (await app.post("/v1/responses", CUSTOM)).json()
            output = [{"type": "custom_tool_call_output", "call_id": first["output"][0]["call_id"], "output": "Done."}]
            second = await app.post("/v1/responses", {**CUSTOM, "previous_response_id": first["id"], "input": output})
            async with app.http() as client:
                items = (await client.get(f"/v1/responses/{second.json()['id']}/input_items")).json()["data"]
            return second, items

    second, items = asyncio.run(work())
    assert second.status_code == 200
    assert [item["type"] for item in items] == ["custom_tool_call_output"]


def test_parts_of_answers_that_never_come_may_be_asked_for():
    answer, _ = ask("/v1/responses", {"model": "demo", "input": "hi", "include": ["web_search_call.action.sources"]})
    assert (answer.status_code, ignored(answer)) == (200, "include[0].web_search_call.action.sources")
