"""Outputs of every format, written out by hand, and the messages that they are."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.text.parsing.events import ParsedCall, ParsedMessage
from quire.text.parsing.parser import Tool

TOOLS = (
    Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"enum": ["C", "F"]},
                "exact": {"type": "boolean"},
                "near": {"type": ["array", "null"], "items": {"type": "string"}},
                "options": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                "factor": {"type": "number"},
            },
        },
    ),
    Tool("now"),
    Tool("brave_search", {"type": "object", "properties": {"query": {"type": "string"}}}),
)
# Markers, quotes, escapes, brackets and other scripts, as a model may put them into a string.
NASTY = '{"city": "</tool_call>]}\\"\\\\ [TOOL_CALLS] 東京 😀\\u00e9 </think>", "days": [1, {"a": "]"}]}'


@dataclass(frozen=True)
class Case:
    """reasoning of the format that belongs to it, starts_in_reasoning by `starts`; calls are (name, arguments)."""

    format: str | None
    text: str
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    thoughts: str = ""
    reasoning: str | None = "qwen3"
    starts: bool = False
    starts_in_call: bool = False
    ids: tuple[str, ...] = ()
    special: tuple[str, ...] = field(default=())

    @property
    def message(self) -> ParsedMessage:
        ids = self.ids or tuple(f"id{index}" for index in range(len(self.calls)))
        return ParsedMessage(
            self.content,
            self.thoughts,
            tuple(ParsedCall(call_id, *call) for call_id, call in zip(ids, self.calls, strict=True)),
        )


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def deepseek_v3(name, arguments):
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def deepseek_v31(name, arguments):
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def kimi(header, arguments):
    return f"<|tool_call_begin|>{header}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def harmony(channel, text, end="<|end|>"):
    return f"<|channel|>{channel}<|message|>{text}{end}"


def dsml(name, *parameters):
    return f'<｜DSML｜invoke name="{name}">\n{"".join(parameters)}</｜DSML｜invoke>\n'


def dsml_parameter(key, value, is_string):
    return f'<｜DSML｜parameter name="{key}" string="{is_string}">{value}</｜DSML｜parameter>\n'


def gemma4(call):
    return f"<|tool_call>call:{call}<tool_call|>"


def seed(name, *pairs):
    inner = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in pairs)
    return f"<seed:tool_call>\n<function={name}>\n{inner}</function>\n</seed:tool_call>"


def step3(name, *pairs):
    inner = "".join(f'<steptml:parameter name="{key}">{value}</steptml:parameter>' for key, value in pairs)
    return (
        f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">{inner}</steptml:invoke><｜tool_call_end｜>'
    )


def hy(name, *pairs, label=":opensource"):
    inner = "".join(
        f"<arg_key{label}>{key}</arg_key{label}>\n<arg_value{label}>{value}</arg_value{label}>\n" for key, value in pairs
    )
    return f"<tool_call{label}>{name}<tool_sep{label}>\n{inner}</tool_call{label}>\n"


def cohere(number, name, parameters):
    return f'    {{"tool_call_id": "{number}", "tool_name": "{name}", "parameters": {parameters}}}'


def gemma(call):
    return f"<start_function_call>call:{call}<end_function_call>"


WEATHER = '{"city": "Ōsaka", "days": 2}'
BOTH = (("get_weather", NASTY), ("now", "{}"))
START = "<|start|>assistant"

CASES: dict[str, Case] = {
    "plain": Case("hermes", "Just text with {braces} and <angles>.", "Just text with {braces} and <angles>."),
    "plain-off": Case(
        None, "\n<think>a</think>" + hermes("now", "{}"), "\n<think>a</think>" + hermes("now", "{}"), reasoning=None
    ),
    "reasoning": Case(None, "<think>\nLet me\nsee.\n</think>\n\nIt is <b>5</b>.", "It is <b>5</b>.", thoughts="Let me\nsee."),
    "reasoning-started": Case(None, "Let <me>\n</think>\n\nA </think> b", "A </think> b", thoughts="Let <me>", starts=True),
    "reasoning-repeated": Case(None, "<think>\nwell</think>A", "A", thoughts="well", starts=True),
    "reasoning-empty": Case(None, "<think>\n\n</think>\n\nA", "A"),
    "reasoning-open": Case(None, "<think>never ends", thoughts="never ends"),
    "reasoning-late": Case(None, "A tag: <think> is text", "A tag: <think> is text"),
    "reasoning-mistral": Case(
        "mistral", "[THINK]hm[/THINK]Ok[TOOL_CALLS]now[ARGS]{}", "Ok", (("now", "{}"),), "hm", reasoning="mistral"
    ),
    "reasoning-then-call": Case("hermes", f"<think>a</think>\n\n{hermes('now', '{}')}", calls=(("now", "{}"),), thoughts="a"),
    "call-in-reasoning": Case("hermes", f"a\n{hermes('now', '{}')}", calls=(("now", "{}"),), thoughts="a\n", starts=True),
    "marker-in-reasoning": Case("hermes", "<think>a <tool_call> b</think>c", "c", thoughts="a <tool_call> b"),
    "hermes": Case("hermes", f"Look: {hermes('get_weather', NASTY)}\n{hermes('now', '{}')}\n", "Look: ", BOTH),
    "hermes-between": Case("hermes", f"{hermes('now', '{}')} and {hermes('now', '{}')} end", " and  end", BOTH[1:] * 2),
    "hermes-order": Case("hermes", f'<tool_call>{{"arguments": {NASTY}, "name": "get_weather"}}</tool_call>', calls=BOTH[:1]),
    "hermes-no-arguments": Case("hermes", '<tool_call>{"name": "now"}</tool_call>', calls=BOTH[1:]),
    "hermes-string": Case("hermes", hermes("get_weather", '"{\\"days\\": 2}"'), calls=(("get_weather", '{"days": 2}'),)),
    "hermes-extra-keys": Case("hermes", '<tool_call>{"id": [1, "x"], "name": "now", "k": null}</tool_call>', calls=BOTH[1:]),
    "hermes-unknown": Case("hermes", f"a {hermes('rm', '{}')} b", f"a {hermes('rm', '{}')} b"),
    "hermes-stray": Case("hermes", f"<tool_call>\n{hermes('now', '{}')}", "<tool_call>\n", BOTH[1:]),
    "hermes-stray-quote": Case("hermes", f'<tool_call>{{"name": "{hermes("now", "{}")}', '<tool_call>{"name": "', BOTH[1:]),
    "hermes-prose": Case("hermes", "Write <tool_call> {x} </tool_call>.", "Write <tool_call> {x} </tool_call>."),
    "hermes-cut-arguments": Case(
        "hermes", '<tool_call>{"name": "get_weather", "arguments": {"a": "b', calls=(("get_weather", '{"a": "b'),)
    ),
    "hermes-cut-closer": Case("hermes", hermes("now", "{}")[:-3], calls=BOTH[1:]),
    "hermes-broken-tail": Case("hermes", '<tool_call>{"name": "now", "arguments": {} oops', "oops", BOTH[1:]),
    "qwen3-coder": Case(
        "qwen3_coder",
        'Hm\n<tool_call>\n<function=get_weather>\n<parameter=city>\n Ō\n"</parameter>\\\n</parameter>\n<parameter=days>\n2\n'
        '</parameter>\n<parameter=exact>True</parameter><parameter=near>\n["a"]\n</parameter>\n<parameter=options>null'
        "</parameter>\n<parameter=factor>\nmany\n</parameter>\n</function>\n</tool_call>\n<function=now>\n</function>\nok",
        "Hm\n\nok",
        (
            (
                "get_weather",
                '{"city": " Ō\\n\\"</parameter>\\\\", "days": 2, "exact": true, "near": ["a"], "options": null, '
                '"factor": "many"}',
            ),
            ("now", "{}"),
        ),
    ),
    "qwen3-coder-cut": Case(
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>\nOsa",
        calls=(("get_weather", '{"city": "Osa'),),
    ),
    "glm": Case(
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>a\n</arg_value>\n<arg_key>days</arg_key><arg_value>2"
        "</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call><tool_call>now</tool_call>",
        calls=(("get_weather", '{"city": "a\\n", "days": 2}'), ("now", "{}"), ("now", "{}")),
    ),
    "minimax": Case(
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="days">3</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        calls=(("get_weather", '{"days": 3}'), ("now", "{}")),
    ),
    "llama3": Case(
        "llama3_json",
        f'{{"name": "get_weather", "parameters": {NASTY}}};{{"type": "function", "name": "now", "parameters": {{}}}}<|eom_id|>',
        calls=BOTH,
    ),
    "llama3-tag": Case("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}} ; x', " ; x", BOTH[1:]),
    "llama3-builtin": Case(
        "llama3_json", '<|python_tag|>brave_search.call(query="a \\"b")', calls=(("brave_search", '{"query": "a \\"b"}'),)
    ),
    "llama3-json-answer": Case("llama3_json", '{"answer": {"name": "now"}}', '{"answer": {"name": "now"}}'),
    "llama3-code": Case("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)"),
    "pythonic": Case(
        "pythonic",
        "[get_weather(city='a\"\\n\\x41', days=-2, exact=True, near=[\"x\", ('y',)], options={'k': None, 1: {}}), now()]",
        calls=(
            (
                "get_weather",
                '{"city": "a\\"\\nA", "days": -2, "exact": true, "near": ["x", ["y"]], "options": {"k": null, "1": {}}}',
            ),
            ("now", "{}"),
        ),
    ),
    "pythonic-markers": Case("llama4_pythonic", "<|python_start|>[now()]<|python_end|>", calls=BOTH[1:]),
    "pythonic-list-answer": Case("pythonic", "[1, 2] is a list", "[1, 2] is a list"),
    "pythonic-broken": Case("pythonic", "[get_weather(days=1 + x)]", "+ x)]", (("get_weather", '{"days": 1'),)),
    "mistral-old": Case(
        "mistral",
        f'Ok[TOOL_CALLS] [{{"name": "get_weather", "arguments": {NASTY}}}, {{"arguments": {{}}, "name": "now"}}]',
        "Ok",
        BOTH,
    ),
    "mistral-old-unknown": Case(
        "mistral",
        '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "rm", "arguments": {}}]',
        ', {"name": "rm", "arguments": {}}]',
        BOTH[1:],
    ),
    "mistral": Case("mistral", f"[TOOL_CALLS]get_weather[ARGS]{NASTY}[TOOL_CALLS]now{{}}", calls=BOTH),
    "mistral-id": Case("mistral", "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}", calls=BOTH[1:], ids=("abcdefghi",)),
    "deepseek-v3": Case(
        "deepseek_v3",
        f"Ok<｜tool▁calls▁begin｜>{deepseek_v3('get_weather', NASTY)}\n{deepseek_v3('now', '{}')}<｜tool▁calls▁end｜>",
        "Ok",
        BOTH,
    ),
    "deepseek-v31": Case(
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜>{deepseek_v31('get_weather', NASTY)}{deepseek_v31('now', '{}')}<｜tool▁calls▁end｜>after",
        "after",
        BOTH,
    ),
    "deepseek-unknown": Case(
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜>{deepseek_v31('rm', '{}')}<｜tool▁calls▁end｜>",
        f"<｜tool▁calls▁begin｜>{deepseek_v31('rm', '{}')}<｜tool▁calls▁end｜>",
    ),
    "deepseek-v32": Case(
        "deepseek_v32",
        "Ok\n\n<｜DSML｜function_calls>\n"
        + dsml(
            "get_weather",
            dsml_parameter("city", ' "5"\n</｜DSML｜parameter> 東', "true"),
            dsml_parameter("days", "2", "true"),
            dsml_parameter("near", '["</｜DSML｜invoke>", {"a": null}]', "false"),
            dsml_parameter("factor", "not JSON", "false"),
        )
        + dsml("now")
        + "</｜DSML｜function_calls>",
        "Ok\n\n",
        (
            (
                "get_weather",
                '{"city": " \\"5\\"\\n</｜DSML｜parameter> 東", "days": "2", "near": ["</｜DSML｜invoke>", {"a": null}], '
                '"factor": "not JSON"}',
            ),
            ("now", "{}"),
        ),
    ),
    "deepseek-v4": Case(
        "deepseek_v4",
        "<think>hm</think><｜DSML｜tool_calls>\n"
        + dsml("get_weather", f"{NASTY}\n")
        + dsml("now", "{}")
        + "</｜DSML｜tool_calls>after",
        "after",
        BOTH,
        "hm",
    ),
    "deepseek-v32-unknown": Case("deepseek_v32", f"a {dsml('rm')} b", f"a {dsml('rm')} b"),
    "deepseek-v32-cut": Case(
        "deepseek_v32",
        '<｜DSML｜invoke name="get_weather"><｜DSML｜parameter name="city" string="true">Osa',
        calls=(("get_weather", '{"city": "Osa'),),
    ),
    "functiongemma": Case(
        "functiongemma",
        "Hm "
        + gemma(
            'get_weather{city:<escape>a "b"\n}, c:[<escape>,days:-2, exact:true,near:[<escape>x<escape>, [1,null]],'
            "options:{<escape>k:1<escape>:{},l:word of it},factor:1.5e3}"
        )
        + gemma("now{}")
        + "<start_function_response>",
        "Hm ",
        (
            (
                "get_weather",
                '{"city": "a \\"b\\"\\n}, c:[", "days": -2, "exact": true, "near": ["x", [1, null]], '
                '"options": {"k:1": {}, "l": "word of it"}, "factor": 1.5e3}',
            ),
            ("now", "{}"),
        ),
    ),
    "functiongemma-unknown": Case("functiongemma", gemma("rm{a:1}"), gemma("rm{a:1}")),
    "functiongemma-prose": Case("functiongemma", "say <start_function_call> now{}", "say <start_function_call> now{}"),
    "functiongemma-cut": Case(
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Os<esc",
        calls=(("get_weather", '{"city": "Os<esc'),),
    ),
    "functionary": Case(
        "functionary_v3",
        f">>>all\nLet me >>> see.>>>get_weather\n{NASTY}>>>now\n{{}}",
        "Let me >>> see.",
        BOTH,
    ),
    "functionary-begun": Case("functionary_v3", f"get_weather\n{NASTY}>>>now\n{{}}", calls=BOTH, starts_in_call=True),
    "functionary-answer": Case("functionary_v3", "all\n>>> 1 + 1\n2", ">>> 1 + 1\n2", starts_in_call=True),
    "functionary-lost": Case("functionary_v3", "Hello\nyou", "Hello\nyou", starts_in_call=True),
    "functionary-v31": Case(
        "functionary_v31",
        f"Ok<function=get_weather>{NASTY}</function>\n<function=now>{{}}</function>",
        "Ok",
        BOTH,
    ),
    "functionary-v31-unknown": Case("functionary_v31", "<function=rm>{}</function>", "<function=rm>{}</function>"),
    "kimi": Case(
        "kimi_k2",
        f"<|tool_calls_section_begin|>{kimi('functions.get_weather:0', NASTY)}{kimi('functions.now:1', '{}')}"
        "<|tool_calls_section_end|>",
        calls=BOTH,
        ids=("functions.get_weather:0", "functions.now:1"),
    ),
    "granite": Case(
        "granite",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {WEATHER}}}, {{"name": "now"}}]',
        calls=(("get_weather", WEATHER), ("now", "{}")),
    ),
    "granite4": Case("granite", hermes("get_weather", WEATHER), calls=(("get_weather", WEATHER),)),
    "phi4": Case(
        "phi4_mini_json",
        f'functools[{{"name": "get_weather", "arguments": {WEATHER}}}, {{"name": "now", "arguments": {{}}}}] functools',
        " functools",
        (("get_weather", WEATHER), ("now", "{}")),
    ),
    "harmony": Case(
        "openai",
        harmony("analysis", "I <think>.")
        + START
        + harmony("commentary to=functions.get_weather <|constrain|>json", NASTY, "<|call|>")
        + f"{START} to=functions.now<|channel|>commentary<|message|>{{}}<|call|>{START}"
        + harmony("final", "Done.", "<|return|>"),
        "Done.",
        BOTH,
        "I <think>.",
        reasoning="openai_gptoss",
    ),
    "harmony-preamble": Case(
        "openai",
        harmony("commentary", "I will look.") + START + harmony("commentary to=functions.rm", "{}"),
        f"I will look.{START}<|channel|>commentary to=functions.rm<|message|>{{}}",
        reasoning="openai_gptoss",
    ),
    "harmony-role": Case(
        "openai", " to=functions.now<|channel|>commentary<|message|>{}", calls=BOTH[1:], reasoning="openai_gptoss"
    ),
    "gemma4": Case(
        "gemma4",
        "<|channel>thought\nWhere is\nthat?\n<channel|>Hm "
        + gemma4(
            'get_weather{city:<|"|>a "b"\n}, c:[<|"|>,days:-2,exact:true,near:[<|"|>x<|"|>,[1,null]],'
            'options:{<|"|>k:1<|"|>:{},l:word of it},factor:1.5e3}'
        )
        + gemma4("now{}")
        + "<|tool_response>",
        "Hm ",
        (
            (
                "get_weather",
                '{"city": "a \\"b\\"\\n}, c:[", "days": -2, "exact": true, "near": ["x", [1, null]], '
                '"options": {"k:1": {}, "l": "word of it"}, "factor": 1.5e3}',
            ),
            ("now", "{}"),
        ),
        "Where is\nthat?",
        reasoning="gemma4",
    ),
    "gemma4-empty-thought": Case("gemma4", "<|channel>thought\n<channel|>Hi", "Hi", reasoning="gemma4"),
    "gemma4-prose": Case("gemma4", "say <|tool_call> now{}", "say <|tool_call> now{}", reasoning="gemma4"),
    "gemma4-cut": Case(
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Os<|"',
        calls=(("get_weather", '{"city": "Os<|\\"'),),
        reasoning="gemma4",
    ),
    "cohere": Case(
        "cohere_command3",
        "<|START_THINKING|>I will look.<|END_THINKING|><|START_ACTION|>[\n"
        + cohere(0, "get_weather", NASTY)
        + ",\n"
        + cohere(1, "now", "{}")
        + "\n]<|END_ACTION|>",
        calls=BOTH,
        thoughts="I will look.",
        reasoning="cohere_command3",
    ),
    "cohere-answer": Case(
        "cohere_command3",
        "<|START_THINKING|>So.<|END_THINKING|><|START_RESPONSE|> It is <b>5</b>.\n<|END_RESPONSE|>",
        " It is <b>5</b>.\n",
        thoughts="So.",
        reasoning="cohere_command3",
    ),
    "cohere4-answer": Case(
        "cohere_command4",
        "<|START_TEXT|>5<|END_TEXT|>",
        "5",
        reasoning="cohere_command4",
    ),
    "cohere-stray-end": Case("cohere_command3", "a <|END_RESPONSE|> b", "a <|END_RESPONSE|> b", reasoning="cohere_command3"),
    "cohere-unknown": Case(
        "cohere_command3",
        f"<|START_ACTION|>[{cohere(0, 'rm', '{}')}]<|END_ACTION|>",
        f"<|START_ACTION|>[{cohere(0, 'rm', '{}')}]<|END_ACTION|>",
        reasoning="cohere_command3",
    ),
    "ernie": Case(
        "ernie45",
        "<think>\nHm.\n</think>\n\n" + hermes("get_weather", NASTY) + "\n" + hermes("now", "{}") + "\n",
        calls=BOTH,
        thoughts="Hm.",
        reasoning="ernie45",
    ),
    "ernie-answer": Case(
        "ernie45",
        "<think>\nHm.\n</think>\n\n<response>\nTwo\nlines.\n</response>\n",
        "Two\nlines.",
        thoughts="Hm.",
        reasoning="ernie45",
    ),
    "ernie-answer-then-call": Case(
        "ernie45",
        "<response>\nI look.\n</response>\n" + hermes("now", "{}"),
        "I look.",
        BOTH[1:],
        reasoning="ernie45",
    ),
    "ernie-open-answer": Case("ernie45", "<response>\nTwo </res", "Two </res", reasoning="ernie45"),
    "hunyuan": Case(
        "hunyuan_a13b",
        "<think>\nHm.\n</think>\n<tool_calls>["
        + f'{{"name": "get_weather", "arguments": {NASTY}}}, {{"name": "now", "arguments": {{}}}}]</tool_calls>',
        calls=BOTH,
        thoughts="Hm.",
        reasoning="hunyuan_a13b",
    ),
    "hunyuan-answer": Case(
        "hunyuan_a13b",
        "<think>\n\n</think>\n<answer>\nYes.\n</answer>",
        "Yes.",
        reasoning="hunyuan_a13b",
    ),
    "granite-thought": Case(
        None,
        "Here is my thought process:\nHm.\nHere is my response: Yes.",
        " Yes.",
        thoughts="Hm.",
        reasoning="granite",
    ),
    "minimax-m1": Case(
        "minimax",
        f'Ok\n<tool_calls>\n{{"name": "get_weather", "arguments": {NASTY}}}\n'
        '{"name": "now", "arguments": {}}\n</tool_calls>',
        "Ok\n",
        BOTH,
    ),
    "jamba": Case(
        "jamba",
        f'<tool_calls>[\n  {{"name": "get_weather", "arguments": {NASTY}}},\n'
        '  {"name": "now", "arguments": {}}\n]</tool_calls>',
        calls=BOTH,
    ),
    "jamba-prose": Case("jamba", "The tag <tool_calls> is text", "The tag <tool_calls> is text"),
    "seed": Case(
        "seed_oss",
        "<seed:think>Hm.</seed:think>Ok"
        + seed("get_weather", ("city", ' "</parameter>\n<x> '), ("days", 2), ("near", '["a"]'), ("exact", "false"))
        + "\n"
        + seed("now"),
        "Ok",
        (("get_weather", '{"city": " \\"</parameter>\\n<x> ", "days": 2, "near": ["a"], "exact": false}'), ("now", "{}")),
        "Hm.",
        reasoning="seed_oss",
    ),
    "step3": Case(
        "step3",
        f"<｜tool_calls_begin｜>{step3('get_weather', ('city', 'a b'), ('days', 2))}{step3('now')}<｜tool_calls_end｜>",
        calls=(("get_weather", '{"city": "a b", "days": 2}'), ("now", "{}")),
    ),
    "hy": Case(
        "hy_v3",
        "<think:opensource>Hm.</think:opensource><tool_calls:opensource>\n"
        + hy("get_weather", ("city", "a\n"), ("days", 2))
        + hy("now")
        + "</tool_calls:opensource>",
        calls=(("get_weather", '{"city": "a\\n", "days": 2}'), ("now", "{}")),
        thoughts="Hm.",
        reasoning="hy_v3",
    ),
    "hy-plain": Case(
        "hy_v3",
        f"<tool_calls>\n{hy('get_weather', ('days', 2), label='')}</tool_calls>",
        calls=(("get_weather", '{"days": 2}'),),
        reasoning="hy_v3",
    ),
    "olmo3": Case(
        "olmo3",
        '<function_calls>get_weather(city="a</function_calls>", days=2, near=null)\nnow()</function_calls>ok',
        "ok",
        (("get_weather", '{"city": "a</function_calls>", "days": 2, "near": null}'), ("now", "{}")),
    ),
    "olmo3-broken": Case("olmo3", "<function_calls>now()\nthen text", "\nthen text", BOTH[1:]),
    "lfm2": Case(
        "lfm2",
        "<|tool_call_start|>[get_weather(city='a', days=2), now()]<|tool_call_end|>Ok",
        "Ok",
        (("get_weather", '{"city": "a", "days": 2}'), ("now", "{}")),
    ),
    "apertus": Case(
        "apertus",
        f'<|inner_prefix|>Hm.<|inner_suffix|><|tools_prefix|>[{{"get_weather": {NASTY}}}, {{"now": {{}}}}]<|tools_suffix|>',
        calls=BOTH,
        thoughts="Hm.",
        reasoning="apertus",
    ),
    "apertus-unknown": Case(
        "apertus",
        '<|tools_prefix|>[{"rm": {}}]<|tools_suffix|>',
        '<|tools_prefix|>[{"rm": {}}]<|tools_suffix|>',
        reasoning="apertus",
    ),
    "internlm": Case(
        "internlm",
        f'Ok<|action_start|><|plugin|>\n{{"name": "get_weather", "parameters": {NASTY}}}<|action_end|>\n',
        "Ok",
        BOTH[:1],
    ),
    "longcat": Case(
        "longcat",
        f'<longcat_think>Hm.</longcat_think><longcat_tool_call>\n{{"name": "get_weather", "arguments": {NASTY}}}\n'
        '</longcat_tool_call>\n<longcat_tool_call>{"name": "now", "arguments": {}}</longcat_tool_call>',
        calls=BOTH,
        thoughts="Hm.",
        reasoning="longcat",
    ),
    "nemotron": Case(
        "nemotron_json",
        f'<TOOLCALL>[{{"name": "get_weather", "arguments": {NASTY}}}, {{"name": "now", "arguments": {{}}}}]</TOOLCALL>',
        calls=BOTH,
    ),
    "granite-20b": Case(
        "granite-20b-fc",
        f'<function_call> {{"name": "get_weather", "arguments": {NASTY}}} <function_call> {{"name": "now", "arguments": {{}}}}',
        calls=BOTH,
    ),
    "gigachat": Case(
        "gigachat3",
        f'Okfunction call<|role_sep|>\n{{"name": "get_weather", "arguments": {NASTY}}}',
        "Ok",
        BOTH[:1],
    ),
    "glm47": Case(
        "glm47",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>a b</arg_value><arg_key>exact</arg_key><arg_value>true"
        "</arg_value></tool_call><tool_call>now</tool_call>",
        calls=(("get_weather", '{"city": "a b", "exact": true}'), ("now", "{}")),
    ),
}
