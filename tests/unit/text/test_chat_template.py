from __future__ import annotations

import json
import sys
import threading
from datetime import datetime

import pytest

from quire.base.errors import ModelFormatError, RequestError, WorkerError
from quire.base.sandbox import Sandbox
from quire.text.chat_template import SANDBOX_COMMAND, ChatTemplate

USER = [{"role": "user", "content": "Hi"}]
DOUBLING = "{% set ns = namespace(x=START) %}{% for i in range(99) %}{% set ns.x = STEP %}{% endfor %}"


KILLED = """
import os, signal, sys
from quire.base.sandbox_server import serve
from quire.text.template_main import answer_to
def answer(message):
    marker, whom = message["variables"]["bos_token"].split(" ")
    if not os.path.exists(marker):
        if whom != "always":
            open(marker, "w").close()
        if whom == "both":
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return answer_to(message)
serve(lambda setup: answer)
"""


@pytest.fixture(scope="module")
def narrow_sandbox():
    """A sandbox that gives up soon."""
    sandbox = Sandbox(SANDBOX_COMMAND, max_cpu_s=0.2, memory_bytes=512 << 20)
    yield sandbox
    sandbox.close()


def render(source, messages=USER, sandbox=None, **kwargs):
    return ChatTemplate(source, {"bos_token": "<s>"}, sandbox=sandbox).render(messages, **kwargs)


def doubling(start, step, use=""):
    return DOUBLING.replace("START", start).replace("STEP", step) + use


HOSTILE = {
    "nested-loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "writing-loops": "{% for a in range(99999) %}{% for b in range(99999) %}some text{% endfor %}{% endfor %}",
    "huge-range": "{% for a in range(10**9) %}{% endfor %}",
    "filtered-loop": "{% for x in range(99999) %}{% for y in range(99999) if false %}{% endfor %}{% endfor %}",
    "recursive-loop": "{% for i in [1] recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "loop-over-text": "{% for i in range(99999) %}{% for c in 'a' * 99999 %}{% endfor %}{% endfor %}",
    "endless-macro": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(0) }}",
    "branching-macro": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "calls-in-calls": "{% macro m() %}{% for i in range(999) %}{{ caller() }}{% endfor %}{% endmacro %}"
    "{% call m() %}{% call m() %}{% call m() %}{% endcall %}{% endcall %}{% endcall %}",
    "lists-in-loops": "{% for i in range(99999) %}{{ range(99999)|list|length }}{% endfor %}",
    "sums-in-loops": "{% for i in range(99999) %}{{ range(99999)|sum }}{% endfor %}",
    "searches": "{% set s = 'a' * 9999999 %}{% for i in range(99999) %}{% if 'b' in s %}{% endif %}{% endfor %}",
    "slices": "{% set s = 'a' * 9999999 %}{% for i in range(99999) %}{% set t = s[1:] %}{% endfor %}",
    "splits": "{% set s = 'a ' * 4999999 %}{% for i in range(99999) %}{% set t = s.split() %}{% endfor %}",
    "repeated-text": "{{ 'a' * 10**10 }}",
    "repeated-list": "{{ [1] * 10**10 }}",
    "doubled-text": doubling("'aaaaaaaa'", "ns.x + ns.x"),
    "doubled-concatenation": doubling("'aaaaaaaa'", "ns.x ~ ns.x"),
    "doubled-block": doubling("'aaaaaaaa'", "ns.x").replace(
        "{% set ns.x = ns.x %}", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"
    ),
    "doubled-list": doubling("[1]", "ns.x + ns.x"),
    "printed-graph": doubling("[1]", "[ns.x, ns.x]", "{{ ns.x }}"),
    "json-of-graph": doubling("[1]", "[ns.x, ns.x]", "{{ ns.x|tojson }}"),
    "hashed-graph": doubling("(1, 2)", "(ns.x, ns.x)", "{{ {ns.x: 1} }}"),
    "huge-power": "{{ 10**(10**9) }}",
    "growing-integer": doubling("3", "ns.x * ns.x"),
    "percent-width": "{{ '%1000000000d' % 1 }}",
    "percent-star": "{{ '%*d' % (1000000000, 1) }}",
    "format-width": "{{ '{:1000000000}'.format(1) }}",
    "format-nested-width": "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "format-hidden-width": "{{ '{a[0]:{a[0]}}'.format(a=[1000000000]) }}",
    "format-map": "{{ '{x:1000000000}'.format_map({'x': 1}) }}",
    "format-many": "{{ ('{0:9999}' * 10000).format(1) }}",
    "centred-method": "{{ 'a'.center(1000000000) }}",
    "centred-filter": "{{ 'a'|center(1000000000) }}",
    "replace": "{{ ('a' * 999999).replace('a', 'b' * 999999) }}",
    "replace-filter": "{{ ('a' * 999999)|replace('a', 'b' * 999999) }}",
    "join": "{{ ('a' * 999999).join([''] * 999999) }}",
    "join-lazily": "{{ ('a' * 999999).join(range(99999)|map('string')) }}",
    "strip-many": "{{ ('a' * 999999).strip('b' * 999999 ~ 'a') }}",
    "trim-many": "{{ ('a' * 999999)|trim('b' * 999999 ~ 'a') }}",
    "replace-in-list": "{{ ([1] * 99999)|replace('1', 'b' * 999999) }}",
    "titles": "{% set s = 'a ' * 999999 %}{% for i in range(99999) %}{{ s|title|length }}{% endfor %}",
    "join-filter": "{{ ([''] * 999999)|join('a' * 999999) }}",
    "batch": "{{ [1]|batch(1000000000, 1)|list|length }}",
    "slice": "{{ [1]|slice(1000000000)|list|length }}",
    "json-indent": "{{ messages|tojson(indent=1000000000) }}",
    "sum-of-lists": "{{ ([[1]] * 99999)|sum(start=[])|length }}",
    "round": "{{ 1.5|round(1000000, 'ceil') }}",
    "integer-bytes": "{{ (5).to_bytes(1000000000) }}",
}
INTRUSIONS = {
    "class": "{{ ''.__class__ }}",
    "class-item": "{{ ''['__class__'] }}",
    "class-filter": "{{ ''|attr('__class__') }}",
    "class-map": "{{ messages|map(attribute='__class__')|list }}",
    "class-format": "{{ '{0.__class__}'.format(1) }}",
    "subclasses": "{{ ().__class__.__base__.__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "cycler-globals": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "namespace": "{{ namespace.__init__ }}",
    "namespace-name": "{% set ns = namespace(__class__=1) %}",
    "self": "{{ self.__init__ }}",
    "open": "{{ open('/etc/passwd').read() }}",
    "lipsum": "{{ lipsum.__globals__ }}",
    "append": "{{ messages.append(1) }}",
    "update": "{{ messages[0].update({'role': 'x'}) }}",
}


@pytest.mark.one_in(13)
@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_work_without_end_is_stopped(source, narrow_sandbox):
    with pytest.raises(RequestError, match="chat_template failed") as raised:
        render(source, sandbox=narrow_sandbox)
    assert raised.value.param == "chat_template"
    assert render("{{ messages[0].content }}", sandbox=narrow_sandbox) == "Hi"


@pytest.mark.parametrize("whom", ["one", "both"])
def test_text_is_rendered_again_when_the_system_ends_the_process(tmp_path, whom):
    sandbox = Sandbox((sys.executable, "-c", KILLED))
    try:
        template = ChatTemplate("{{ messages[0].content }}", {"bos_token": f"{tmp_path / 'killed'} {whom}"}, sandbox=sandbox)
        assert template.render(USER) == "Hi"
        assert (tmp_path / "killed").exists()
    finally:
        sandbox.close()


@pytest.mark.parametrize(
    ("program", "reason"), [(KILLED, "the system has ended the process, 3 times"), ("raise SystemExit(3)", "exit status 3")]
)
def test_failure_that_is_no_fault_of_the_messages_is_no_request_error(tmp_path, program, reason):
    sandbox = Sandbox((sys.executable, "-c", program))
    try:
        template = ChatTemplate("a", {"bos_token": f"{tmp_path / 'none'} always"}, sandbox=sandbox)
        with pytest.raises(WorkerError, match=reason):
            template.render(USER)
    finally:
        sandbox.close()


def test_number_that_json_cannot_write_is_a_request_error():
    with pytest.raises(RequestError, match="chat_template"):
        render("{{ n }}", n=10**5000)


@pytest.mark.parametrize("source", INTRUSIONS.values(), ids=INTRUSIONS.keys())
def test_python_internals_are_out_of_reach(source):
    with pytest.raises(RequestError, match="chat_template"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% include '/etc/passwd' %}",
        "{% import 'x' as y %}",
        "{% from 'x' import y %}",
        "{% extends 'x' %}",
        "{% if true %}{% include ['a', 'b'] ignore missing %}{% endif %}",
    ],
)
def test_opening_a_file_is_refused(source):
    with pytest.raises(ModelFormatError, match="must not open files"):
        render(source)


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'a", "{% for x in y %}", "{{ 1|nosuchfilter }}", "{{" + "(" * 9999])
def test_syntax_error_is_a_format_error(source):
    with pytest.raises(ModelFormatError, match="chat_template"):
        render(source)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("{% if x is defined %}a{% endif %} the y {# z #}", {"x"}),
        ("{% set x = x if x is defined else 1 %}{{ x }}", {"x"}),
        ("{% if x is not defined %}{% set x = 1 %}{% endif %}{{ x }}", {"x"}),
        ("{% set x = 1 %}{{ x }}{% for m in messages %}{{ m.y }}{% endfor %}", {"messages"}),
        ("{% macro f(a) %}{{ a }}{{ b }}{% endmacro %}{% generation %}{{ f(1) }}{% endgeneration %}", {"b"}),
    ],
)
def test_variables_are_what_a_template_reads_and_has_not_set(source, names):
    assert ChatTemplate(source, {}).variables() == names


def test_variables_of_a_damaged_template_are_a_format_error():
    with pytest.raises(ModelFormatError):
        ChatTemplate("{% if %}", {}).variables()


def test_too_long_a_template_is_refused():
    with pytest.raises(ModelFormatError, match="characters"):
        render(" " * 1_000_001)


@pytest.mark.parametrize("source", ["{{ a.b.c }}", "{{ 'a' + 1 }}", "{{ 1 / 0 }}", "{{ messages[0]() }}", "{{ x|tojson }}"])
def test_runtime_failure_is_a_request_error(source):
    with pytest.raises(RequestError, match="chat_template failed") as raised:
        render(source)
    assert raised.value.param == "chat_template"


def test_raise_exception_carries_the_message():
    with pytest.raises(RequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_long_conversation_is_within_the_limits():
    messages = [{"role": ("user", "assistant")[i % 2], "content": f"<think>{i}</think>" + "word " * 200} for i in range(2000)]
    source = (
        "{% set ns = namespace(all=[]) %}{% for m in messages[::-1] %}{% set ns.all = ns.all + [m] %}"
        "{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1].strip() }}{% endif %}"
        "{{ m | tojson }}{% endfor %}"
    )
    assert len(render(source, messages)) > 4_000_000


def test_special_tokens_and_variables_are_seen():
    source = "{{ bos_token }}{{ eos_token }}{% if add_generation_prompt %}G{% endif %}{{ enable_thinking }}{{ tools }}"
    assert render(source, enable_thinking=False) == "<s>GFalseNone"
    assert render(source, add_generation_prompt=False, tools=[{"a": 1}]) == "<s>[{'a': 1}]"


def test_blocks_are_trimmed_as_transformers_does():
    assert render("  {% if true %}\n  a\n  {% endif %}\nb\n") == "  a\nb"


def test_loop_controls_and_generation_blocks_work():
    source = "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(source) == "02"
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "aHib"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages|tojson }}",
        "{{ messages|tojson(indent=2) }}",
        "{{ '<é&>'|tojson }}{{ '<é&>'|tojson(ensure_ascii=true) }}",
        "{{ {'b': 1, 'a': [1, none, true]}|tojson(sort_keys=true, separators=(',', ':')) }}",
        "{% for m in messages %}{{ loop.index0 }}{{ loop.last }}{{ loop.length }}{{ m.role|upper|trim }}{% endfor %}",
        "{% for k, v in {'a': 1}.items() %}{{ k ~ v }}{% endfor %}{{ {'a': 1}|items|list }}{{ dict(a=1) }}",
        "{{ messages|rejectattr('role', 'equalto', 'assistant')|map(attribute='content')|join(', ') }}",
        "{{ messages[1:]|length }}{{ messages[::-1][0].content[:3] }}{{ (messages|first).content }}",
        "{% set ns = namespace(n=0) %}{% for m in messages if m.role != 'x' %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% macro f(x, y='d') %}[{{ x }}{{ y }}{{ caller is defined }}]{% endmacro %}{{ f('a') }}{{ f(1, y=2) }}",
        "{% for i in [[1, [2]], [3]] recursive %}{{ i if i is number else '(' ~ loop(i) ~ ')' }}{% endfor %}",
        "{{ 'a-b'.replace('-', '+').split('+') }}{{ '%s is %05.2f' % ('x', 1.5) }}{{ '{:>4}|{}'.format(1, 'z') }}",
        "{% for x in undefined_thing %}{% else %}none{% endfor %}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 5 }}{{ -3|abs }}",
        "{% filter upper %}a{% endfilter %}{{ [3, 1, 2]|sort|list }}{{ 'x' in 'xyz' and 2 not in [1] }}{{ range(3)|list }}",
        "{{ messages[0]['content'] is string }}{{ messages[0].tool_calls is defined }}{{ messages is iterable }}",
        "{{ '<b>'|e }}{{ 'a\nb'|indent(2, true) }}{{ none|default('x', true) }}{{ 3.14159|round(2) }}{{ [1, 2]|sum }}",
    ],
)
def test_templates_render_as_in_transformers(source):
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [
        {"role": "system", "content": "Be <brief> & naïve."},
        {"role": "user", "content": "Hi 😀\n"},
        {"role": "assistant", "content": "a" * 50},
    ]
    expected, _ = render_jinja_template([messages], chat_template=source, add_generation_prompt=True)
    assert render(source, messages) == expected[0]


def test_strftime_now_gives_the_date():
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year - 1)}


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "Hi",
        {"role": "user"},
        ["Hi"],
        [{"content": "Hi"}],
        [{"role": 1, "content": "Hi"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 3}]}],
        [{"role": "assistant", "tool_calls": "x"}],
    ],
)
def test_invalid_messages_are_rejected(messages):
    with pytest.raises(RequestError, match="messages") as raised:
        render("{{ messages }}", messages)
    assert raised.value.param == "messages"


def test_deeply_nested_messages_are_rejected():
    nested = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(RequestError):
        render("{{ messages }}", [{"role": "user", "content": "", "x": nested}])


def test_invalid_tools_are_rejected():
    with pytest.raises(RequestError) as raised:
        render("", tools="x")
    assert raised.value.param == "tools"


def test_content_becomes_one_string():
    source = "{{ messages[0].content }}|"
    assert render(source, [{"role": "user", "content": None}]) == "|"
    parts = [{"type": "text", "text": "a"}, "b"]
    assert render(source, [{"role": "user", "content": parts}]) == "a\nb|"


def test_tool_call_arguments_become_an_object():
    call = {"type": "function", "function": {"name": "f", "arguments": json.dumps({"a": "é"})}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert render("{{ messages[0].tool_calls[0].function.arguments | tojson }}", messages) == '{"a": "é"}'
    assert isinstance(call["function"]["arguments"], str)


def test_objects_reach_the_template_as_plain_values():
    class Secret:
        password = "x"

    assert render("{{ messages[0].x }}{{ y }}", [{"role": "user", "x": Secret()}], y=Secret()) == "<Secret><Secret>"


def test_threads_render_one_template_at_a_time_of_their_own(narrow_sandbox):
    template = ChatTemplate(
        "{% for i in range(n) %}{% for j in range(10000) %}{% endfor %}{% endfor %}{{ n }}", {}, sandbox=narrow_sandbox
    )
    results = {}

    def work(n):
        try:
            results[n] = template.render(USER, n=n)
        except RequestError:
            results[n] = "stopped"

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2, 3, 50_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1: "1", 2: "2", 3: "3", 50_000: "stopped"}
