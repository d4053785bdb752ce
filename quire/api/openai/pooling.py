"""The bodies of POST /classify, /pooling, /v1/score and /v1/rerank: vLLM's names, and for rerank those of Jina and Cohere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from quire.api.decode import Body, BodyError
from quire.api.openai.completions import PromptField, split_prompts
from quire.api.openai.embeddings import MAX_INPUTS, EncodingFormat, Truncation
from quire.api.openai.shared import Name, Salt
from quire.api.refusal import Refusal, always, unless

UseActivation = Annotated[bool, Meta(description="Apply the model's activation function to the logits. Default true.")]
Texts = str | Annotated[list[str], Meta(max_length=MAX_INPUTS)]
_ONLY_TEXTS = always("is not supported; only texts are scored")


class ClassifyRequest(Body, kw_only=True):
    """Texts to be classified."""

    input: PromptField
    model: Name | None = None
    use_activation: UseActivation | None = None
    truncate_prompt_tokens: Truncation | None = None
    add_special_tokens: bool | None = None
    cache_salt: Salt | None = None
    user: str | None = None

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        return {"messages": always("is not supported; send input")}

    def check(self) -> None:
        """Check the shape of the input."""
        split_prompts(self.input, MAX_INPUTS, "input")


class PoolingRequest(ClassifyRequest, kw_only=True):
    """Texts whose pooled hidden states, or scores of classes, are wanted: whatever the model is for."""

    encoding_format: EncodingFormat | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20, description="Cut the vectors to so many.")] | None = None
    normalize: Annotated[bool, Meta(description="Scale to length 1. Default: as the model says.")] | None = None

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        return {
            **super().refusals(),
            "task": unless("embed", "classify", reason="is not supported; the model's own task is taken: embed or classify"),
        }


class ScoreRequest(Body, kw_only=True):
    """Pairs of texts to be scored: text_1[i] with text_2[i], or one with many."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Annotated[Texts, Meta(description="The same as text_1.")] | None = None
    documents: Annotated[Texts, Meta(description="The same as text_2.")] | None = None
    model: Name | None = None
    use_activation: UseActivation | None = None
    truncate_prompt_tokens: Truncation | None = None
    cache_salt: Salt | None = None
    user: str | None = None

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        return {"items": _ONLY_TEXTS, "data_1": always("is text_1 here"), "data_2": always("is text_2 here")}

    def check(self) -> None:
        """Check that there are two lists of texts, each by one name."""
        self.pairs()

    def pairs(self) -> tuple[tuple[str, str | list[str]], tuple[str, str | list[str]]]:
        """Return the name and the texts of both fields that were sent. Raises BodyError."""
        sides: list[tuple[str, str | list[str]]] = []
        for name, other in (("text_1", "queries"), ("text_2", "documents")):
            stated = [(field, value) for field in (name, other) if (value := getattr(self, field)) is not None]
            if len(stated) != 1:
                raise BodyError(f"{name}: one of {name} and {other} is needed", name, "missing_required_parameter")
            if stated[0][1] == []:
                raise BodyError(f"{stated[0][0]}: needs at least one text", stated[0][0], "invalid_value")
            sides.append(stated[0])
        return sides[0], sides[1]


class RerankDocument(msgspec.Struct):
    """A document as an object."""

    text: str


class RerankRequest(Body, kw_only=True):
    """Documents to be ordered by how well they answer a query."""

    query: str
    documents: Annotated[list[str | RerankDocument], Meta(min_length=1, max_length=MAX_INPUTS)]
    model: Name | None = None
    top_n: Annotated[int, Meta(ge=0, description="So many of the best; 0: all, which is the default.")] | None = None
    return_documents: Annotated[bool, Meta(description="Answer with the texts of the documents. Default true.")] | None = None
    max_tokens_per_doc: (
        Annotated[int, Meta(ge=1, description="Keep so many tokens of each document, before it meets the query.")] | None
    ) = None
    use_activation: UseActivation | None = None
    truncate_prompt_tokens: Truncation | None = None
    cache_salt: Salt | None = None
    user: str | None = None

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        return {
            "rank_fields": _ONLY_TEXTS,
            "max_chunks_per_doc": unless(1, reason="is not supported; a document that is too long is refused or truncated"),
        }

    def texts(self) -> list[str]:
        """Return the documents."""
        return [document if isinstance(document, str) else document.text for document in self.documents]
