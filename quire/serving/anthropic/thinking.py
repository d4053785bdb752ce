"""Thinking in the Anthropic API: the requested effort, and signatures of reasoning that clients send back."""

from __future__ import annotations

import base64
import hmac

from quire.api.anthropic.messages import OutputConfig, Thinking, ThinkingDisabled, ThinkingEnabled
from quire.base.errors import RequestError
from quire.serving.core.reasoning_effort import reasoning_variables

LOW_BUDGET, MEDIUM_BUDGET = 4096, 16384  # tokens; a budget above is high effort


class ThinkingSigner:
    """Signs reasoning for one owner with a key of this process, so that only reasoning from this server is accepted."""

    def __init__(self, key: bytes, owner: str) -> None:
        self._key = key
        self._owner = owner

    def sign(self, text: str) -> str:
        """Return the signature of a block of reasoning."""
        message = f"{len(self._owner)}:{self._owner}{text}".encode("utf-8", "surrogatepass")
        return base64.b64encode(hmac.digest(self._key, message, "sha256")).decode("ascii")

    def is_own(self, text: str, signature: str) -> bool:
        """Whether the signature is the one that `sign` gave."""
        return hmac.compare_digest(self.sign(text).encode(), signature.encode("utf-8", "surrogatepass"))


def effort_of(source: str, reasons: bool, thinking: Thinking | None, config: OutputConfig | None) -> str | None:
    """Return the effort that a request asks for, None for the default of the chat template.

    source   of the chat template
    reasons  whether the model's output has reasoning in a known format
    Raises RequestError if the template has no such option.
    """
    effort = None if config is None else config.effort
    if isinstance(thinking, ThinkingDisabled):
        if _accepts_effort(source, "none"):
            return "none"
        if reasons:
            raise RequestError("thinking: the chat template of this model cannot turn it off; leave thinking out", "thinking")
        return None
    if effort is not None:
        try:
            reasoning_variables(source, effort, reasons)
        except RequestError as error:
            raise RequestError(str(error).replace("reasoning_effort", "output_config.effort", 1), "output_config") from None
        return effort
    if not isinstance(thinking, ThinkingEnabled):
        return None
    level = _level(thinking.budget_tokens)
    return level if _accepts_effort(source, level) else None


def _level(budget_tokens: int) -> str:
    return "low" if budget_tokens <= LOW_BUDGET else "medium" if budget_tokens <= MEDIUM_BUDGET else "high"


def _accepts_effort(source: str, effort: str) -> bool:
    try:
        return bool(reasoning_variables(source, effort, reasons=True))
    except RequestError:
        return False
