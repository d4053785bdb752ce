"""Request body of POST /v1/embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta

from quire.api.decode import Body
from quire.api.openai.completions import PromptField, split_prompts
from quire.api.openai.shared import Name, Salt
from quire.api.refusal import Refusal, always, unless

MAX_INPUTS = 2048
MAX_INPUT_TOKENS = 300_000


EncodingFormat = Annotated[
    Literal["float", "base64"], Meta(description="base64: of little-endian 32-bit floats. Default float.")
]
Truncation = Annotated[
    int,
    Meta(ge=-1, description="Keep so many tokens of a longer input; -1: as many as the model takes. Default: it is refused."),
]


class EmbeddingRequest(Body, kw_only=True):
    """Texts to be embedded."""

    model: Name
    input: PromptField
    encoding_format: EncodingFormat | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20, description="Cut the vectors to so many.")] | None = None
    normalize: Annotated[bool, Meta(description="Scale to length 1. Default: as the model says, or true.")] | None = None
    pooling: (
        Annotated[Literal["last", "mean", "cls"], Meta(description="Default: as the model says, or the last token.")] | None
    ) = None
    truncate_prompt_tokens: Truncation | None = None
    prompt_name: (
        Annotated[str, Meta(description="The name of a text of the model that is put before inputs that are texts.")] | None
    ) = None
    add_special_tokens: bool | None = None
    cache_salt: Salt | None = None
    user: str | None = None

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        return {
            "chat_template_kwargs": unless({}, reason="is not supported; put it into the input"),
            "messages": always("is not supported; send input"),
            "embed_dtype": unless("float32", reason="vectors are float32"),
            "endianness": unless("native", "little", reason="base64 is of little-endian floats"),
            "use_activation": unless(True, reason="is not supported; use normalize"),
            **{
                name: always("is not supported; put it into the input")
                for name in ("instruction", "input_type", "chat_template")
            },
        }

    def check(self) -> None:
        """Check the shape of the input."""
        split_prompts(self.input, MAX_INPUTS, "input")
