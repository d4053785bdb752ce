from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.base.errors import ConfigError
from quire.text.parsing.events import CallArguments, CallEnd, CallStart, ReasoningPiece, TextPiece, fold
from quire.text.parsing.formats import REASONING_FORMATS, TOOL_FORMATS, markers_of
from quire.text.parsing.parser import OutputParser, Tool
from quire.text.token_streams import Utf8Stream
from tests.unit.text.parsing.outputs import CASES, TOOLS, hermes

# Formats whose arguments are not JSON when the model writes them.
CONVERTED = {
    *("qwen3_coder", "glm45", "glm47", "minimax_m2", "pythonic", "llama4_pythonic", "deepseek_v32", "functiongemma", "gemma4"),
    *("seed_oss", "step3", "hy_v3", "olmo3", "lfm2"),
}
# Formats that take marks of their own out of content.
MARKED = ("openai", "functionary_v3", "cohere_command3", "cohere_command4", "ernie45", "hunyuan_a13b")


def make_parser(tool_format, reasoning_format="qwen3", tools=TOOLS, starts=False, **kwargs):
    kwargs.setdefault("make_call_id", lambda name, index: f"id{index}")
    return OutputParser(
        tool_format=tool_format, reasoning_format=reasoning_format, tools=tools, starts_in_reasoning=starts, **kwargs
    )


def parse(pieces, *args, **kwargs):
    parser = make_parser(*args, **kwargs)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return fold([*events, *parser.finish()])


def parse_case(case, pieces):
    return parse(pieces, case.format, case.reasoning, starts=case.starts, starts_in_call=case.starts_in_call)


def cuts(text, seed):
    """Return ways to cut a text: whole, by characters, in two at every place, in fixed sizes, and at random."""
    rng = random.Random(seed)
    found = [[text]]
    found += [[text[i : i + size] for i in range(0, len(text), size)] for size in (1, 2, 3, 5, 7)]
    found += [[text[:i], text[i:]] for i in range(1, len(text))]
    for _ in range(20):
        places = sorted(rng.sample(range(len(text)), min(len(text) - 1, rng.randint(1, 12))))
        found.append([text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)])
    return found


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_message_is_the_same_when_the_text_is_cut_anywhere(case):
    for pieces in cuts(case.text, seed=5):
        assert parse_case(case, pieces) == case.message, pieces


def decoded(parts):
    """Return the text that each part of an output's bytes makes certain, as the detokenizer does; the last has the rest."""
    stream = Utf8Stream(parts.__getitem__, strips_first_space=False)
    return [*(stream.push(number) for number in range(len(parts))), stream.finish()]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_message_is_the_same_when_the_bytes_are_cut_anywhere(case):
    data = case.text.encode()
    # Between characters the test above has cut already: what is left are the places within one, which begin with bits 10.
    within = [i for i in range(1, len(data)) if data[i] & 0xC0 == 0x80]
    ways = [[data[i : i + 1] for i in range(len(data))], *([data[:i], data[i:]] for i in within)]
    for parts in ways:
        pieces = decoded(parts)
        assert "".join(pieces) == case.text
        assert parse_case(case, pieces) == case.message, parts


def test_bytes_are_cut_within_characters_of_several_lengths():
    assert decoded(["東".encode()[:2], "東".encode()[2:] + b"a", "😀".encode()[:1], "😀".encode()[1:]]) == [
        "",
        "東a",
        "",
        "😀",
        "",
    ]
    assert {len(character.encode()) for case in CASES.values() for character in case.text} >= {1, 3, 4}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_nothing_is_lost_or_raised_when_the_output_breaks_off(case):
    for end in range(len(case.text) + 1):
        whole = parse_case(case, [case.text[:end]])
        assert parse_case(case, case.text[:end]) == whole
        assert whole.calls[:-1] == case.message.calls[: max(len(whole.calls) - 1, 0)]
        for broken, complete in zip(whole.calls, case.message.calls, strict=False):
            assert (broken.call_id, broken.name) == (complete.call_id, complete.name)
            if broken != complete and case.format not in CONVERTED and complete.arguments != '{"days": 2}':
                assert complete.arguments.startswith(broken.arguments)
        if not whole.calls and not case.thoughts and not case.starts and case.format not in MARKED:
            shown = case.text[:end].removeprefix("<think>\n\n</think>").removeprefix("<think>")
            shown = shown.removeprefix("<|channel>thought\n<channel|>").removeprefix("<|channel>thought").strip()
            assert whole.reasoning or whole.content.strip() == shown or case.format is None


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_events_are_in_order(case):
    parser = make_parser(case.format, case.reasoning, starts=case.starts, starts_in_call=case.starts_in_call)
    events = [event for character in case.text for event in parser.feed(character)] + parser.finish()
    num_started, is_open = 0, False
    for event in events:
        if isinstance(event, CallStart):
            assert (event.index, is_open) == (num_started, False)
            num_started, is_open = num_started + 1, True
        elif isinstance(event, CallArguments | CallEnd):
            assert is_open
            assert event.index == num_started - 1
            is_open = isinstance(event, CallArguments)
        else:
            assert not is_open
            assert event.text
    assert not is_open


@pytest.mark.parametrize("format", TOOL_FORMATS)
def test_calls_are_text_when_there_are_no_tools(format):
    for case in CASES.values():
        if case.format == format and case.format not in MARKED and not case.thoughts and "think" not in case.text:
            assert parse([case.text], format, None, tools=()).content == case.text


MARKERS = sorted(
    {marker for name in TOOL_FORMATS for marker in markers_of(name, None)}
    | {marker for name in REASONING_FORMATS for marker in markers_of(None, name)}
)
SOUP = [
    *MARKERS,
    *"\"\\{}[](),;:=\n aé'5",
    "now",
    "get_weather",
    '{"name": "',
    '{"name": "now", "arguments": ',
    '", "arguments": {',
]
SOUP += ["now(", "city", "[now(", "city="]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.sampled_from(sorted(TOOL_FORMATS)),
    st.sampled_from(sorted(REASONING_FORMATS)),
    st.lists(st.sampled_from(SOUP), max_size=40),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_any_text_is_parsed_alike_when_cut_otherwise(tool_format, reasoning_format, words, seed, starts):
    text = "".join(words)
    expected = parse([text], tool_format, reasoning_format, starts=starts)
    assert parse(text, tool_format, reasoning_format, starts=starts) == expected
    rng = random.Random(seed)
    places = sorted(rng.sample(range(len(text) + 1), min(len(text), 5)))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert parse(pieces, tool_format, reasoning_format, starts=starts) == expected


LONG = {
    "text": "word " * 4000,
    "openers": "<tool_call>" * 2000,
    "nested": '<tool_call>{"arguments": "' * 1500,
    "brackets": '<tool_call>{"name": "now", "arguments": ' + "[" * 20_000,
    "spaces-after-call": hermes("now", "{}") + " \n" * 10_000,
    "spaces-in-call": "<tool_call>" + " " * 20_000,
    "closers": "<tool_call><function=get_weather><parameter=city>" + "</parameter> " * 1500,
    "spaces-in-value": "<tool_call><function=get_weather><parameter=city>" + "</parameter>" + " " * 20_000,
    "headers": "<function=" * 2000,
    "long-key": '<tool_call>{"name": "now", "arguments": {"' + "k" * 20_000,
    "early-arguments": '<tool_call>{"arguments": {"k": "' + "k" * 100_000,
    "markers-in-values": "<tool_call>" + '{"name": "now", "arguments": {"a": "</think>' * 1000,
    "deep-python": "[get_weather(near=" + "[" * 20_000,
    "channels": "<|channel|>" * 2000,
    "messages": "<|channel|>final<|message|>" * 1000,
}


@pytest.mark.covering
@pytest.mark.parametrize("tool_format", ["hermes", "qwen3_coder", "pythonic", "llama3_json", "deepseek_v3", "openai"])
@pytest.mark.parametrize("text", LONG.values(), ids=LONG.keys())
def test_work_is_linear_when_the_text_is_hostile(text, tool_format):
    results = []
    for size in (3, len(text)):
        parser = make_parser(tool_format)
        events = [event for i in range(0, len(text), size) for event in parser.feed(text[i : i + size])]
        results.append(fold([*events, *parser.finish()]))
        assert parser.num_steps < 250 * len(text)
    assert results[0] == results[1]


def test_early_arguments_are_text_when_they_are_too_long():
    text = '<tool_call>{"arguments": {"k": "' + "k" * 70_000 + '"}, "name": "now"}</tool_call>'
    for size in (1000, len(text)):
        message = parse([text[i : i + size] for i in range(0, len(text), size)], "hermes")
        assert (message.content, message.calls) == (text, ())


def test_a_marker_counts_only_when_its_token_came():
    ids = {"<tool_call>": 7, "</tool_call>": 8, "<think>": 5, "</think>": 6}
    parser = make_parser("hermes", marker_token_ids=ids)
    events = parser.feed("Write <tool_call>", [1, 2, 3])
    events += parser.feed('{"name": "now"}</tool_call>.\n', [4])
    events += parser.feed("", [7])
    events += parser.feed("<tool_", [])
    events += parser.feed('call>\n{"name": "now", "arguments": {"x": "<tool_call> ', [9])
    events += parser.feed('</tool_call>"}}\n</tool_call>', [8, 8])
    message = fold(events + parser.finish())
    assert message.content == 'Write <tool_call>{"name": "now"}</tool_call>.\n'
    assert [call.arguments for call in message.calls] == ['{"x": "<tool_call> </tool_call>"}']


def test_reasoning_is_ended_by_the_token_when_the_marker_is_one():
    parser = make_parser(None, starts=True, marker_token_ids={"<think>": 5, "</think>": 6})
    assert parser.is_in_reasoning
    events = parser.feed("a </think> b", [1, 2])
    assert parser.is_in_reasoning
    events += parser.feed("</thi", [6])
    events += parser.feed("nk>c")
    assert not parser.is_in_reasoning
    assert fold(events + parser.finish()) == fold([ReasoningPiece("a </think> b"), TextPiece("c")])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_message_is_the_same_when_markers_are_tokens(case):
    """Every marker of the case comes as one token, all other text by characters, which come up to three steps late."""
    markers = [text for text in markers_of(case.format, case.reasoning) if text[0] in "<[" and text[-1] in ">]"]
    ids = {marker: 1000 + index for index, marker in enumerate(markers)}
    pattern = re.compile("|".join(map(re.escape, sorted(ids, key=len, reverse=True))) or "(?!)")
    tokens, start = [], 0
    for found in [*pattern.finditer(case.text), None]:
        tokens += [(1, character) for character in case.text[start : found.start() if found else None]]
        if found:
            tokens.append((ids[found.group()], found.group()))
            start = found.end()
    for lag in (0, 3):
        parser = make_parser(
            case.format, case.reasoning, starts=case.starts, starts_in_call=case.starts_in_call, marker_token_ids=ids
        )
        texts = [""] * lag + [text for _, text in tokens]
        pairs = zip([[token_id] for token_id, _ in tokens] + [[]] * lag, texts, strict=True)
        events = [event for token_ids, text in pairs for event in parser.feed(text, token_ids)]
        message = fold([*events, *parser.finish()])
        if "late" not in case.text and case.text != CASES["reasoning-late"].text:
            assert message == case.message


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_nothing_is_parsed_when_no_marker_token_came(case):
    markers = markers_of(case.format, case.reasoning)
    parser = make_parser(case.format, case.reasoning, marker_token_ids={marker: 1000 + i for i, marker in enumerate(markers)})
    message = fold(parser.feed(case.text, [1, 2, 3]) + parser.finish())
    if case.format not in ("llama3_json", "pythonic"):
        assert (message.content, message.calls) == (case.text, ())


def test_lone_surrogates_are_replaced_when_markers_are_tokens():
    parser = make_parser("hermes", marker_token_ids={"<tool_call>": 7})
    assert fold(parser.feed("a\ud800b") + parser.finish()).content == "a\ufffdb"


def test_the_output_is_cut_when_only_one_call_is_allowed():
    text = f"a{hermes('now', '{}')}\n{hermes('now', '{}')} b"
    for pieces in cuts(text, seed=1):
        parser = make_parser("hermes", parallel_tool_calls=False)
        events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
        assert (fold(events).content, len(fold(events).calls), parser.is_complete) == ("a", 1, True)


def test_ids_are_random_in_the_shape_of_the_format():
    for name, pattern in (("hermes", r"call_[A-Za-z0-9]{24}"), ("mistral", r"[A-Za-z0-9]{9}")):
        text = CASES["mistral" if name == "mistral" else "hermes"].text
        message = parse([text], name, make_call_id=None)
        ids = [call.call_id for call in message.calls]
        assert len(set(ids)) == 2
        assert all(re.fullmatch(pattern, call_id) for call_id in ids)


def test_text_comes_at_once_when_it_cannot_become_a_marker():
    parser = make_parser("hermes")
    assert parser.feed("Hello") == [TextPiece("Hello")]
    assert parser.feed(" a < b") == [TextPiece(" a < b")]
    assert parser.feed(" <tool") == [TextPiece(" ")]
    assert parser.feed("s> ") == [TextPiece("<tools> ")]


def test_a_call_starts_as_soon_as_its_name_is_known():
    parser = make_parser("hermes")
    assert parser.feed('<tool_call>{"name": "now"') == [CallStart(0, "id0", "now")]
    assert parser.feed(', "arguments": {"a"') == [CallArguments(0, '{"a"')]
    assert parser.feed(": 1}}") == [CallArguments(0, ": 1}"), CallEnd(0)]


@pytest.mark.parametrize("option", ["tool_format", "reasoning_format"])
def test_an_unknown_format_is_refused_with_the_list(option):
    names = {"tool_format": None, "reasoning_format": None, option: "nosuch"}
    with pytest.raises(ConfigError, match="'nosuch' is not known; allowed are apertus, "):
        OutputParser(**names, tools=(Tool("f"),), starts_in_reasoning=False)


def test_content_marks_are_taken_out_when_there_are_no_tools():
    assert parse("all\nHi", "functionary_v3", None, tools=(), starts_in_call=True).content == "Hi"
    assert parse(">>>all\nHi>>>now\n{}", "functionary_v3", None, tools=()).content == "Hi>>>now\n{}"


REFERRED = Tool(
    "f",
    {
        "type": "object",
        "properties": {"word": {"$ref": "#/$defs/word"}, "box": {"$ref": "#/$defs/lost"}},
        "additionalProperties": {"type": "integer"},
        "$defs": {"word": {"enum": ["1", "2"]}},
    },
)


def test_values_have_the_types_of_their_schemas_when_these_are_referred_to():
    text = (
        "<function=f>\n<parameter=word>\n1\n</parameter>\n<parameter=box>\n{}\n</parameter>\n<parameter=more>\n3\n</parameter>\n"
        "</function>"
    )
    (call,) = parse([text], "qwen3_coder", tools=(REFERRED,)).calls
    assert call.arguments == '{"word": "1", "box": {}, "more": 3}'


def test_numbers_stay_as_they_are_when_a_call_is_written_as_python():
    big = "1" * 500
    (call,) = parse([f"[now(a=1.10, b=1e400, c={big}, d=-0, e=.5, f=0x10)]"], "pythonic").calls
    assert call.arguments == f'{{"a": 1.10, "b": 1e400, "c": {big}, "d": -0, "e": 0.5, "f": 16}}'


@pytest.mark.parametrize("reference", ["#/$defs/a", "#/$defs/a/anyOf/" + "1" * 5000])
def test_schema_whose_references_lead_everywhere_is_read_in_a_moment(reference):
    """A hundred ways at each of eight steps would never end; nor may an index of thousands of digits raise."""
    schema = {"properties": {"x": {"$ref": reference}}, "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 100}}}
    parser = make_parser("qwen3_coder", tools=[Tool("f", schema)])
    text = "<tool_call>\n<function=f>\n<parameter=x>\n5\n</parameter>\n</function>\n</tool_call>"
    message = fold([*parser.feed(text), *parser.finish()])
    assert message.calls[0].arguments in ('{"x": "5"}', '{"x": 5}')
