"""Assistant's messages that the template of a family renders are parsed back to the same messages, at every cut."""

from __future__ import annotations

import json
import random

import pytest

from quire.text.chat_template import ChatTemplate
from quire.text.parsing.detection import ParserChoice, detect_formats, starts_in_reasoning
from quire.text.parsing.events import CallArguments, fold
from quire.text.parsing.parser import OutputParser
from tests.unit.text.parsing.family_templates import FAMILIES
from tests.unit.text.parsing.outputs import TOOLS

ARGUMENTS = {
    "city": 'Zürich "Main" 東京\n<b> } ] , 💨',
    "days": -3,
    "unit": "C",
    "exact": True,
    "near": ["a, b", "c"],
    "options": {"fields": [{"a": None}, False], "n": 1.5},
    "factor": 0.25,
}
CALLS = {
    "none": (),
    "one": (("get_weather", {"city": "Paris", "days": 3}),),
    "two": (("get_weather", ARGUMENTS), ("now", {})),
    "words": (("get_weather", {"city": "5", "exact": False, "near": []}), ("brave_search", {"query": "true"})),
}


def render(family, content, reasoning, calls):
    """Return the prompt of an answer, and what the template makes of the answer."""
    template = ChatTemplate(FAMILIES[family].template, {})
    asked = [{"role": "user", "content": "How is the weather?"}]
    called = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    answer = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": called}
    prompt = template.render(asked, add_generation_prompt=True)
    whole = template.render([*asked, answer], add_generation_prompt=False)
    assert whole.startswith(prompt)
    assert whole.endswith(FAMILIES[family].end)
    return prompt, whole[len(prompt) :].removesuffix(FAMILIES[family].end)


def parse(pieces, family, prompt, formats):
    parser = OutputParser(
        tool_format=formats.tool_format,
        reasoning_format=formats.reasoning_format,
        tools=TOOLS,
        starts_in_reasoning=starts_in_reasoning(prompt, formats.reasoning_format),
        make_call_id=lambda name, index: str(index),
    )
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    return events, fold(events)


def cuts(text, seed):
    chance = random.Random(seed)
    yield [text]
    yield list(text)
    yield from ([text[:at], text[at:]] for at in range(1, len(text)))
    for _ in range(20):
        places = sorted(chance.sample(range(len(text)), min(len(text), chance.randint(1, 12))))
        yield [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.covering
@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("content", ["", "I look at it first."], ids=["bare", "content"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rendered_message_comes_back_at_every_cut(family, content, calls):
    row = FAMILIES[family]
    formats = detect_formats(row.template, lambda token: None)
    assert formats == ParserChoice(row.tool_format, row.reasoning_format)
    reasoning = "" if row.reasoning_format is None else "The user <wants> rain.\nSo do I."
    if family == "Command A" and calls:
        content = ""  # what the model writes beside calls is its reasoning
    prompt, output = render(family, content, reasoning, calls)
    for pieces in cuts(output, seed=3):
        events, message = parse(pieces, family, prompt, formats)
        assert (message.content.strip(), message.reasoning) == (content, reasoning), pieces
        assert [(call.name, json.loads(call.arguments)) for call in message.calls] == list(calls), pieces
        for index, call in enumerate(message.calls):
            deltas = [event.text for event in events if isinstance(event, CallArguments) and event.index == index]
            assert "".join(deltas) == call.arguments
