from __future__ import annotations

import json

import pytest

from quire.base.errors import RequestError
from quire.text.chat_template import ChatTemplate

# As DeepSeek R1 does: all system texts in front, arguments concatenated as text, developer left out.
R1 = (
    "{% set ns = namespace(s='') %}{% for m in messages if m.role == 'system' %}{% set ns.s = ns.s + m.content %}"
    "{% endfor %}{{ ns.s }}{% for m in messages %}{% if m.role == 'user' %}<U>{{ m.content }}{% elif m.role == 'tool' %}<T>"
    "{{ m.content }}{% elif m.role == 'assistant' %}<A>{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name + "
    "'\n' + c.function.arguments }}{% endfor %}{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments|tojson }}"
    "{% endfor %}{% endfor %}"
)
PRINTING = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments }}{% endfor %}{% endfor %}"
ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system must be first') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
DROPPING_SYSTEMS = "{% if messages[0].role == 'system' %}S:{{ messages[0].content }}{% endif %}" + PLAIN.replace(
    "%}[", "if m.role != 'system' %}[", 1
)
PARTS = "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
NO_TOOL = "{% for m in messages %}{% if m.role in ('user', 'assistant') %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate!') }}"
    "{% endif %}{{ m.content }}{% endfor %}"
)

USER = {"role": "user", "content": "Hi"}


def render(source, messages):
    return ChatTemplate(source, {}).render(messages)


def system(text, role="system"):
    return {"role": role, "content": text}


def call(arguments):
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


@pytest.mark.parametrize("arguments", [{"a": "é"}, '{"a": "é"}'], ids=["object", "text"])
def test_arguments_are_what_the_template_wants(arguments):
    assert render(R1, [USER, call(arguments)]) == '<U>Hi<A>f\n{"a": "é"}'
    assert render(PLAIN, [USER, call(arguments)]) == '[user]Hi[assistant]{"a": "é"}'
    assert json.loads(render(PRINTING, [USER, call(arguments)]).removeprefix("Hi")) == {"a": "é"}


def test_developer_becomes_system_when_the_template_leaves_it_out():
    assert render(R1, [system("Be brief.", "developer"), USER]) == "Be brief.<U>Hi"
    assert render(PLAIN, [system("Be brief.", "developer"), USER]) == "[developer]Be brief.[user]Hi"


@pytest.mark.parametrize("source", [ONE_SYSTEM, DROPPING_SYSTEMS], ids=["raises", "drops"])
def test_system_messages_are_merged_when_only_one_is_shown(source):
    expected = render(source, [system("A\n\nB"), USER])
    assert "A\n\nB" in expected
    assert render(source, [system("A"), system("B"), USER]) == expected
    assert render(source, [system("A"), USER, system("B")]) == expected


def test_system_messages_stay_when_the_template_takes_them():
    assert render(PLAIN, [system("A"), USER, system("B")]) == "[system]A[user]Hi[system]B"


def test_content_becomes_parts_when_the_template_needs_them():
    assert render(PARTS, [USER, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}]) == "[user]Hi[assistant]x"


@pytest.mark.parametrize("role", ["tool", "system", "function"])
def test_a_message_is_refused_when_the_template_would_drop_it(role):
    with pytest.raises(RequestError, match=rf"messages\[1\] has the role '{role}'") as raised:
        render(NO_TOOL, [USER, {"role": role, "content": "4"}])
    assert raised.value.param == "messages"


def test_what_the_template_refuses_aloud_is_left_to_it():
    with pytest.raises(RequestError, match="alternate!"):
        render(ALTERNATING, [USER, system("x"), USER, USER])


def test_real_template_takes_the_shapes_of_the_api(real_tokenizer):
    tokenizer = real_tokenizer("qwen3")
    messages = [system("A", "developer"), USER, call('{"a": 1}'), {"role": "tool", "tool_call_id": "1", "content": "4"}]
    text = tokenizer.apply_chat_template(messages)
    assert "<|im_start|>system\nA" in text
    assert '"arguments": {"a": 1}' in text
    assert "<tool_response>\n4\n</tool_response>" in text
