"""Definitions shared by request bodies of the OpenAI API: sampling fields, their ranges, and refused fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from quire.api.decode import Body, BodyError, Part
from quire.api.refusal import Refusal, always, unless
from quire.api.unsupported_params import refusals_of_others
from quire.contracts.kv_compression import CompressionMethod

MAX_TOKEN_ID = 2**31 - 1
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 256
MAX_BIASES = 1024
MAX_DEPTH = 64
GUIDED_KINDS = ("json", "regex", "choice", "grammar", "json_object")
"""Suffixes of the fields guided_json and so on, each of which constrains the output."""

TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
TokenIds = Annotated[list[TokenId], Meta(max_length=1024)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
Stop = (
    Annotated[str, Meta(max_length=MAX_STOP_LENGTH, description='"" stops nowhere.')]
    | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]
)
NO_LIMIT = -1
"""No limit of output tokens, as in llama.cpp and other servers."""
Limit = Annotated[int, Meta(ge=NO_LIMIT, le=MAX_TOKEN_ID)]
Count = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
RANDOM_SEED = -1
"""Same as no seed, as in other servers."""
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
BiasedToken = Annotated[str, Meta(pattern="^[0-9]{1,10}$")]
Salt = Annotated[str, Meta(min_length=1, max_length=1024)]
CacheRetention = Annotated[
    Literal["in_memory", "in-memory", "24h"],
    Meta(description='"24h": KV tiers save the prompt at once, and keep it longer than others. No effect without KV tiers.'),
]
RETENTION_S = {"24h": 86_400.0}
"""Seconds that a CacheRetention asks for; the others ask for none."""
Name = Annotated[str, Meta(min_length=1, max_length=512)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16, description="Accepted and not used."),
]


class StreamOptions(msgspec.Struct, kw_only=True):
    """Usage options of a stream."""

    include_usage: Annotated[bool, Meta(description="Send a last chunk with the usage.")] | None = None
    continuous_usage_stats: Annotated[bool, Meta(description="Send the usage so far with every chunk.")] | None = None
    include_obfuscation: Literal[False] | None = None


class TextFormat(msgspec.Struct, tag_field="type", tag="text"):
    """Unconstrained text."""


class JsonObjectFormat(Part, tag_field="type", tag="json_object"):
    """A JSON object."""

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        return dict.fromkeys(("schema", "json_schema"), always("a schema needs the type 'json_schema'"))


class NamedSchema(msgspec.Struct, kw_only=True):
    """A JSON schema, enforced whether strict is true or not. The name and the description are ignored."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    schema: dict[str, Any] | bool
    strict: bool | None = None
    description: str | None = None


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    """JSON that matches a schema."""

    json_schema: NamedSchema


class StructuralTagFormat(msgspec.Struct, tag_field="type", tag="structural_tag", kw_only=True):
    """A sequence of free text and constrained parts: a format, or in the old form structures and triggers."""

    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat
Schema = dict[str, Any] | str | bool
Backend = Literal["auto", "llguidance", "guidance", "xgrammar"]


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A constraint on the output; exactly one of the first six fields."""

    json: Schema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: Annotated[str, Meta(description="Lark, or GBNF.")] | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    max_open_length: (
        Annotated[int, Meta(ge=1, le=1 << 16, description="Limit of strings and arrays that have none.")] | None
    ) = None
    fit_max_tokens: (
        Annotated[
            bool, Meta(description="Complete JSON within max_tokens, where possible; without it the server's option decides.")
        ]
        | None
    ) = None
    backend: Backend | None = None
    disable_fallback: Annotated[bool, Meta(description="Do not try another backend where it is 'auto'.")] | None = None


class KvCompressionFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Blocks of the KV cache are evicted, which changes the output, or not read; see KvCompression."""

    method: CompressionMethod
    budget_tokens: Annotated[Count, Meta(description="Tokens that are kept.")] | None = None
    compression_ratio: (
        Annotated[float, Meta(ge=0, lt=1, description="In place of budget_tokens: the share that is evicted.")] | None
    ) = None
    attention_mass: Annotated[float, Meta(gt=0, le=1, description="Of adaptive: the share that is kept.")] | None = None
    sink_tokens: Annotated[Count, Meta(description="First tokens that are kept.")] | None = None
    recent_tokens: Annotated[Count, Meta(description="Last tokens that are kept.")] | None = None
    after_tokens: Annotated[Count, Meta(description="Prompt tokens before the first eviction; default: all.")] | None = None
    gap: Annotated[float, Meta(gt=0, description="Of bounds: how far below the highest score a run is not read.")] | None = None


class SamplingFields(Body, kw_only=True):
    """Fields of both generating routes. Absent fields take the checkpoint's recommendation, else the API's default."""

    model: Annotated[Name, Meta(description="One of GET /v1/models.")]
    temperature: Annotated[float, Meta(ge=0, le=2, description="0 takes the most likely token.")] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKEN_ID, description="0 and -1: all tokens.")] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[dict[BiasedToken, Bias], Meta(max_length=MAX_BIASES, description="Token id to what its logit gains.")] | None
    ) = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=1 << 18)] | None = None
    bad_words: Annotated[list[StopString], Meta(max_length=256)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Annotated[Schema, Meta(description="The old name of structured_outputs.json.")] | None = None
    guided_regex: Annotated[str, Meta(description="The old name of structured_outputs.regex.")] | None = None
    guided_choice: Annotated[list[str], Meta(description="The old name of structured_outputs.choice.")] | None = None
    guided_grammar: Annotated[str, Meta(description="The old name of structured_outputs.grammar.")] | None = None
    guided_json_object: Annotated[bool, Meta(description="The old name of structured_outputs.json_object.")] | None = None
    guided_whitespace_pattern: Annotated[str, Meta(description="Of guided_json and response_format.")] | None = None
    guided_decoding_backend: (
        Annotated[Backend, Meta(description="Of guided_json and its like, and response_format.")] | None
    ) = None
    stop: Stop | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Meta(ge=1, description="Choices.")] | None = None
    min_tokens: Annotated[Count, Meta(description="What a constraint has completed ends all the same.")] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="-1: a random one.")] | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[Salt, Meta(description="Keeps the prefix cache of these requests apart.")] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: Count | None = None
    kv_compression: KvCompressionFields | None = None
    user: str | None = None

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        return {
            **refusals_of_others(cls.__struct_encode_fields__),
            "guided_decoding_backend": unless(
                *get_args(Backend), reason=f"unknown backend; it may be {', '.join(get_args(Backend))}"
            ),
        }

    def check(self) -> None:
        """Check stream fields, fields that need a complete response, and that the output has at most one constraint."""
        constraints = self.output_constraints
        if self.response_format is not None and not isinstance(self.response_format, TextFormat):
            constraints.append("response_format")
        if len(constraints) > 1:
            raise BodyError(f"{constraints[-1]}: cannot be used with {constraints[0]}", constraints[-1])
        for name, own in (("guided_whitespace_pattern", "whitespace_pattern"), ("guided_decoding_backend", "backend")):
            if self.structured_outputs is not None and getattr(self, name) is not None:
                raise BodyError(f"{name}: cannot be used with structured_outputs; use structured_outputs.{own}", name)
        if self.stream_options is not None and not self.stream:
            raise BodyError("stream_options: can only be used with stream true", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise BodyError("prompt_logprobs: are not part of a stream; leave stream out", "prompt_logprobs")

    def output_schemas(self) -> Iterator[tuple[str, object]]:
        """See Body."""
        if isinstance(self.response_format, JsonSchemaFormat):
            yield "response_format.json_schema.schema", self.response_format.json_schema.schema
        if self.structured_outputs is not None:
            yield "structured_outputs.json", self.structured_outputs.json
        yield "guided_json", self.guided_json

    @property
    def output_constraints(self) -> list[str]:
        """The names of the fields that constrain the output, except response_format."""
        return [
            name
            for name in ("structured_outputs", *(f"guided_{kind}" for kind in GUIDED_KINDS))
            if getattr(self, name) is not None and (name, self.guided_json_object) != ("guided_json_object", False)
        ]

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        """Whether every chunk of a stream reports the current usage."""
        return self.includes_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


ServiceTier = Annotated[
    Literal["auto", "default", "flex", "priority", "fast"],
    Meta(description="'priority' (or 'fast'): a larger share of a full server, where the key may; 'flex': after all others."),
]
SERVICE_TIERS = unless(
    *("auto", "default", "flex", "priority", "fast"),
    reason="may be 'auto', 'default', 'priority' (or 'fast') or 'flex' (after all other requests)",
)
