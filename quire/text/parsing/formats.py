"""The tables of tool call and reasoning formats, by their names in options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal

from quire.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class JsonObject:
    """{"name": ..., "arguments": {...}}, alone or in a list, keys in any order.

    is_strict    any other key means that this is not a call
    has_dotted   name.call(key="value") is an alternative
    name_key     the key of the name
    """

    is_strict: bool = False
    has_dotted: bool = False
    name_key: str = "name"


@dataclass(frozen=True, slots=True)
class NameAsKey:
    """{"get_weather": {...}}, alone or in a list: the only key is the name, and its value the arguments."""


@dataclass(frozen=True, slots=True)
class NamedJson:
    """The name in a header, then the arguments as a JSON object.

    prefixes     one of these must precede the name
    name_ends     end the name; name_stops do too, but are not part of the header
    id_marks      may separate the name from the model's own id in the header
    fences        may precede the object, and closing_fences may follow it
    has_list      a list of JsonObject is an alternative
    has_own_id   the header is "functions.NAME:INDEX", and is the id of the call
    """

    name_ends: tuple[str, ...]
    name_stops: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    id_marks: tuple[str, ...] = ()
    fences: tuple[str, ...] = ()
    closing_fences: tuple[str, ...] = ()
    has_list: bool = False
    has_own_id: bool = False


@dataclass(frozen=True, slots=True)
class KeyedValues:
    """The name, then pairs of a key and a value in plain text, typed by the schema of the tool.

    A value ends at a value_end that is followed, after white space, by a pair_open, an end or the end of the output.
    text_key_ends   end a key whose value is a string, json_key_ends one whose value is JSON, independent of the schema
    trims_newlines  one line break at the beginning and one at the end of a value belong to the format
    has_json        a JSON object is an alternative to the pairs
    """

    name_opens: tuple[str, ...]
    name_ends: tuple[str, ...]
    name_stops: tuple[str, ...]
    pair_opens: tuple[str, ...]
    key_ends: tuple[str, ...]
    value_opens: tuple[str, ...]
    value_ends: tuple[str, ...]
    ends: tuple[str, ...]
    text_key_ends: tuple[str, ...] = ()
    json_key_ends: tuple[str, ...] = ()
    trims_newlines: bool = False
    has_json: bool = False


@dataclass(frozen=True, slots=True)
class BareObject:
    """The name, then an object whose keys and words are unquoted: f{key:value,other:[1,true]}.

    prefixes  what has to stand before the name, one of them
    quotes    what strings stand between
    """

    prefixes: tuple[str, ...]
    quotes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pythonic:
    """[name(key=value, ...), ...] with values as Python writes them; without has_list there are no brackets."""

    has_list: bool = True


@dataclass(frozen=True, slots=True)
class Harmony:
    """Messages with a header, which says channel and recipient."""


Body = JsonObject | NameAsKey | NamedJson | KeyedValues | BareObject | Pythonic | Harmony


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family writes tool calls.

    openers     begin a call; in text only these, sections, and the beginnings of bodies are searched
    sections    stand before the first opener
    starts      first characters of a call without opener, at the beginning of the answer and after separators
    separators  separate calls that have no opener; in a list a comma, in every format
    trailers    may follow a call, any number of them
    content_names  after an opener they mean content; the format is then also parsed without tools
    prompt_opens   the prompt may end with an opener, so that the output begins after it
    repeats     after a call the next one may follow without an opener, up to a trailer
    call_ids    "random": call_ and 24 letters or digits; "short": 9 letters or digits; "native": the model's own
    """

    body: Body
    openers: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    separators: tuple[str, ...] = ()
    trailers: tuple[str, ...] = ()
    content_names: tuple[str, ...] = ()
    prompt_opens: bool = False
    repeats: bool = False
    call_ids: Literal["random", "short", "native"] = "random"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family writes reasoning; newlines around the markers that its template makes do not belong to the text.

    content_opens, content_closes  surround the answer, and are dropped
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    trims_newlines: bool = False
    content_opens: tuple[str, ...] = ()
    content_closes: tuple[str, ...] = ()


_HERMES = ToolFormat(JsonObject(), openers=("<tool_call>",), trailers=("</tool_call>",))
_QWEN_XML = ToolFormat(
    KeyedValues(
        name_opens=("<function=",),
        name_ends=(">",),
        name_stops=(),
        pair_opens=("<parameter=",),
        key_ends=(">",),
        value_opens=(),
        value_ends=("</parameter>",),
        ends=("</function>", "</tool_call>"),
        trims_newlines=True,
    ),
    openers=("<tool_call>", "<function="),
    trailers=("</tool_call>",),
)
_GLM = ToolFormat(
    KeyedValues(
        name_opens=(),
        name_ends=("\n",),
        name_stops=("<arg_key>", "</tool_call>"),
        pair_opens=("<arg_key>",),
        key_ends=("</arg_key>",),
        value_opens=("<arg_value>",),
        value_ends=("</arg_value>",),
        ends=("</tool_call>",),
    ),
    openers=("<tool_call>",),
)
_MINIMAX = ToolFormat(
    KeyedValues(
        name_opens=('<invoke name="',),
        name_ends=('">',),
        name_stops=(),
        pair_opens=('<parameter name="',),
        key_ends=('">',),
        value_opens=(),
        value_ends=("</parameter>",),
        ends=("</invoke>",),
        trims_newlines=True,
    ),
    openers=('<invoke name="',),
    sections=("<minimax:tool_call>",),
    trailers=("</minimax:tool_call>",),
)
_DSML = ToolFormat(
    KeyedValues(
        name_opens=('<｜DSML｜invoke name="',),
        name_ends=('">',),
        name_stops=(),
        pair_opens=('<｜DSML｜parameter name="',),
        key_ends=('">', '" string="true">', '" string="false">'),
        value_opens=(),
        value_ends=("</｜DSML｜parameter>",),
        ends=("</｜DSML｜invoke>",),
        text_key_ends=('" string="true">',),
        json_key_ends=('" string="false">',),
        has_json=True,
    ),
    openers=('<｜DSML｜invoke name="',),
    sections=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
    trailers=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
)
_FUNCTION_GEMMA = ToolFormat(
    BareObject(prefixes=("call:",), quotes=("<escape>",)),
    openers=("<start_function_call>",),
    trailers=("<end_function_call>", "<start_function_response>"),
)
_GEMMA4 = ToolFormat(
    BareObject(prefixes=("call:",), quotes=('<|"|>',)),
    openers=("<|tool_call>",),
    trailers=("<tool_call|>", "<|tool_response>"),
)
_SEED = ToolFormat(
    KeyedValues(
        name_opens=("<function=",),
        name_ends=(">",),
        name_stops=(),
        pair_opens=("<parameter=",),
        key_ends=(">",),
        value_opens=(),
        value_ends=("</parameter>",),
        ends=("</function>", "</seed:tool_call>"),
    ),
    openers=("<seed:tool_call>",),
    trailers=("</seed:tool_call>",),
)
_STEP3 = ToolFormat(
    KeyedValues(
        name_opens=('function<｜tool_sep｜><steptml:invoke name="', '<steptml:invoke name="'),
        name_ends=('">',),
        name_stops=(),
        pair_opens=('<steptml:parameter name="',),
        key_ends=('">',),
        value_opens=(),
        value_ends=("</steptml:parameter>",),
        ends=("</steptml:invoke>",),
    ),
    openers=("<｜tool_call_begin｜>",),
    sections=("<｜tool_calls_begin｜>",),
    trailers=("<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
)
_FUNCTIONARY_V3 = ToolFormat(NamedJson(name_ends=("\n",)), openers=(">>>",), content_names=("all\n",), prompt_opens=True)
_FUNCTIONARY_V31 = ToolFormat(NamedJson(name_ends=(">",)), openers=("<function=",), trailers=("</function>",))
_LLAMA3 = ToolFormat(
    JsonObject(is_strict=True, has_dotted=True),
    openers=("<|python_tag|>",),
    starts=("{",),
    separators=(";",),
    trailers=("<|eom_id|>", "<|eot_id|>"),
)
_MISTRAL = ToolFormat(
    NamedJson(name_ends=("[ARGS]",), name_stops=("{", "[TOOL_CALLS]"), id_marks=("[CALL_ID]",), has_list=True),
    openers=("[TOOL_CALLS]",),
    call_ids="short",
)
_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>",)
_DEEPSEEK_OPENERS = ("<｜tool▁call▁begin｜>",)
_DEEPSEEK_TRAILERS = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_V3 = ToolFormat(
    NamedJson(name_ends=("\n",), prefixes=("function<｜tool▁sep｜>",), fences=("```json",), closing_fences=("```",)),
    openers=_DEEPSEEK_OPENERS,
    sections=_DEEPSEEK_SECTION,
    trailers=_DEEPSEEK_TRAILERS,
)
_DEEPSEEK_V31 = ToolFormat(
    NamedJson(name_ends=("<｜tool▁sep｜>",)),
    openers=_DEEPSEEK_OPENERS,
    sections=_DEEPSEEK_SECTION,
    trailers=_DEEPSEEK_TRAILERS,
)
_KIMI = ToolFormat(
    NamedJson(name_ends=("<|tool_call_argument_begin|>",), has_own_id=True),
    openers=("<|tool_call_begin|>",),
    sections=("<|tool_calls_section_begin|>",),
    trailers=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    call_ids="native",
)
_PYTHONIC = ToolFormat(Pythonic(), openers=("<|python_start|>",), starts=("[",), trailers=("<|python_end|>",))
_GRANITE = ToolFormat(JsonObject(), openers=("<tool_call>", "<|tool_call|>"), trailers=("</tool_call>",))
_PHI4_MINI = ToolFormat(JsonObject(), openers=("functools",))


def _labelled(*names: str) -> tuple[str, ...]:
    """Return tags as HY 3 writes them: the published checkpoint's have a label, later ones may have none."""
    return tuple(f"{name}{label}>" for name in names for label in (":opensource", ""))


_HY_V3 = ToolFormat(
    KeyedValues(
        name_opens=(),
        name_ends=_labelled("<tool_sep"),
        name_stops=_labelled("<arg_key", "</tool_call"),
        pair_opens=_labelled("<arg_key"),
        key_ends=_labelled("</arg_key"),
        value_opens=_labelled("<arg_value"),
        value_ends=_labelled("</arg_value"),
        ends=_labelled("</tool_call"),
    ),
    openers=_labelled("<tool_call"),
    sections=_labelled("<tool_calls"),
    trailers=_labelled("</tool_calls"),
)
_COHERE = ToolFormat(JsonObject(name_key="tool_name"), openers=("<|START_ACTION|>",), trailers=("<|END_ACTION|>",))
_TOOL_CALLS = ToolFormat(JsonObject(), openers=("<tool_calls>",), trailers=("</tool_calls>",), repeats=True)
_OLMO3 = ToolFormat(Pythonic(has_list=False), openers=("<function_calls>",), trailers=("</function_calls>",), repeats=True)
_LFM2 = ToolFormat(Pythonic(), openers=("<|tool_call_start|>",), trailers=("<|tool_call_end|>",))
_APERTUS = ToolFormat(NameAsKey(), openers=("<|tools_prefix|>",), trailers=("<|tools_suffix|>",))
_INTERNLM = ToolFormat(JsonObject(), openers=("<|plugin|>",), sections=("<|action_start|>",), trailers=("<|action_end|>",))
_HARMONY_MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
_HARMONY = ToolFormat(Harmony(), openers=_HARMONY_MARKERS)

FALLBACK_TOOL_FORMAT = "json"
"""Of models whose chat template shows no tools: the calls of Hermes, which a system message explains."""
TOOL_FORMATS: dict[str, ToolFormat] = {
    "apertus": _APERTUS,
    "cohere_command3": _COHERE,
    "cohere_command4": _COHERE,
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v31": _DEEPSEEK_V31,
    "deepseek_v32": _DSML,
    "deepseek_v4": _DSML,
    "ernie45": _HERMES,
    "functionary_v3": _FUNCTIONARY_V3,
    "functionary_v31": _FUNCTIONARY_V31,
    "functiongemma": _FUNCTION_GEMMA,
    "gemma4": _GEMMA4,
    "gigachat3": ToolFormat(JsonObject(), openers=("function call<|role_sep|>", "<|function_call|>")),
    "glm45": _GLM,
    "glm47": _GLM,
    "granite": _GRANITE,
    "granite-20b-fc": ToolFormat(JsonObject(), openers=("<function_call>",)),
    "granite4": _HERMES,
    "hermes": _HERMES,
    FALLBACK_TOOL_FORMAT: _HERMES,
    "hunyuan_a13b": _TOOL_CALLS,
    "hy_v3": _HY_V3,
    "internlm": _INTERNLM,
    "jamba": _TOOL_CALLS,
    "kimi_k2": _KIMI,
    "lfm2": _LFM2,
    "llama3_json": _LLAMA3,
    "llama4_json": _LLAMA3,
    "llama4_pythonic": _PYTHONIC,
    "longcat": ToolFormat(JsonObject(), openers=("<longcat_tool_call>",), trailers=("</longcat_tool_call>",)),
    "minimax": _TOOL_CALLS,
    "minimax_m2": _MINIMAX,
    "mistral": _MISTRAL,
    "nemotron_json": ToolFormat(JsonObject(), openers=("<TOOLCALL>",), trailers=("</TOOLCALL>",)),
    "olmo3": _OLMO3,
    "openai": _HARMONY,
    "phi4_mini_json": _PHI4_MINI,
    "pythonic": _PYTHONIC,
    "qwen3_coder": _QWEN_XML,
    "qwen3_xml": _QWEN_XML,
    "seed_oss": _SEED,
    "step3": _STEP3,
    "step3p5": _QWEN_XML,
}

_THINK = ReasoningFormat(("<think>",), ("</think>",), trims_newlines=True)
_COHERE_REASONING = ReasoningFormat(
    ("<|START_THINKING|>",),
    ("<|END_THINKING|>",),
    content_opens=("<|START_RESPONSE|>", "<|START_TEXT|>"),
    content_closes=("<|END_RESPONSE|>", "<|END_TEXT|>"),
)
_RESPONSE = replace(_THINK, content_opens=("<response>",), content_closes=("</response>",))
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "apertus": ReasoningFormat(("<|inner_prefix|>",), ("<|inner_suffix|>",)),
    "cohere_command3": _COHERE_REASONING,
    "cohere_command4": _COHERE_REASONING,
    "deepseek_r1": _THINK,
    "deepseek_v3": _THINK,
    "deepseek_v4": _THINK,
    "ernie45": _RESPONSE,
    "gemma4": ReasoningFormat(("<|channel>thought",), ("<channel|>",), trims_newlines=True),
    "glm45": _THINK,
    "granite": replace(
        _RESPONSE,
        opens=("<think>", "Here is my thought process:", "Here's my thought process:"),
        closes=("</think>", "Here is my response:", "Here's my response:"),
    ),
    "hunyuan_a13b": replace(_THINK, content_opens=("<answer>",), content_closes=("</answer>",)),
    "hy_v3": ReasoningFormat(_labelled("<think"), _labelled("</think"), trims_newlines=True),
    "kimi_k2": _THINK,
    "longcat": ReasoningFormat(("<longcat_think>",), ("</longcat_think>",), trims_newlines=True),
    "minimax_m2": _THINK,
    "mistral": ReasoningFormat(("[THINK]",), ("[/THINK]",)),
    "nemotron_v3": _THINK,
    "olmo3": _THINK,
    "openai_gptoss": ReasoningFormat(("<|channel|>analysis<|message|>",), ("<|end|>",)),
    "qwen3": _THINK,
    "seed_oss": ReasoningFormat(("<seed:think>",), ("</seed:think>",), trims_newlines=True),
    "step3": _THINK,
    "step3p5": _THINK,
}


def find_tool_format(name: str | None) -> ToolFormat | None:
    """Return a row by its name, None for None. Raises ConfigError for an unknown name."""
    return None if name is None else _find(TOOL_FORMATS, name, "tool_call_parser")


def find_reasoning_format(name: str | None) -> ReasoningFormat | None:
    """Return a row by its name, None for None. Raises ConfigError for an unknown name."""
    return None if name is None else _find(REASONING_FORMATS, name, "reasoning_parser")


def is_harmony(tool_format: str | None, reasoning_format: str | None) -> bool:
    """Whether one of the names is the format of messages with channels (harmony), which is parsed as a whole."""
    return tool_format == "openai" or reasoning_format == "openai_gptoss"


def markers_of(tool_format: str | None, reasoning_format: str | None) -> tuple[str, ...]:
    """Return the markers of two formats, for OutputParser's marker_token_ids."""
    found: dict[str, None] = {}

    def collect(texts: tuple[str, ...]) -> tuple[str, ...]:
        found.update(dict.fromkeys(texts))
        return texts

    if is_harmony(tool_format, reasoning_format):
        return _HARMONY_MARKERS
    for row in (find_tool_format(tool_format), find_reasoning_format(reasoning_format)):
        if row is not None:
            map_markers(row, collect)
    return tuple(text for text in found if len(text) > 2)


def map_markers(row: Any, change: Callable[[tuple[str, ...]], tuple[str, ...]]) -> Any:
    """Return a row with every tuple of markers in it changed, those of its body too."""
    changed: dict[str, Any] = {}
    for item in fields(row):
        value = getattr(row, item.name)
        if isinstance(value, tuple):
            changed[item.name] = change(value)
        elif is_dataclass(value):
            changed[item.name] = map_markers(value, change)
    return replace(row, **changed)


def _find(table: dict[str, Any], name: str, option: str) -> Any:
    if name not in table:
        raise ConfigError(f"{option} {name!r} is not known; allowed are {', '.join(sorted(table))}")
    return table[name]
