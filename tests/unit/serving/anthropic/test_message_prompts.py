"""What a request for a message becomes: tools, thinking, system blocks, sampling."""

from __future__ import annotations

import hashlib

import anthropic
import pytest

from quire.serving.config import ApiKey, ServerConfig
from tests.unit.serving.anthropic.asking_messages import (
    CALL,
    TOKENIZER,
    TOOL,
    TOOLED,
    USER,
    ask,
    prompt_of,
    run,
    script,
    with_client,
)
from tests.unit.serving.fakes import FakeGateway, make_served
from tests.unit.serving.real_app import BASE, running_app


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
        ("{{ messages[0].content }}", {"type": "enabled", "budget_tokens": 2000}, "hi"),
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
    "mcp_servers": [],
    "inference_geo": "global",
}


def test_hints_are_accepted():
    answer, _ = ask(script("Hi"), headers={"anthropic-version": "2023-06-01", "anthropic-beta": "x"}, **HINTS)
    assert answer.status_code == 200
    assert "x-quire-ignored-params" not in answer.headers


@pytest.mark.parametrize(("name", "value"), [("speed", "fast"), ("diagnostics", {"previous_message_id": None})])
def test_field_that_cannot_change_the_answer_is_taken_and_named(name, value):
    answer, _ = ask(script("Hi"), **{name: value})
    assert (answer.status_code, answer.headers["x-quire-ignored-params"]) == (200, name)


MARK, LONG_MARK = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}


@pytest.mark.parametrize(
    ("body", "seconds"),
    [
        ({}, 0.0),
        ({"cache_control": MARK}, 300.0),
        ({"system": [{"type": "text", "text": "Be brief.", "cache_control": LONG_MARK}], "cache_control": MARK}, 3600.0),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": MARK}]}]}, 300.0),
        ({"tools": [{"name": "f", "input_schema": {"type": "object"}, "cache_control": LONG_MARK}]}, 3600.0),
    ],
    ids=["none", "body", "longest", "message", "tool"],
)
def test_marks_of_cache_control_reach_the_engine(body, seconds):
    _, gateway = ask(script("Hi"), **body)
    assert gateway.jobs[0].request.cache_retention_s == seconds
