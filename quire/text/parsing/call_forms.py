"""How a format's calls are spelled when a grammar writes them: for tool_choice and strict tools."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallForm:
    """The texts around the arguments of a call, which are a JSON object.

    begin      with {name} for the name of the tool
    separator  between calls
    opens      before the first call, and closes after the last one
    trigger    what no text but a call has, "" where there is no such thing
    """

    begin: str
    end: str
    separator: str = ""
    opens: str = ""
    closes: str = ""
    trigger: str = ""

    def begin_of(self, name: str) -> str:
        """Return what stands before the arguments of a tool."""
        return self.begin.replace("{name}", name)


CALL_FORMS: dict[str, CallForm] = {
    "deepseek_v31": CallForm(
        begin="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        end="<｜tool▁call▁end｜>",
        opens="<｜tool▁calls▁begin｜>",
        closes="<｜tool▁calls▁end｜>",
    ),
    "functionary_v31": CallForm(begin="<function={name}>", end="</function>", trigger="<function="),
    "hermes": CallForm(
        begin='<tool_call>\n{"name": "{name}", "arguments": ', end="}\n</tool_call>", separator="\n", trigger="<tool_call>"
    ),
    "llama3_json": CallForm(begin='{"name": "{name}", "parameters": ', end="}", separator=";"),
    "mistral": CallForm(begin="[TOOL_CALLS]{name}[ARGS]", end="", trigger="[TOOL_CALLS]"),
}
"""By the names of formats.py; formats with arguments in something else than JSON are not among them."""
