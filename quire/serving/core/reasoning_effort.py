"""How much a model is to reason, in the words of the APIs and as variables of its chat template."""

from __future__ import annotations

from quire.base.errors import RequestError

_SWITCHES = ("enable_thinking", "thinking")
_ON = ("low", "medium", "high")
_LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh")


def has_effort(template_source: str) -> bool:
    """Return whether a chat template knows levels of reasoning, or a switch; else no effort has an effect."""
    return "reasoning_effort" in template_source or _switch_of(template_source) is not None


def reasoning_variables(template_source: str, effort: str | None, reasons: bool) -> dict[str, object]:
    """Return the template variables for an effort. A template with a switch and no levels takes low, medium and high as on.

    reasons  whether the model reasons: where the template knows neither levels nor a switch, nothing can turn that off

    Raises RequestError, naming what the template knows, where it does not know this.
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
