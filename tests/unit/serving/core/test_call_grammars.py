"""Grammars of tool calls, a format at a time: what they let through, the format's own reader makes valid calls of."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import jsonschema
import pytest

pytest.importorskip("llguidance")

from quire.base.errors import RequestError
from quire.contracts.constraint import Constraint
from quire.contracts.string_formats import ENFORCED_FORMATS
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.spelling import Spelling
from quire.grammar.vocabulary import Vocabulary
from quire.serving.core.constraints import chat_constraint
from quire.serving.core.plan import ChatInput, ParserSetup
from quire.text.parsing.call_forms import CALL_FORMS
from quire.text.parsing.events import fold
from quire.text.parsing.formats import TOOL_FORMATS, markers_of
from quire.text.parsing.parser import OutputParser
from quire.text.parsing.tools import Tool
from tests.unit.grammar.byte_vocabulary import accepts, allowed_next, make_compiler

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 5},
        "unit": {"$ref": "#/$defs/unit"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "factor": {"type": "number"},
        "exact": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 2},
        "box": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"enum": ["x", "y", 1, None]}},
            "required": ["a"],
            "additionalProperties": False,
        },
        "when": {"type": "string", "format": "date"},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$", "maxLength": 6},
    },
    "required": ["city", "days", "tags"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
TOOLS = (Tool("weather", WEATHER), Tool("now", {"type": "object", "properties": {}, "additionalProperties": False}))
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
VALIDATORS: dict[str, jsonschema.Draft202012Validator] = {}
HARMONY = "openai_gptoss"
FORMATS = sorted((*CALL_FORMS, "openai"))
MAX_BYTES = 4000
ENDING = b"\"'<>/\n}],)|[{("  # bytes that bring an output to its end


@pytest.fixture(scope="module")
def compiler():
    with make_compiler() as compiler:
        yield compiler


def constraint_of(
    name, tools=TOOLS, forced=None, strict=(), parallel=True, reasoning=None, prompt="", starts=False, answer=None, begun=False
):
    setup = ParserSetup(
        tool_format=name,
        reasoning_format=HARMONY if name == "openai" else reasoning,
        tools=tuple(tools),
        starts_in_reasoning=starts,
        starts_in_call=begun,
        parallel_tool_calls=parallel,
        marker_token_ids={},
    )
    names = tuple(tool.name for tool in tools) if forced is None else forced
    chat = ChatInput(messages=[], forced_tools=names, strict_tools=frozenset(strict), parallel_tool_calls=parallel)
    return chat_constraint(answer, chat, setup, prompt)


def grammar_of(compiler, name, **options):
    return compiler.start(constraint_of(name, **options)).result()


def parse(name, text, tools=TOOLS, reasoning=None, starts=False, begun=False):
    parser = OutputParser(
        tool_format=name,
        reasoning_format=HARMONY if name == "openai" else reasoning,
        tools=tools,
        starts_in_reasoning=starts,
        starts_in_call=begun,
    )
    return fold([*parser.feed(text), *parser.finish()])


def validate(arguments, schema):
    """Check what is of one of a few schemas; that of the schema itself takes longer, so it is done once."""
    text = json.dumps(schema, sort_keys=True)
    if text not in VALIDATORS:
        jsonschema.Draft202012Validator.check_schema(schema)
        VALIDATORS[text] = jsonschema.Draft202012Validator(schema, format_checker=CHECKER)
    VALIDATORS[text].validate(arguments)


def sample(grammar, seed, begin=""):
    """Return a text that a grammar lets through, byte by byte at random, None for one that would be too long."""
    chance, matcher, found = random.Random(seed), grammar.new_matcher(), bytearray(begin.encode())
    assert all(matcher.advance(byte) is None for byte in found)
    while len(found) < MAX_BYTES:
        allowed, may_end = allowed_next(matcher)
        if may_end and (not allowed or chance.random() < 0.5):
            return found.decode()
        ending = [byte for byte in allowed if byte in ENDING]
        plain = [byte for byte in allowed if 32 <= byte < 127]
        chosen = chance.choice(ending if ending and chance.random() < 0.5 else plain or allowed)
        assert matcher.advance(chosen) is None
        found.append(chosen)
    return None


def check_calls(name, text, tools=TOOLS, **options):
    """Return the calls of an output, whose arguments are of their schemas."""
    message = parse(name, text, tools, **options)
    schemas = {tool.name: tool.parameters for tool in tools}
    for call in message.calls:
        pairs = json.loads(call.arguments, object_pairs_hook=list)
        assert len({key for key, _ in pairs}) == len(pairs), text
        validate(json.loads(call.arguments), schemas[call.name])
    return message


@pytest.mark.covering
@pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "single"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_output_is_read_as_valid_calls_when_calls_are_demanded(compiler, name, parallel):
    grammar = grammar_of(compiler, name, parallel=parallel)
    begin = "<|channel|>commentary to" if name == "openai" else ""  # what the model thinks would not end by chance
    found = [text for seed in range(8) if (text := sample(grammar, seed, begin)) is not None]
    assert len(found) >= 3
    for text in found:
        message = check_calls(name, text)
        assert message.calls, text
        assert parallel or len(message.calls) == 1, text
        assert not message.content.strip(), text


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", FORMATS)
def test_only_the_named_tool_is_called_when_one_is_named(compiler, name):
    grammar = grammar_of(compiler, name, forced=("now",), parallel=False)
    for text in filter(None, (sample(grammar, seed) for seed in range(3))):
        (call,) = check_calls(name, text).calls
        assert (call.name, json.loads(call.arguments)) == ("now", {})


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", FORMATS)
def test_calls_in_free_text_are_valid_when_tools_are_strict(compiler, name):
    grammar = grammar_of(compiler, name, forced=(), strict=("weather", "now"))
    calls = grammar_of(compiler, name, parallel=False)
    for seed in range(3):
        text = sample(grammar, seed)
        if text is not None:
            check_calls(name, text)
        text = sample(calls, seed)
        assert text is None or accepts(grammar, text), text


PLAIN = "A plain answer: 1 < 2, [1] and {x}."


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_without_calls_is_let_through_when_tools_are_strict(compiler, name):
    grammar = grammar_of(compiler, name, forced=(), strict=("weather",))
    text = f"<|channel|>final<|message|>{PLAIN}" if name == "openai" else PLAIN
    assert accepts(grammar, text)
    assert parse(name, text).content == PLAIN


def qwen(*pairs, name="weather"):
    return f"<tool_call>\n<function={name}>\n{''.join(pairs)}</function>\n</tool_call>"


def pair(key, value):
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def glm(*pairs, name="weather"):
    inner = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in pairs)
    return f"<tool_call>{name}\n{inner}</tool_call>"


def minimax(*pairs):
    inner = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in pairs)
    return f'<minimax:tool_call>\n<invoke name="weather">\n{inner}</invoke>\n</minimax:tool_call>'


def dsml(*triples):
    inner = "".join(
        f'<｜DSML｜parameter name="{key}" string="{is_text}">{value}</｜DSML｜parameter>\n' for key, is_text, value in triples
    )
    begin, end = "<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"
    return f'{begin}<｜DSML｜invoke name="weather">\n{inner}</｜DSML｜invoke>\n{end}'


def gemma(inner):
    return f"<start_function_call>call:weather{{{inner}}}<end_function_call>"


def harmony(arguments, name="weather"):
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"


CITY, DAYS, TAGS = pair("city", "Oslo"), pair("days", "3"), pair("tags", '["a", "b"]')
JSON_CALL = '{"city": "Oslo", "days": 3, "tags": ["a"]}'
VALID = [
    ("qwen3_coder", qwen(CITY, DAYS, TAGS)),
    ("qwen3_coder", qwen(pair("city", '"5"\\'), pair("unit", "F"), DAYS, pair("note", "null"), TAGS)),
    ("qwen3_coder", qwen(CITY, DAYS, pair("note", "5"), TAGS, pair("box", '{"a": -1.5e3, "b": null}'))),
    ("qwen3_coder", qwen(CITY, DAYS, TAGS, pair("when", "2024-02-29"), pair("code", "AB-123"))),
    ("qwen3_coder", f"{qwen(CITY, DAYS, TAGS)}\n{qwen(name='now')}"),
    ("glm45", glm(("city", "\nOs\n"), ("days", "3"), ("tags", "[\n  \"a\"]"))),
    ("glm45", glm(("city", "Oslo"), ("days", "3"), ("tags", '["a"]')).replace("</arg_key>\n", "</arg_key>")),
    ("minimax_m2", minimax(("city", "Oslo"), ("days", "14"), ("exact", "true"), ("tags", '["a"]'))),
    ("deepseek_v32", dsml(("city", "true", "1"), ("days", "false", "3"), ("note", "false", "null"), ("tags", "false", '[""]'))),
    ("deepseek_v32", dsml(("city", "true", "12"), ("days", "false", "3"), ("note", "true", "null"), ("tags", "false", '[""]'))),
    ("functiongemma", gemma('city:<escape>"O"<escape>,days:3,tags:[<escape>a<escape>],box:{a:1,b:<escape>x<escape>}')),
    ("functionary_v3", f">>>weather\n{JSON_CALL}>>>now\n{{}}"),
    ("pythonic", "[weather(city=\"Oslo\", days=3, exact=True, note=None, tags=['a','\\n'], box={'a': 1, \"b\": None}), now()]"),
    ("llama4_pythonic", "[now()]"),
    ("openai", harmony(JSON_CALL)),
    ("openai", f"<|channel|>analysis<|message|>Hm<|end|><|start|>assistant{harmony(JSON_CALL)}<|call|>"),
    ("openai", f"{harmony(JSON_CALL)}<|call|><|start|>assistant{harmony('{}', 'now')}"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:12<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>"),
    ("granite", f'<|tool_call|>[{{"name": "weather", "arguments": {JSON_CALL}}}, {{"name": "now", "arguments": {{}}}}]'),
    ("phi4_mini_json", f'functools[{{"name": "weather", "arguments": {JSON_CALL}}}]'),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), VALID)
def test_call_is_let_through_and_read_when_it_is_valid(compiler, name, text):
    assert accepts(grammar_of(compiler, name), text)
    assert check_calls(name, text).calls


INVALID = [
    ("qwen3_coder", qwen(DAYS, TAGS)),  # a required one is missing
    ("qwen3_coder", qwen(CITY, CITY, DAYS, TAGS)),  # one twice
    ("qwen3_coder", qwen(CITY, DAYS, TAGS, pair("other", "1"))),
    ("qwen3_coder", qwen(pair("city", "Oslo!!"), DAYS, TAGS)),  # too long
    ("qwen3_coder", qwen(CITY, pair("days", "15"), TAGS)),
    ("qwen3_coder", qwen(CITY, pair("days", "three"), TAGS)),
    ("qwen3_coder", qwen(CITY, pair("unit", "K"), DAYS, TAGS)),
    ("qwen3_coder", qwen(CITY, DAYS, pair("exact", "True"), TAGS)),  # which would be read, but is no JSON
    ("qwen3_coder", qwen(CITY, DAYS, pair("note", '"ab"'), TAGS)),  # which would be read as JSON
    ("qwen3_coder", qwen(CITY, DAYS, pair("tags", "[]"))),
    ("qwen3_coder", qwen(CITY, DAYS, TAGS, pair("box", '{"b": "x"}'))),
    ("qwen3_coder", qwen(CITY, DAYS, TAGS, pair("box", '{"a": 1, "c": 2}'))),
    ("qwen3_coder", qwen(CITY, DAYS, TAGS, pair("when", "2023-02-29"))),
    ("qwen3_coder", qwen(CITY, DAYS, TAGS, pair("code", "AB-12a"))),
    ("qwen3_coder", qwen(CITY, DAYS, TAGS).replace("weather", "rain")),
    ("qwen3_coder", qwen(CITY, DAYS, TAGS) + " and so on"),
    ("glm45", glm(("city", "Oslo"), ("days", "0"), ("tags", '["a"]'))),
    ("minimax_m2", minimax(("city", "\nOs"), ("days", "3"), ("tags", '["a"]'))),  # whose line break would be lost
    ("deepseek_v32", dsml(("city", "false", '"Os"'), ("days", "false", "3"), ("tags", "false", '["a"]'))),
    ("deepseek_v32", dsml(("city", "true", "Oslo"), ("days", "true", "3"), ("tags", "false", '["a"]'))),
    ("functiongemma", gemma("city:Oslo,days:3,tags:[<escape>a<escape>]")),
    ("functiongemma", gemma("city:<escape>Oslo<escape>,days:3")),
    ("functionary_v3", '>>>weather\n{"city": "Oslo"}'),
    ("functionary_v3", ">>>all\nNo."),
    ("pythonic", "[weather(city='Oslo', days=3)]"),
    ("pythonic", "[weather(city='Oslo', days='3', tags=['a'])]"),
    ("pythonic", "[weather(city='Oslo', days=3, tags=['a'], exact=true)]"),
    ("pythonic", "[weather(days=3, city='Oslo', tags=['a'])]"),
    ("pythonic", "[now(), rain()]"),
    ("openai", harmony('{"city": "Oslo"}')),
    ("openai", harmony(JSON_CALL, "rain")),
    ("openai", "<|channel|>final<|message|>No."),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
    ("granite", "<|tool_call|>[]"),
]


@pytest.mark.parametrize(("name", "text"), INVALID)
def test_call_is_not_let_through_when_it_is_not_of_the_schema(compiler, name, text):
    assert not accepts(grammar_of(compiler, name), text)


STRAY = [
    ("qwen3_coder", "Look: <function=weather>\n</function>"),
    ("qwen3_coder", f"Look: {qwen(DAYS)}"),
    ("minimax_m2", '<invoke name="weather">\n</invoke>'),
    ("deepseek_v32", '<｜DSML｜invoke name="weather">\n</｜DSML｜invoke>'),
    ("deepseek_v32", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'),
    ("deepseek_v31", "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
    ("pythonic", " [ weather(days=3)]"),
    ("llama4_pythonic", "So: <|python_start|>[weather(days=3)]<|python_end|>"),
    ("llama3_json", '{"name": "weather", "parameters": {}}'),
    ("llama3_json", 'So: <|python_tag|>{"name": "weather", "parameters": {}}'),
    ("openai", harmony("{}")),
    ("openai", f"<|channel|>final<|message|>Ok<|end|><|start|>assistant{harmony('{}')}"),
    ("openai", ' to=functions.weather<|channel|>commentary<|message|>{"days": 3}'),
    ("granite", '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'),
    ("functionary_v3", ">>>weather\n{}"),
    ("functionary_v3", ">>>all\nOk>>>now\n{}>>> weather\n{}"),
]


@pytest.mark.parametrize(("name", "text"), STRAY)
def test_no_call_gets_round_the_schema_when_tools_are_strict(compiler, name, text):
    assert parse(name, text).calls, "which the reader takes for a call"
    assert not accepts(grammar_of(compiler, name, forced=(), strict=("weather", "now")), text)


def test_text_and_calls_stand_together_when_tools_are_strict(compiler):
    text = f"I look:\n{qwen(CITY, DAYS, TAGS)} and\n{qwen(name='now')} so."
    assert accepts(grammar_of(compiler, "qwen3_coder", forced=(), strict=("weather", "now")), text)
    assert [call.name for call in check_calls("qwen3_coder", text).calls] == ["weather", "now"]


BEGUN = [
    (f"weather\n{JSON_CALL}", ["weather"], "", True),
    (f"now\n{{}}>>>weather\n{JSON_CALL}", ["now", "weather"], "", True),
    ("all\nSo be it.", [], "So be it.", False),
    (f"all\nI look.>>>weather\n{JSON_CALL}", ["weather"], "I look.", False),
]


@pytest.mark.parametrize(("text", "names", "content", "is_forced"), BEGUN)
def test_call_follows_an_opener_that_ends_the_prompt(compiler, text, names, content, is_forced):
    message = check_calls("functionary_v3", text, begun=True)
    assert ([call.name for call in message.calls], message.content) == (names, content)
    demanded = grammar_of(compiler, "functionary_v3", begun=True)
    strict = grammar_of(compiler, "functionary_v3", forced=(), strict=("weather", "now"), begun=True)
    assert accepts(strict, text)
    assert accepts(demanded, text) is is_forced
    for wrong in ("weather\n{}", " weather\n{}", f">>>{text}", "all\nSo>>>weather\n{}"):
        assert not accepts(strict, wrong), wrong
        assert not accepts(demanded, wrong), wrong


@pytest.mark.parametrize(("field", "options"), [("tool_choice", {}), ("tools", {"forced": (), "strict": ("now",)})])
def test_demand_is_refused_by_its_field_when_it_is_not_known_how_calls_are_written(field, options):
    with pytest.raises(RequestError, match=f"{field}: the calls of this model's format .own. cannot be enforced") as caught:
        constraint_of("own", **options)
    assert caught.value.param == field


def test_tool_is_refused_when_its_name_means_text_in_the_format():
    with pytest.raises(RequestError, match="tools: 'all' is what this model calls text"):
        constraint_of("functionary_v3", tools=(Tool("all", {}),))
    assert constraint_of("functionary_v31", tools=(Tool("all", {}),)) is not None


def test_calls_of_all_formats_can_be_enforced():
    assert {*CALL_FORMS, "openai"} == set(TOOL_FORMATS)


@pytest.mark.parametrize(("name", "call"), [("qwen3_coder", qwen(name="now")), ("pythonic", "[now()]"), ("hermes", None)])
@pytest.mark.parametrize("starts", [False, True])
def test_calls_follow_reasoning_when_the_model_reasons(compiler, name, call, starts):
    call = call or '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    text = f"{'' if starts else '<think>'}\nwhat <now?\n</think>\n\n{call}"
    assert accepts(grammar_of(compiler, name, reasoning="qwen3", starts=starts), text)
    message = parse(name, text, reasoning="qwen3", starts=starts)
    assert (message.reasoning.strip(), [found.name for found in message.calls]) == ("what <now?", ["now"])


HIDDEN = [
    ("hermes", '<think>so<tool_call>{"name": "weather", "arguments": {}}</tool_call></think>No.'),
    ("qwen3_coder", f"<think>so{qwen(DAYS)}</think>No."),
    ("pythonic", "<think>so</think>\n\n[weather(days=3)]"),
    ("llama3_json", '<think>so</think>{"name": "weather", "parameters": {}}'),
]


@pytest.mark.parametrize(("name", "text"), HIDDEN)
def test_no_call_gets_round_the_schema_in_or_behind_reasoning(compiler, name, text):
    assert parse(name, text, reasoning="qwen3").calls, "which the reader takes for a call"
    strict = grammar_of(compiler, name, forced=(), strict=("weather",), reasoning="qwen3")
    assert not accepts(strict, text)
    assert accepts(strict, "<think>so</think>\n\nNo.")
    assert accepts(strict, "No.")
    assert not accepts(grammar_of(compiler, name, reasoning="qwen3"), text)


def test_answer_is_the_final_message_when_a_format_with_channels_has_a_schema(compiler):
    answer = Constraint(kind="json_schema", source='{"type": "integer", "minimum": 3}')
    grammar = grammar_of(compiler, "openai", forced=(), answer=answer)
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert accepts(grammar, f"{thought}<|channel|>final<|message|>5")
    assert accepts(grammar, f"{thought}{harmony('{}', 'now')}")
    assert not accepts(grammar, f"{thought}5")
    assert not accepts(grammar, f"{thought}<|channel|>final<|message|>2")


OTHERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": ["integer", "string"]}}
ANYTHING = {"type": "object", "properties": {"x": {"type": "object"}, "y": {"type": ["array", "null"]}}, "required": ["x"]}
FORMAT_NAMES = tuple(sorted(ENFORCED_FORMATS - {"regex", "json-pointer", "relative-json-pointer"}))  # those without escapes
FORMS = {
    "type": "object",
    "properties": {name: {"type": "string", "format": name} for name in FORMAT_NAMES},
    "required": list(FORMAT_NAMES),
    "additionalProperties": False,
}
STRINGS = {
    "type": "object",
    "properties": {
        "a": {"type": ["string", "integer", "boolean", "null"]},
        "b": {"enum": ["1", 1, "null", None, "x y", '"q"']},
        "c": {"anyOf": [{"type": "string", "pattern": "a|^b", "maxLength": 4}, {"type": "array", "items": {"const": "</p>"}}]},
        "d": {"oneOf": [{"const": 5}, {"type": "object", "properties": {}, "additionalProperties": {"type": "string"}}]},
        "e": {"maxLength": 4},
    },
    "required": ["a", "b", "c", "d", "e"],
    "additionalProperties": False,
}
NESTED = {
    "type": "object",
    "properties": {
        "p": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False, "minItems": 1},
        "q": {"type": "array", "prefixItems": [{"const": 1}], "items": {"enum": ["z", "zz"]}, "maxItems": 3, "minItems": 2},
        "r": {"allOf": [{"$ref": "#/$defs/point"}], "description": "as pydantic writes it"},
        "s": {"type": "number", "exclusiveMinimum": 0, "maximum": 9},
    },
    "required": ["p", "q", "r", "s"],
    "additionalProperties": False,
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}, "additionalProperties": False}},
}
NOT_JSON = sorted(name for name, form in CALL_FORMS.items() if form.style != "json")


@pytest.mark.covering
@pytest.mark.parametrize(
    "schema", [OTHERS, ANYTHING, FORMS, STRINGS, NESTED], ids=["others", "any", "forms", "strings", "nested"]
)
@pytest.mark.parametrize("name", NOT_JSON)
def test_arguments_are_valid_when_the_schema_has_what_is_seldom(compiler, name, schema):
    tools = (Tool("f", schema),)
    constraint = replace(constraint_of(name, tools=tools, parallel=False), max_open_length=4)
    grammar = compiler.start(constraint).result()
    found = [text for seed in range(6) if (text := sample(grammar, seed)) is not None]
    assert found
    for text in found:
        message = parse(name, text, tools)
        assert len(message.calls) == 1, text
        assert not message.content.strip(), text
        arguments = json.loads(message.calls[0].arguments)
        validate(arguments, schema)


@pytest.mark.parametrize("key", ["b", "due date", "due-date", "größe (cm)", "名", "a.b/c", "9", "aa", "x" * 64])
def test_free_name_may_be_what_the_reader_takes_for_one_when_names_have_no_quotes(compiler, key):
    tools = (Tool("f", OTHERS),)
    grammar = grammar_of(compiler, "functiongemma", tools=tools)
    text = gemma(f"a:1,{key}:<escape>x<escape>,box:2").replace("call:weather", "call:f")
    assert accepts(grammar, text)
    (call,) = check_calls("functiongemma", text, tools).calls
    assert json.loads(call.arguments) == {"a": 1, key: "x", "box": 2}
    for other in ("a", " b", "b ", "", "<b", "}", '"b"', "x" * 65, "b\n", "b:c"):
        assert not accepts(grammar, text.replace(f",{key}:", f",{other}:")), other


@pytest.mark.covering(keep=False)
@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"properties": {"a": {"not": {"minimum": 1}}}}, "/properties/a/not"),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "/properties/a/uniqueItems"),
        ({"properties": {"a": {"type": "object", "patternProperties": {"x": {}}}}}, "/properties/a/patternProperties"),
        ({"minProperties": 2}, "/minProperties"),
        ({"properties": {"a": {"allOf": [{"type": "string"}, {"minLength": 2}]}}}, "/properties/a/allOf"),
        ({"properties": {"a": {"type": "string", "pattern": "a(^b)"}}}, "/properties/a/pattern"),
        ({"properties": {"a": {"enum": [1], "minimum": 0}}}, "/properties/a/minimum"),
        ({"properties": {"a": {"oneOf": [{"type": "string"}, {"const": "x"}]}}}, "/properties/a/oneOf"),
        ({"required": ["a"], "additionalProperties": False}, "/required"),
        ({"properties": {"a": {"$ref": "#"}}}, "/properties/a/$ref"),
        ({"properties": {"a~b/c": {"not": {"minimum": 1}}}}, "/properties/a~0b~1c/not"),
    ],
)
@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic", "functiongemma"])
def test_keyword_is_refused_by_its_pointer_when_the_form_of_calls_cannot_enforce_it(compiler, name, schema, pointer):
    with pytest.raises(RequestError, match=re.escape(f"tool 'f' {pointer})")) as caught:
        grammar_of(compiler, name, tools=(TOOLS[1], Tool("f", schema)))
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("name", "schema", "pointer"),
    [
        ("qwen3_coder", {"properties": {"a>b": {}}}, "/properties/a>b"),
        ("qwen3_coder", {"properties": {"a": {"const": "x</parameter>"}}}, "/properties/a/const"),
        ("minimax_m2", {"properties": {"a": {"const": "x\n"}}}, "/properties/a/const"),
        ("qwen3_coder", {"properties": {"a": {"type": ["string", "integer"], "minimum": 3}}}, "/properties/a/minimum"),
        ("pythonic", {"properties": {"a b": {}}}, "/properties/a b"),
        ("functiongemma", {"properties": {"a": {"enum": ["<escape>"]}}}, "/properties/a/enum"),
    ],
)
def test_what_cannot_be_written_is_refused_by_its_pointer(compiler, name, schema, pointer):
    with pytest.raises(RequestError, match=re.escape(f"tool 'f' {pointer})")):
        grammar_of(compiler, name, tools=(Tool("f", schema),))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["glm45", "qwen3_coder", "functiongemma", "deepseek_v32", "kimi_k2", "openai"])
def test_markers_are_written_as_their_tokens_when_the_vocabulary_has_them(name):
    markers = (*markers_of(name, HARMONY if name == "openai" else None), "｜DSML｜")
    texts = [bytes([byte]) for byte in range(256)] + [marker.encode() for marker in markers if "｜DSML｜ " not in marker]
    texts = [text for text in texts if len(text) == 1 or name != "deepseek_v32" or text == "｜DSML｜".encode()]
    ids = {text: token_id for token_id, text in enumerate(texts)}
    special = frozenset(range(256, len(texts)))
    spelling = Spelling(texts, special, (lambda text: list(text.encode()),))
    vocabulary = Vocabulary(tuple(texts), special, spelling, lambda text: ids.get(text.encode()))
    valid = next(text for found, text in VALID if found == name)
    pattern = re.compile("|".join(re.escape(texts[token_id].decode()) for token_id in special))
    tokens: list[int] = []
    at = 0
    for found in pattern.finditer(valid):
        tokens += [*valid[at : found.start()].encode(), ids[found.group().encode()]]
        at = found.end()
    tokens += valid[at:].encode()
    compiler = GrammarCompiler(lambda: vocabulary)
    try:
        for options in ({}, {"forced": (), "strict": ("weather", "now")}):
            grammar = grammar_of(compiler, name, **options)
            assert len(tokens) < len(valid.encode())
            assert accepts(grammar, tokens), options
        assert not accepts(grammar_of(compiler, name), valid), "the markers spelled out"
    finally:
        compiler.close()


def test_what_is_forced_is_the_beginning_of_the_call(compiler):
    matcher = grammar_of(compiler, "qwen3_coder", forced=("weather",)).new_matcher()
    forced = bytes(matcher.forced_tokens())
    assert forced == b"<tool_call>\n<function=weather>\n<parameter=city>\n"


@pytest.mark.parametrize("kind", ["array", "string", ["null", "integer"]])
@pytest.mark.parametrize("name", ["hermes", "pythonic"])
def test_strict_tool_is_refused_when_its_arguments_could_not_be_an_object(name, kind):
    with pytest.raises(RequestError, match=r"'odd' must allow an object, got the type"):
        constraint_of(name, (Tool("odd", {"type": kind}),))


def test_arguments_are_an_object_when_their_schema_allows_more(compiler):
    tools = (Tool("f", {"type": ["object", "null"], "additionalProperties": False}),)
    grammar = grammar_of(compiler, "hermes", tools=tools)
    assert accepts(grammar, '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    assert not accepts(grammar, '<tool_call>\n{"name": "f", "arguments": null}\n</tool_call>')


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", qwen(pair("$filter", "x"), pair("first name", "y"), pair("user-id", "z"), name="free")),
        ("glm45", glm(("$filter", "x"), ("first name", "y"), name="free")),
        ("pythonic", '[free(user-id="z", 2d=1)]'),
    ],
)
def test_argument_of_any_name_is_let_through_when_its_tool_is_not_strict(compiler, name, text):
    tools = (*TOOLS, Tool("free", {"type": "object"}))
    grammar = grammar_of(compiler, name, tools=tools, forced=("free",), strict=("weather",))
    assert accepts(grammar, text)
    assert parse(name, text, tools).calls


def test_sixty_tools_are_let_through_when_one_has_to_be_called(compiler):
    schema = {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(8)}}
    grammar = grammar_of(compiler, "pythonic", tools=[Tool(f"t{number}", schema) for number in range(60)])
    assert accepts(grammar, "[t59(p0=1, p7=2)]")


def test_schema_of_a_json_call_is_named_by_its_pointer_when_it_cannot_be_compiled(compiler):
    choices = [{"type": "string"}, {"const": "x"}]
    tools = (TOOLS[1], Tool("f", {"type": "object", "properties": {"a": {"oneOf": choices}}}))
    with pytest.raises(
        RequestError, match=re.escape("oneOf can only be enforced where its schemas exclude each other")
    ) as caught:
        grammar_of(compiler, "hermes", tools=tools)
    assert "tool 'f' /properties/a/oneOf)" in str(caught.value)
    assert "%llguidance" not in str(caught.value)
