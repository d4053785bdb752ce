"""Request body of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from quire.api.decode import BodyError
from quire.api.openai.shared import NO_LIMIT, Limit, SamplingFields, TokenId
from quire.api.refusal import Refusal, unless
from quire.api.unsupported_params import NO_REASONING, refusals_of

MAX_PROMPTS = 256
DEFAULT_MAX_TOKENS = 16

Prompt = str | list[int]
PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        {
            "type": "array",
            "minItems": 1,
            "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        },
    ]
}
# A single list type; split_prompts distinguishes its contents. The generated schema is PROMPT_SCHEMA.
PromptField = Annotated[str | list[str | TokenId | list[TokenId]], Meta(extra_json_schema=PROMPT_SCHEMA)]


class CompletionRequest(SamplingFields, kw_only=True):
    """A text to be continued."""

    prompt: PromptField
    max_tokens: Annotated[Limit, Meta(description="Default 16; 0 needs echo; -1: what the context has left.")] | None = None
    max_completion_tokens: Annotated[Limit, Meta(description="The same as max_tokens.")] | None = None
    suffix: Annotated[str, Meta(description='"": the model cannot fill in the middle.')] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: Annotated[bool, Meta(description="Answer with the prompt in front.")] | None = None
    best_of: (
        Annotated[int, Meta(ge=1, description="Choices to generate, whose tokens all count; the n likeliest are returned.")]
        | None
    ) = None
    add_special_tokens: bool | None = None

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        # The default is a limit of 16, so "no limit" is not a neutral value here.
        unlimited: dict[str, tuple[object, ...]] = {"max_output_tokens": (), "n_predict": (), "num_predict": ()}
        return {
            **super().refusals(),
            **refusals_of(unlimited, cls.__struct_encode_fields__),
            **refusals_of(NO_REASONING, ()),  # there is no chat template that could ask for any
            "suffix": unless("", reason="the model cannot fill in the middle; leave it out"),
        }

    def check(self) -> None:
        """Check constraints between fields."""
        super().check()
        split_prompts(self.prompt, MAX_PROMPTS, "prompt")
        if self.best_of is not None:
            if self.best_of < (self.n or 1):
                raise BodyError(f"best_of: must be at least n, {self.n}, got {self.best_of}", "best_of")
            if self.stream and self.best_of > (self.n or 1):
                raise BodyError("best_of: which choices are best is known at the end; leave stream out", "best_of")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise BodyError(
                f"max_completion_tokens: is another name of max_tokens, {self.max_tokens}, got {self.max_completion_tokens}",
                "max_completion_tokens",
            )
        limit = self.max_output_tokens
        if limit == 0 and not self.echo:
            raise BodyError(f"{self.limit_param}: 0 needs echo true, or there is nothing to answer", self.limit_param)
        if self.min_tokens is not None and limit is not None and self.min_tokens > limit:
            raise BodyError(f"min_tokens: must be at most {self.limit_param}, {limit}, got {self.min_tokens}", "min_tokens")

    @property
    def limit_param(self) -> str:
        """The name under which the output limit was sent."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def stated_limit(self) -> int | None:
        """max_tokens or max_completion_tokens, as sent."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def max_output_tokens(self) -> int | None:
        """The limit of the output; None if only the context limits it."""
        stated = self.stated_limit
        return DEFAULT_MAX_TOKENS if stated is None else None if stated == NO_LIMIT else stated


def split_prompts(prompt: str | list[str | int | list[int]], limit: int, param: str) -> list[Prompt]:
    """Return the prompts of a field with one or many, as text or token ids. Raises RequestError."""
    prompts: list[Prompt]
    if isinstance(prompt, str):
        prompts = [prompt]
    elif (kinds := set[type](map(type, prompt))) == {int}:
        prompts = [prompt]  # type: ignore[list-item]
    elif kinds <= {str} or kinds == {list}:
        prompts = prompt  # type: ignore[assignment]
    else:
        raise BodyError(f"{param}: must hold strings, token ids, or lists of token ids, and not a mixture of them", param)
    if not prompts:
        raise BodyError(f"{param}: is empty", param)
    if len(prompts) > limit:
        raise BodyError(f"{param}: may hold {limit} items, got {len(prompts)}", param)
    for position, item in enumerate(prompts):
        if not item:
            where = param if len(prompts) == 1 else f"{param}[{position}]"
            raise BodyError(f"{where}: is empty; at least one token is needed", where)
    return prompts
