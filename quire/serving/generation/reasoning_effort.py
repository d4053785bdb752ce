"""How much a model is to reason, in the words of the APIs and as variables of its chat template."""

from __future__ import annotations

from quire.base.errors import RequestError

_SWITCHES = ("enable_thinking", "thinking")
_ON = ("low", "medium", "high")
_LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh")


def reasoning_variables(template_source: str, effort: str | None) -> dict[str, object]:
    """Return the template variables for an effort. A template with a switch and no levels takes low, medium and high as on.

    Raises RequestError, naming what the template knows, where it does not know this.
    """
    if effort is None:
        return {}
    if "reasoning_effort" in template_source:
        known = [level for level in _LEVELS if f"'{level}'" in template_source or f'"{level}"' in template_source]
        allowed = tuple(known) if len(known) > 1 else ("low", "medium", "high")
        variables: dict[str, object] = {"reasoning_effort": effort}
    else:
        switch = next((name for name in _SWITCHES if name in template_source), None)
        if switch is None:
            raise RequestError("reasoning_effort: the chat template of this model knows none; leave it out", "reasoning_effort")
        allowed = ("none", *_ON)
        variables = {switch: effort != "none"}
    if effort not in allowed:
        raise RequestError(
            f"reasoning_effort: the chat template of this model knows {', '.join(allowed)}, got {effort[:50]!r}",
            "reasoning_effort",
        )
    return variables
