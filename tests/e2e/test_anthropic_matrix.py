"""The official Anthropic client over every option of its route: a table of (option, what must follow), run by two clients."""

import json

import anthropic
import httpx
import pytest

from tests.e2e.asking import GREEDY, MESSAGES, PROMPT, checks, flavours, text_of
from tests.e2e.tooled_model import KEY, SCHEMA, fits_schema

INPUT_TOOL = {"name": "weather", "input_schema": SCHEMA}
ask_anthropic = flavours(anthropic.Anthropic, anthropic.AsyncAnthropic, "")


def is_greedy_message(ask):
    for options in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 0}):
        assert ask.text("messages", **{"temperature": 1, **options}) == ask.greedy("messages")


def messages_vary_with_the_temperature(ask):
    assert len({ask.text("messages", temperature=1, top_p=1) for _ in range(4)}) > 1


def message_stops(ask):
    whole = ask.greedy("messages")
    stop = whole.split()[3]
    answer = ask.create("messages", **GREEDY, stop_sequences=[stop])
    assert (text_of(answer), answer.stop_reason, answer.stop_sequence) == (whole[: whole.index(stop)], "stop_sequence", stop)
    answer = ask.create("messages", **GREEDY, max_tokens=3)
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 3)


def system_is_read(ask):
    blocks = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    assert ask.greedy("messages", system="Be brief.") == ask.greedy("messages", system=blocks) != ask.greedy("messages")


def message_hints_change_nothing(ask):
    hints = {"metadata": {"user_id": "ann"}, "thinking": {"type": "disabled"}, "service_tier": "auto"}
    no_effect = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "high"}}
    assert ask.greedy("messages", **no_effect) == ask.greedy("messages")
    assert ask.greedy("messages", **hints) == ask.greedy("messages")
    assert ask.create("messages", service_tier="standard_only").usage.service_tier == "standard"


def used(answer):
    return [block for block in answer.content if block.type == "tool_use"]


def message_tools_are_called_as_chosen(ask):
    options = {**GREEDY, "max_tokens": 300, "tools": [INPUT_TOOL, {**INPUT_TOOL, "name": "tides"}]}
    for choice, names in (({"type": "any"}, {"weather", "tides"}), ({"type": "tool", "name": "tides"}, {"tides"})):
        answer = ask.create("messages", **options, tool_choice={**choice, "disable_parallel_tool_use": True})
        assert answer.stop_reason == "tool_use"
        assert [block.name in names and fits_schema(block.input) for block in used(answer)] == [True]
    assert used(ask.create("messages", **options, tool_choice={"type": "none"})) == []
    counts = [ask("messages.count_tokens", model="demo", messages=MESSAGES, tools=tools) for tools in ([], [INPUT_TOOL])]
    assert counts[0].input_tokens < counts[1].input_tokens


def message_is_json_of_its_schema(ask):
    wanted = {"format": {"type": "json_schema", "schema": SCHEMA}}
    assert fits_schema(json.loads(ask.greedy("messages", max_tokens=200, output_config=wanted)))


def message_streams(ask):
    events = ask.create("messages", **GREEDY, stream=True)
    assert "".join(event.delta.text for event in events if event.type == "content_block_delta") == ask.greedy("messages")


def message_headers_say_which_request_it_was(ask):
    raw = ask("messages.with_raw_response.create", model="demo", messages=MESSAGES, max_tokens=2)
    assert raw.headers["request-id"].startswith("req_")
    assert ask.create("messages")._request_id.startswith("req_")


def tokens_are_counted_by_post(ask):
    assert ask.post("/detokenize", ask.post("/tokenize", {"prompt": PROMPT}) and {"tokens": [300, 301]})["prompt"]
    (model,) = ask("models.list").data
    assert (model.id, model.display_name, model.type) == ("demo", "demo", "model")
    assert model.created_at.timestamp() == ask("models.retrieve", "demo").created


@pytest.mark.covering
@checks(
    ("top_k, top_p, temperature", is_greedy_message),
    ("temperature=1", messages_vary_with_the_temperature),
    ("stop_sequences, max_tokens", message_stops),
    ("system", system_is_read),
    ("metadata, thinking, service_tier", message_hints_change_nothing),
    ("tools, tool_choice", message_tools_are_called_as_chosen),
    ("output_config", message_is_json_of_its_schema),
    ("stream", message_streams),
    ("headers", message_headers_say_which_request_it_was),
    ("tokenize, models", tokens_are_counted_by_post),
)
def test_anthropic_option_does_what_it_says(ask_anthropic, check):
    check(ask_anthropic)


@pytest.mark.covering
@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"max_tokens": 0}, anthropic.BadRequestError),
        ({"stop_sequences": [""]}, anthropic.BadRequestError),
        ({"temperature": 3}, anthropic.BadRequestError),
        ({"service_tier": "fast"}, anthropic.BadRequestError),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 5}}}, anthropic.BadRequestError),
        ({"model": "other"}, anthropic.NotFoundError),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_anthropic_refusal_is_the_exception_of_its_kind_and_names_the_field(ask_anthropic, options, kind):
    with pytest.raises(anthropic.APIStatusError) as caught:
        ask_anthropic.create("messages", **options)
    assert type(caught.value) is kind
    assert next(iter(options)) in str(caught.value)
    assert caught.value.body["error"]["type"] == ("not_found_error" if "model" in options else "invalid_request_error")


def test_body_that_no_client_can_be_asked_for_is_refused_alike(tooled_server):
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/v1/messages"):
        answer = httpx.post(tooled_server.url + path, content=b'{"model": "demo",', headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
