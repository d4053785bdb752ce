"""Reasoning effort: from the values of the APIs to variables of the chat template."""

from __future__ import annotations

from quire.base.errors import RequestError

_SWITCHES = ("enable_thinking", "thinking")
_ON = ("low", "medium", "high")
_LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh")


def has_effort(template_source: str) -> bool:
    """Return whether a chat template has levels of reasoning or a switch; otherwise the effort has no effect."""
    return "reasoning_effort" in template_source or _switch_of(template_source) is not None


def reasoning_variables(template_source: str, effort: str | None, reasons: bool) -> dict[str, object]:
    """Return the template variables for an effort. For a template with a switch but no levels, low, medium and high mean on.

    reasons  whether the model reasons; if the template has neither levels nor a switch, this cannot be turned off

    Raises RequestError, with the template's levels, if it does not have this one.
    """
    if effort is None:
        return {}
    if not has_effort(template_source):
        if effort == "none" and reasons:
            raise RequestError(
                "reasoning_effort: the chat template of this model cannot turn reasoning off; leave it out", "reasoning_effort"
            )
        return {}
    if "reasoning_effort" in template_source:
        known = [level for level in _LEVELS if f"'{level}'" in template_source or f'"{level}"' in template_source]
        allowed = tuple(known) if len(known) > 1 else ("low", "medium", "high")
        variables: dict[str, object] = {"reasoning_effort": effort}
    else:
        allowed = ("none", *_ON)
        variables = {_switch_of(template_source) or "": effort != "none"}
    if effort not in allowed:
        raise RequestError(
            f"reasoning_effort: the chat template of this model knows {', '.join(allowed)}, got {effort[:50]!r}",
            "reasoning_effort",
        )
    return variables


def _switch_of(template_source: str) -> str | None:
    return next((name for name in _SWITCHES if name in template_source), None)
