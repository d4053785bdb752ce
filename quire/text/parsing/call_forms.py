"""How grammars write the calls of each format, for tool_choice and strict tools."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallForm:
    """The texts around the arguments of a call.

    begin      with {name} for the name of the tool, and {number} for digits if the model numbers calls
    separator  between calls
    opens      before the first call, and closes after the last one
    style      how the arguments are written, a name of quire/grammar/tool_call_grammar.py; "json": a JSON object
    trigger    a text that only calls contain, or the opening of all calls; "" if there is none
    banned     other texts that would begin a call, and so are excluded from free text
    content    follows `opens` if text comes instead of a call; every call then has `opens` before it, as its
               separator, and the prompt may end with the first one
    start      without a trigger, a regular expression of how calls begin: an answer that begins otherwise has no calls;
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
        """Return the text before the arguments of a tool."""
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
_HERMES = CallForm(begin=f"<tool_call>\n{_NAMED}", end="}\n</tool_call>", separator="\n", trigger="<tool_call>")
_GLM = CallForm(begin="<tool_call>{name}\n", end="</tool_call>", separator="\n", style="glm_xml", trigger="<tool_call>")
_GLM_IN_LINE = CallForm(begin="<tool_call>{name}", end="</tool_call>", style="glm_xml", trigger="<tool_call>")
_LLAMA_JSON = CallForm(
    begin='{"name": "{name}", "parameters": ',
    end="}",
    separator=";",
    banned=("<|python_tag|>",),
    start=rf"{_SPACE}\{{",
)
_COHERE = CallForm(
    begin='    {"tool_call_id": "{number}", "tool_name": "{name}", "parameters": ',
    end="}",
    separator=",\n",
    opens="<|START_ACTION|>[\n",
    closes="\n]<|END_ACTION|>",
    trigger="<|START_ACTION|>",
)
_TOOL_CALLS = CallForm(
    begin=_NAMED, end="}", separator=", ", opens="<tool_calls>[", closes="]</tool_calls>", trigger="<tool_calls>"
)


def _deepseek(name: str, behind: str, separator: str = "") -> CallForm:
    """Return the form with a name before the arguments, and a text after them, within the markers of a call."""
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
    "apertus": CallForm(
        begin='{"{name}": ',
        end="}",
        separator=", ",
        opens="<|tools_prefix|>[",
        closes="]<|tools_suffix|>",
        trigger="<|tools_prefix|>",
    ),
    "cohere_command3": _COHERE,
    "cohere_command4": _COHERE,
    "deepseek_v3": _deepseek("function<｜tool▁sep｜>{name}\n```json\n", "\n```", "\n"),
    "deepseek_v31": _deepseek("{name}<｜tool▁sep｜>", ""),
    "deepseek_v32": _deepseek_xml("function_calls", "tool_calls"),
    "deepseek_v4": _deepseek_xml("tool_calls", "function_calls"),
    "ernie45": _HERMES,
    "functionary_v31": CallForm(begin="<function={name}>", end="</function>", trigger="<function="),
    "functionary_v3": CallForm(begin="{name}\n", end="", separator=">>>", opens=">>>", trigger=">>>", content="all\n"),
    "functiongemma": CallForm(
        begin="<start_function_call>call:{name}{",
        end="}<end_function_call>",
        style="functiongemma",
        trigger="<start_function_call>",
    ),
    "gemma4": CallForm(begin="<|tool_call>call:{name}{", end="}<tool_call|>", style="gemma4", trigger="<|tool_call>"),
    "gigachat3": CallForm(
        begin=f"function call<|role_sep|>\n{_NAMED}",
        end="}",
        trigger="function call<|role_sep|>",
        banned=("<|function_call|>",),
    ),
    "glm45": _GLM,
    "glm47": _GLM_IN_LINE,
    "granite": CallForm(
        begin=_NAMED,
        end="}",
        separator=", ",
        opens="<|tool_call|>[",
        closes="]",
        trigger="<|tool_call|>",
        banned=("<tool_call>",),
    ),
    "granite-20b-fc": CallForm(begin=f"<function_call> {_NAMED}", end="}", separator=" ", trigger="<function_call>"),
    "granite4": _HERMES,
    "hermes": _HERMES,
    "json": _HERMES,
    "hunyuan_a13b": _TOOL_CALLS,
    "hy_v3": CallForm(
        begin="<tool_call:opensource>{name}<tool_sep:opensource>\n",
        end="</tool_call:opensource>\n",
        opens="<tool_calls:opensource>\n",
        closes="</tool_calls:opensource>",
        style="hy_xml",
        trigger="<tool_calls:opensource>",
        banned=("<tool_call:opensource>", "<tool_call>"),
    ),
    "internlm": CallForm(
        begin='<|action_start|><|plugin|>\n{"name": "{name}", "parameters": ',
        end="}<|action_end|>",
        separator="\n",
        trigger="<|action_start|>",
        banned=("<|plugin|>",),
    ),
    "jamba": _TOOL_CALLS,
    "kimi_k2": CallForm(
        begin="<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
        opens="<|tool_calls_section_begin|>",
        closes="<|tool_calls_section_end|>",
        trigger="<|tool_calls_section_begin|>",
        banned=("<|tool_call_begin|>",),
    ),
    "lfm2": CallForm(
        begin="{name}(",
        end=")",
        separator=", ",
        opens="<|tool_call_start|>[",
        closes="]<|tool_call_end|>",
        style="python",
        trigger="<|tool_call_start|>",
    ),
    "llama3_json": _LLAMA_JSON,
    "llama4_json": _LLAMA_JSON,
    "llama4_pythonic": _PYTHONIC,
    "longcat": CallForm(
        begin=f"<longcat_tool_call>\n{_NAMED}", end="}\n</longcat_tool_call>", separator="\n", trigger="<longcat_tool_call>"
    ),
    "minimax": CallForm(
        begin=_NAMED, end="}", separator="\n", opens="<tool_calls>\n", closes="\n</tool_calls>", trigger="<tool_calls>"
    ),
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
    "nemotron_json": CallForm(
        begin=_NAMED, end="}", separator=", ", opens="<TOOLCALL>[", closes="]</TOOLCALL>", trigger="<TOOLCALL>"
    ),
    "olmo3": CallForm(
        begin="{name}(",
        end=")",
        separator="\n",
        opens="<function_calls>",
        closes="</function_calls>",
        style="python",
        trigger="<function_calls>",
    ),
    "phi4_mini_json": CallForm(begin=_NAMED, end="}", separator=", ", opens="functools[", closes="]", trigger="functools"),
    "pythonic": _PYTHONIC,
    "qwen3_coder": _QWEN_XML,
    "qwen3_xml": _QWEN_XML,
    "seed_oss": CallForm(
        begin="<seed:tool_call>\n<function={name}>\n",
        end="</function>\n</seed:tool_call>",
        separator="\n",
        style="seed_xml",
        trigger="<seed:tool_call>",
    ),
    "step3": CallForm(
        begin='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">',
        end="</steptml:invoke><｜tool_call_end｜>",
        opens="<｜tool_calls_begin｜>",
        closes="<｜tool_calls_end｜>",
        style="step_xml",
        trigger="<｜tool_calls_begin｜>",
        banned=("<｜tool_call_begin｜>",),
    ),
    "step3p5": _QWEN_XML,
}
"""By the names of formats.py. Calls of the formats with channels are messages: see
quire/serving/core/harmony_constraints.py.
"""
