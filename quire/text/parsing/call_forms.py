"""How a format's calls are spelled when a grammar writes them: for tool_choice and strict tools."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallForm:
    """The texts around the arguments of a call.

    begin      with {name} for the name of the tool, and {number} for digits where calls are numbered by the model
    separator  between calls
    opens      before the first call, and closes after the last one
    style      how the arguments are written, as quire/grammar/tool_call_grammar.py names it; "json": a JSON object
    trigger    what no text but a call has, or the opening of all calls; "" where there is no such thing
    banned     what else would begin a call, so that no free text may have it
    content    what stands behind `opens` where text follows instead of a call; every call has `opens` before it then, as its
               separator, and the prompt may end with the first one
    start      where there is no trigger, an expression of what calls begin with: an answer that begins otherwise has none;
               {names} stands for the names of the tools
    """

    begin: str
    end: str
    separator: str = ""
    opens: str = ""
    closes: str = ""
    style: str = "json"
    trigger: str = ""
    banned: tuple[str, ...] = ()
    content: str = ""
    start: str = ""

    def begin_of(self, name: str) -> str:
        """Return what stands before the arguments of a tool."""
        return self.begin.replace("{name}", name)


_NAMED = '{"name": "{name}", "arguments": '
_SPACE = r"[ \t\r\n]*"
_QWEN_XML = CallForm(
    begin="<tool_call>\n<function={name}>\n",
    end="</function>\n</tool_call>",
    separator="\n",
    style="qwen_xml",
    trigger="<tool_call>",
    banned=("<function=",),
)
_PYTHONIC = CallForm(
    begin="{name}(",
    end=")",
    separator=", ",
    opens="[",
    closes="]",
    style="python",
    banned=("<|python_start|>",),
    start=rf"{_SPACE}\[{_SPACE}(?:{{names}}){_SPACE}\(",
)


def _deepseek(name: str, behind: str, separator: str = "") -> CallForm:
    """Return the form with a name before the arguments, and something behind them, within the markers of a call."""
    return CallForm(
        begin=f"<｜tool▁call▁begin｜>{name}",
        end=f"{behind}<｜tool▁call▁end｜>",
        separator=separator,
        opens="<｜tool▁calls▁begin｜>",
        closes="<｜tool▁calls▁end｜>",
        trigger="<｜tool▁calls▁begin｜>",
        banned=("<｜tool▁call▁begin｜>",),
    )


def _deepseek_xml(section: str, other: str) -> CallForm:
    return CallForm(
        begin='<｜DSML｜invoke name="{name}">\n',
        end="</｜DSML｜invoke>\n",
        opens=f"<｜DSML｜{section}>\n",
        closes=f"</｜DSML｜{section}>",
        style="deepseek_xml",
        trigger=f"<｜DSML｜{section}>",
        banned=(f"<｜DSML｜{other}>", '<｜DSML｜invoke name="'),
    )


CALL_FORMS: dict[str, CallForm] = {
    "deepseek_v3": _deepseek("function<｜tool▁sep｜>{name}\n```json\n", "\n```", "\n"),
    "deepseek_v31": _deepseek("{name}<｜tool▁sep｜>", ""),
    "deepseek_v32": _deepseek_xml("function_calls", "tool_calls"),
    "deepseek_v4": _deepseek_xml("tool_calls", "function_calls"),
    "functionary_v31": CallForm(begin="<function={name}>", end="</function>", trigger="<function="),
    "functionary_v3": CallForm(begin="{name}\n", end="", separator=">>>", opens=">>>", trigger=">>>", content="all\n"),
    "functiongemma": CallForm(
        begin="<start_function_call>call:{name}{",
        end="}<end_function_call>",
        style="functiongemma",
        trigger="<start_function_call>",
    ),
    "glm45": CallForm(begin="<tool_call>{name}\n", end="</tool_call>", separator="\n", style="glm_xml", trigger="<tool_call>"),
    "granite": CallForm(
        begin=_NAMED,
        end="}",
        separator=", ",
        opens="<|tool_call|>[",
        closes="]",
        trigger="<|tool_call|>",
        banned=("<tool_call>",),
    ),
    "hermes": CallForm(begin=f"<tool_call>\n{_NAMED}", end="}\n</tool_call>", separator="\n", trigger="<tool_call>"),
    "kimi_k2": CallForm(
        begin="<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
        opens="<|tool_calls_section_begin|>",
        closes="<|tool_calls_section_end|>",
        trigger="<|tool_calls_section_begin|>",
        banned=("<|tool_call_begin|>",),
    ),
    "llama3_json": CallForm(
        begin='{"name": "{name}", "parameters": ',
        end="}",
        separator=";",
        banned=("<|python_tag|>",),
        start=rf"{_SPACE}\{{",
    ),
    "llama4_pythonic": _PYTHONIC,
    "minimax_m2": CallForm(
        begin='<invoke name="{name}">\n',
        end="</invoke>\n",
        opens="<minimax:tool_call>\n",
        closes="</minimax:tool_call>",
        style="minimax_xml",
        trigger="<minimax:tool_call>",
        banned=('<invoke name="',),
    ),
    "mistral": CallForm(begin="[TOOL_CALLS]{name}[ARGS]", end="", trigger="[TOOL_CALLS]"),
    "phi4_mini_json": CallForm(begin=_NAMED, end="}", separator=", ", opens="functools[", closes="]", trigger="functools"),
    "pythonic": _PYTHONIC,
    "qwen3_coder": _QWEN_XML,
    "qwen3_xml": _QWEN_XML,
}
"""By the names of formats.py. Calls of the formats with channels are messages: see
quire/serving/core/harmony_constraints.py.
"""
