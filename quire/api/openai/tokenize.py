"""Request bodies of POST /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from msgspec import Meta

from quire.api.decode import Body, BodyError
from quire.api.openai.chat import ContinuesFinal, Messages, TemplateVariables, Tools, check_template_fields
from quire.api.openai.shared import Name, TokenId
from quire.api.refusal import Refusal, always
from quire.api.unsupported_params import PARAMETERS, refusals_of

MAX_TOKENS = 1 << 17


class TokenizeRequest(Body, kw_only=True):
    """A prompt or messages to be tokenized; exactly one of the two."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: ContinuesFinal | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_special_tokens: Annotated[bool, Meta(description="Default true for a prompt, false for messages.")] | None = None
    return_token_strs: bool | None = None

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        names = ("mm_processor_kwargs", "media_io_kwargs", "truncate_prompt_tokens", "documents")
        neutral = {name: PARAMETERS[name] for name in names}
        return {**refusals_of(neutral, ()), "chat_template": always("is not supported; leave it out")}

    def check(self) -> None:
        """Check constraints between fields."""
        if (self.prompt is None) == (self.messages is None):
            raise BodyError("prompt: one of prompt and messages is needed", "prompt", "missing_required_parameter")
        check_template_fields(self)


class DetokenizeRequest(Body, kw_only=True):
    """Token ids to be detokenized."""

    max_values: ClassVar[int | None] = MAX_TOKENS + (1 << 15)
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
    model: Name | None = None
