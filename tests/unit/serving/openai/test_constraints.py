"""Constraints through the handlers, over a real engine in this process."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

pytest.importorskip("llguidance")

from quire.api.decode import decode_body
from quire.api.openai.completions import CompletionRequest
from quire.engine.llm_engine import LLMEngine
from quire.serving.config import ServerConfig
from quire.serving.core.served_model import load_served_model
from quire.serving.engine_client.engine_info import describe_engine
from quire.serving.errors import ApiError
from quire.serving.openai.requests import constraint_of
from tests.unit.serving.fakes import DEMO, make_context
from tests.unit.serving.openai.asking import ask_chat, ask_completion, chunks_of
from tests.unit.serving.openai.test_with_engine import EngineGateway

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Oslo", "Rome"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}},
    {"type": "function", "function": {"name": "person", "parameters": PERSON}},
]


@pytest.fixture(scope="module")
def engine():
    engine = LLMEngine(str(DEMO), max_model_len=256, max_num_seqs=8, complete_json_within_max_tokens=True)
    yield engine
    engine.close()


def context_of(engine, **options):
    return make_context(EngineGateway(engine), load_served_model(describe_engine(engine, 0.0), ServerConfig(**options)))


@pytest.fixture(scope="module")
def context(engine):
    return context_of(engine, tool_call_parser="hermes", reasoning_parser="none")


def message_of(data):
    (choice,) = json.loads(data)["choices"]
    return choice["message"], choice["finish_reason"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(3))
def test_answer_is_of_the_schema_when_response_format_has_one(context, seed):
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    message, reason = message_of(ask_chat(context, response_format=wanted, max_tokens=120, seed=seed))
    value = json.loads(message["content"])
    assert (reason, list(value)) == ("stop", ["name", "age"])
    assert 0 <= value["age"] <= 99


@pytest.mark.parametrize(
    "body",
    [
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"guided_choice": ["yes", "no"]},
        {"structured_outputs": {"regex": "^(yes|no)$"}},
        {"guided_grammar": 'root ::= "yes" | "no"'},
        {"structured_outputs": {"grammar": 'start: "yes" | "no"'}},
        {"structured_outputs": {"structural_tag": {"format": {"type": "regex", "pattern": "yes|no"}}}},
    ],
)
def test_completion_is_one_of_two_words_when_it_is_constrained(context, body):
    (choice,) = json.loads(ask_completion(context, max_tokens=20, seed=1, **body))["choices"]
    assert choice["text"] in ("yes", "no")
    assert choice["finish_reason"] == "stop"


@pytest.mark.covering
@pytest.mark.parametrize(
    "wanted",
    [{"regex": "[ab]{3}"}, {"choice": ["yes", "no"]}, {"choice": ["a", "b"]}, {"json": CITY}, {"regex": "[ab]{3}c{0,9}"}],
    ids=str,
)
@pytest.mark.parametrize("is_parsed", [False, True])
def test_log_probabilities_are_of_all_that_is_told_when_the_constraint_ends_the_output(engine, wanted, is_parsed):
    context = context_of(engine, tool_call_parser="hermes", reasoning_parser="none")
    more = {"tools": TOOLS} if is_parsed else {}
    for seed in range(3):
        answer = ask_chat(context, structured_outputs=wanted, logprobs=True, max_tokens=60, seed=seed, **more)
        (choice,) = json.loads(answer)["choices"]
        if not choice["message"].get("tool_calls"):
            told = "".join(entry["token"] for entry in choice["logprobs"]["content"])
            assert (choice["finish_reason"], told) == ("stop", choice["message"]["content"])


def test_stream_adds_up_to_the_whole_answer_when_it_is_constrained(context):
    body = {"max_tokens": 100, "seed": 5, "structured_outputs": {"json": PERSON}}
    (whole,) = json.loads(ask_completion(context, **body))["choices"]
    chunks = chunks_of(ask_completion(context, stream=True, **body))
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == whole["text"]


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"guided_json_object": True}, {"kind": "json_object"}),
        ({"guided_json": {}, "guided_whitespace_pattern": " ?"}, {"kind": "json_schema", "whitespace_pattern": " ?"}),
        ({"guided_json": {}, "guided_decoding_backend": "guidance"}, {"kind": "json_schema", "backend": "llguidance"}),
        ({"guided_regex": "a", "guided_decoding_backend": "xgrammar"}, {"kind": "regex", "backend": "xgrammar"}),
        (
            {"response_format": {"type": "json_object"}, "guided_whitespace_pattern": "[ \n]*"},
            {"kind": "json_object", "whitespace_pattern": "[ \n]*"},
        ),
        ({"structured_outputs": {"json": {}, "backend": "guidance"}}, {"backend": "llguidance"}),
        ({"structured_outputs": {"json": {}, "disable_fallback": True}}, {"backend": "llguidance"}),
        ({"structured_outputs": {"json": {}, "disable_fallback": True, "backend": "xgrammar"}}, {"backend": "xgrammar"}),
        ({"structured_outputs": {"json": {}, "disable_fallback": False}}, {"backend": "auto"}),
    ],
    ids=str,
)
def test_constraint_is_taken_by_the_names_that_it_has_elsewhere(fields, wanted):
    body, ignored = decode_body(json.dumps({"model": "m", "prompt": "x", **fields}).encode(), CompletionRequest)
    found = constraint_of(body)
    assert ({name: getattr(found, name) for name in wanted}, ignored) == (wanted, ())


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("seed", range(3))
def test_tool_is_called_with_arguments_of_its_schema_when_that_is_demanded(context, choice, seed):
    body = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 160, "seed": seed, "parallel_tool_calls": False}
    message, _ = message_of(ask_chat(context, **body))
    (call,) = message["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "weather":
        assert arguments in ({"city": "Oslo"}, {"city": "Rome"})
    else:
        assert (choice, set(arguments)) == ("required", {"name", "age"})


@pytest.mark.parametrize("seed", range(3))
def test_tool_is_called_once_when_it_is_named(context, seed):
    """As the API has it: exactly one call, also where several could be made."""
    body = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}, "max_tokens": 160}
    message, reason = message_of(ask_chat(context, seed=seed, **body))
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], reason) == ("weather", "tool_calls")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_beginning_of_a_call_is_no_content_when_the_tokens_end_within_it(context, choice):
    for max_tokens in range(1, 17):
        body = {"tools": TOOLS, "tool_choice": choice, "max_tokens": max_tokens, "seed": 1}
        message, reason = message_of(ask_chat(context, **body))
        assert (reason, message["content"] or "") == ("length", "")
        chunks = chunks_of(ask_chat(context, stream=True, **body))
        assert not any(choice["delta"].get("content") for chunk in chunks for choice in chunk["choices"])


UNENFORCEABLE = {"type": "object", "properties": {"a": {"not": {"minimum": 1}}}}
UNIQUE = {"name": "x", "schema": {"uniqueItems": True}}
BAD_TOOLS = [TOOLS[0], {"type": "function", "function": {"name": "bad", "parameters": UNENFORCEABLE, "strict": True}}]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tools": BAD_TOOLS}, "tools: not cannot be enforced: leave it out (at tool 'bad' /properties/a/not)"),
        ({"tools": BAD_TOOLS, "tool_choice": "required"}, "(at tool 'bad' /properties/a/not)"),
        (
            {"tools": BAD_TOOLS, "tool_choice": {"type": "function", "function": {"name": "bad"}}},
            "(at tool 'bad' /properties/a/not)",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": UNENFORCEABLE}}},
            "response_format.json_schema.schema: not cannot be enforced: leave it out (at /properties/a/not)",
        ),
        ({"structured_outputs": {"json": {"not": {"minimum": 1}}}}, "(at /not)"),
        (
            {
                "structured_outputs": {
                    "structural_tag": {"format": {"type": "json_schema", "json_schema": {"not": {"minimum": 1}}}}
                }
            },
            "json_schema/not)",
        ),
    ],
)
def test_pointer_is_into_what_the_client_has_sent_when_it_stands_behind_reasoning_or_in_a_tool(engine, body, words):
    context = context_of(engine, tool_call_parser="hermes", reasoning_parser="qwen3")
    with pytest.raises(Exception, match=re.escape(words)):
        ask_chat(context, max_tokens=10, **body)


def test_answer_follows_reasoning_within_one_grammar_when_the_model_reasons(engine):
    context = context_of(engine, tool_call_parser="none", reasoning_parser="qwen3")
    body = {"structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 200}
    found = [message_of(ask_chat(context, seed=seed, **body)) for seed in range(4)]
    assert all(message["content"] in ("yes", "no") for message, reason in found if reason == "stop")
    assert any(reason == "stop" for _, reason in found)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"guided_json": {"properties": {"a": {"not": {"minimum": 1}}}}}, "guided_json", "/properties/a/not"),
        *(
            (
                {"response_format": {"type": "json_schema", "json_schema": {**UNIQUE, **more}}},
                "response_format.json_schema.schema",
                "uniqueItems",
            )
            for more in ({}, {"strict": True}, {"strict": False})
        ),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one"),
        ({"guided_choice": []}, "guided_choice", "guided_choice: must be a list of at least one"),
        ({"guided_json": {}, "guided_whitespace_pattern": "_"}, "guided_json", "whitespace_pattern may match white space"),
        (
            {"structured_outputs": {"grammar": 'start: "a"'}, "tools": TOOLS},
            "structured_outputs.grammar",
            "a grammar cannot be combined with tool calls or with the model's reasoning",
        ),
        ({"structured_outputs": {"json": {"description": "x" * 70000}}}, "structured_outputs.json", "65536"),
    ],
)
def test_request_is_refused_by_the_field_when_its_constraint_cannot_be_enforced(context, body, param, words):
    with pytest.raises(Exception) as caught:
        ask_chat(context, max_tokens=10, **body)
    assert getattr(caught.value, "param", None) == param
    assert re.search(re.escape(words), str(caught.value))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("is_streaming", [False, True])
def test_client_is_at_fault_when_its_constraint_turns_out_too_complex_in_the_midst_of_an_output(context, is_streaming, n):
    """Two choices come to that in different steps, so that the request has not ended with the first of them."""
    pattern = "([a-z]{30}|[a-z]{36})(a|aa)+(b?){30}c{1000}{1000}"
    with pytest.raises(ApiError, match="guided_regex: the grammar cannot go on: ") as caught:
        ask_completion(context, guided_regex=pattern, max_tokens=90, temperature=2.0, seed=1, n=n, stream=is_streaming)
    assert (caught.value.status, caught.value.param) == (400, "guided_regex")


@pytest.mark.covering
@pytest.mark.parametrize(
    "parser", ["qwen3_coder", "glm45", "minimax_m2", "deepseek_v32", "pythonic", "functiongemma", "functionary_v3", "openai"]
)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_tool_is_called_in_the_format_of_the_model_when_that_is_demanded(engine, parser, choice):
    reasoning = "openai_gptoss" if parser == "openai" else "none"
    context = context_of(engine, tool_call_parser=parser, reasoning_parser=reasoning)
    forced = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 230, "temperature": 2.0}
    num_calls = 0
    for seed in range(4):
        if num_calls == 2:
            break  # test_call_grammars.py samples many more
        message, reason = message_of(ask_chat(context, seed=seed, **forced))
        if reason == "length":
            continue
        (call,) = message["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        schema = CITY if call["function"]["name"] == "weather" else PERSON
        jsonschema.validate(arguments, schema)
        num_calls += 1
        chunks = chunks_of(ask_chat(context, seed=seed, stream=True, **forced))
        deltas = [call for chunk in chunks for choice in chunk["choices"] for call in choice["delta"].get("tool_calls") or ()]
        assert "".join(delta["function"].get("arguments") or "" for delta in deltas) == call["function"]["arguments"]
    assert num_calls > 0


@pytest.mark.parametrize(("param", "strict"), [("tool_choice", False), ("tools", True)])
def test_schema_is_refused_by_its_pointer_when_calls_that_are_not_json_cannot_have_it(engine, param, strict):
    context = context_of(engine, tool_call_parser="qwen3_coder", reasoning_parser="none")
    schema = {"type": "object", "properties": {"a": {"type": ["string", "integer"], "minimum": 3}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}]
    with pytest.raises(Exception, match=re.escape("(at tool 'f' /properties/a/minimum)")) as caught:
        ask_chat(context, tools=tools, tool_choice="auto" if strict else "required")
    assert getattr(caught.value, "param", None) == param


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS}], ids=["alone", "with-tools"])
def test_schema_that_only_the_other_backend_enforces_may_come_behind_reasoning(engine, fields):
    pytest.importorskip("xgrammar")
    context = context_of(engine, tool_call_parser="hermes", reasoning_parser="qwen3")
    before = engine.grammars.num_sent_on
    schema = {
        "type": "object",
        "propertyNames": {"enum": ["a", "b"]},
        "additionalProperties": {"type": "null"},
        "maxProperties": 2,
    }
    asked = {"structured_outputs": {"json": schema, "disable_any_whitespace": True}, **fields, "max_tokens": 200}
    message, reason = message_of(ask_chat(context, **asked))
    assert engine.grammars.num_sent_on == before + 1
    assert reason == "stop"
    jsonschema.validate(json.loads(message["content"]), schema)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("parser", "reasoning", "fields"),
    [
        ("none", "deepseek_r1", {"guided_json": PERSON}),
        ("hermes", "qwen3", {"tools": TOOLS, "tool_choice": "required"}),
        ("hermes", "none", {"tools": TOOLS[1:], "tool_choice": "required"}),
        ("hermes", "qwen3", {"tools": TOOLS, "guided_json": PERSON}),
    ],
    ids=["answer", "call-behind-reasoning", "call", "answer-or-call"],
)
def test_answers_and_calls_behind_reasoning_come_to_an_end_within_their_tokens(engine, parser, reasoning, fields):
    context = context_of(engine, tool_call_parser=parser, reasoning_parser=reasoning)
    # A model that thinks in letters for ever.
    body = {**fields, "max_tokens": 120, "logit_bias": {str(engine.tokenizer.encode("a", False)[0]): 8}}
    for seed in range(3):
        message, reason = message_of(ask_chat(context, seed=seed, **body))
        assert reason in ("stop", "tool_calls")
        if message.get("tool_calls"):
            for call in message["tool_calls"]:
                schema = CITY if call["function"]["name"] == "weather" else PERSON
                jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
        else:
            jsonschema.validate(json.loads(message["content"]), PERSON)
