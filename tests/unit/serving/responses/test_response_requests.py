"""What a request for a response becomes: conversations, tools, what is told back."""

from __future__ import annotations

import pytest

from tests.unit.serving.fakes import FakeGateway
from tests.unit.serving.responses.asking_responses import (
    CALL,
    TOOL,
    ask,
    prompt_of,
    run,
    script,
    with_client,
)


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


@pytest.mark.parametrize(
    ("tier", "priority", "told"),
    [("priority", "interactive", "priority"), ("flex", "batch", "flex"), (None, "default", "default")],
)
def test_service_tier_becomes_a_class_and_is_told(tier, priority, told):
    answer, gateway = ask(script("Hi"), service_tier=tier)
    assert (gateway.jobs[0].priority, answer.json()["service_tier"]) == (priority, told)


def test_more_tokens_than_the_context_has_left_are_refused():
    answer, _ = ask(script("Hi"), max_output_tokens=1024)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "max_output_tokens")
