"""ServedModel: the parts of the loaded model that the HTTP process needs to make requests and to parse answers."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from quire.api.decode import MAX_IGNORED, shorten
from quire.base.errors import ModelFormatError
from quire.contracts.lora import LoRARequest
from quire.engine.request_factory import RequestFactory, RequestRules
from quire.serving.config import ServerConfig
from quire.serving.core.executor import TokenizerPool
from quire.serving.core.model_content import content_digest
from quire.serving.engine_client.messages import EngineInfo
from quire.text.parsing.detection import ParserChoice, detect_formats
from quire.text.parsing.formats import FALLBACK_TOOL_FORMAT, find_reasoning_format, find_tool_format, markers_of
from quire.text.tokenizer import Tokenizer, load_tokenizer

WILDCARD = "*"
LEAST_PROMPT_CHARACTERS = 1 << 20
CHARACTERS_PER_TOKEN = 16  # upper limit for a full context; prose and code have 3 to 5
_BYTES_PER_CHARACTER = 4  # of UTF-8; escapes have more, and are counted separately
_BYTES_BESIDE_PROMPT = 2 << 20  # fields, names and delimiters; text that templates omit


def _count_nothing(_output_format: str, _outcome: str) -> None:
    """Count nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The loaded model as the APIs see it. Thread-safe, except `preparation`, which belongs to the event loop.

    names             names for clients; "*" among them allows any name. Where the server was given none, the path or id that it
                      was started with is taken, too
    parsers           the formats of tool calls and reasoning in its output
    marker_token_ids  markers of the formats that are special tokens
    count_tool_output  called for every output parsed for tool calls, with the format and whether there were any
    template_variables  variables that the chat template reads; others have no effect
    longest_token_bytes  length of the longest token's text; bounds the text that a context can hold
    max_prompt_characters  of one prompt
    lora              the LoRA adapter of all its requests; None: it is the base model
    fingerprint       the API's system_fingerprint; changes with the weights, the precision or the server's version
    content           as of content_digest: equal where two servers give the same tokens
    """

    info: EngineInfo
    names: tuple[str, ...]
    tokenizer: Tokenizer | None
    factory: RequestFactory
    parsers: ParserChoice
    marker_token_ids: Mapping[str, int]
    fingerprint: str
    created_s: int
    preparation: TokenizerPool
    template_variables: frozenset[str] = frozenset()
    longest_token_bytes: int = 0
    max_prompt_characters: int = LEAST_PROMPT_CHARACTERS
    count_tool_output: Callable[[str, str], None] = _count_nothing
    has_default_name: bool = False
    content: str = ""
    lora: LoRARequest | None = None
    _indexes: itertools.count[int] = field(default_factory=itertools.count)
    _name: str = field(init=False)

    def __post_init__(self) -> None:
        # Cached, because finding out whether the checkpoint is a path reads the file system.
        name = next((name for name in self.names if name != WILDCARD), None)
        object.__setattr__(self, "_name", checkpoint_name(self.info) if name is None else name)

    def is_called(self, name: str) -> bool:
        """Return whether a client's name is one of the model's."""
        return name in self.names or (self.has_default_name and name == self.info.model)

    @property
    def max_chat_bytes(self) -> int:
        """The limit of a body with one prompt; a longer body is refused before it is read."""
        return self.max_prompt_characters * _BYTES_PER_CHARACTER + _BYTES_BESIDE_PROMPT

    @property
    def name(self) -> str:
        """The name of the model in answers."""
        return self._name

    @property
    def template_source(self) -> str:
        """The source of the chat template, "" if there is none."""
        template = None if self.tokenizer is None else self.tokenizer.chat_template
        return "" if template is None else template.source

    @property
    def reasons(self) -> bool:
        """Whether its output has reasoning in a known format."""
        return self.parsers.reasoning_format is not None

    def unused_variables(self, variables: Mapping[str, object] | None) -> tuple[str, ...]:
        """Return the paths of chat_template_kwargs that the chat template does not know."""
        unused = [name for name in variables or () if name not in self.template_variables]
        return tuple(f"chat_template_kwargs.{shorten(name, 64)}" for name in unused[:MAX_IGNORED])

    def with_lora(self, lora: LoRARequest) -> ServedModel:
        """Return the model whose requests have a LoRA adapter, under its name. Raises RequestError if the engine takes none."""
        return replace(self, names=(lora.lora_name,), has_default_name=False, factory=self.factory.with_lora(lora), lora=lora)

    def next_index(self) -> int:
        """Return the index of a new request: requests without a seed get theirs from it."""
        return next(self._indexes)


def checkpoint_name(info: EngineInfo) -> str:
    """Return the name of a checkpoint: the last part of a path, otherwise the name unchanged."""
    path = Path(info.model)
    return path.name if path.is_absolute() or info.model.startswith(".") or path.exists() else info.model


def load_served_model(info: EngineInfo, config: ServerConfig) -> ServedModel:
    """Load the tokenizer and detect the formats of the output. Takes up to seconds: do not call it on the event loop.

    Raises ModelFormatError for a damaged tokenizer, ConfigError for an unknown parser.
    """
    tokenizer = None if info.tokenizer_folder is None else load_tokenizer(Path(info.tokenizer_folder), info.chat_template)
    return make_served_model(info, config, tokenizer)


def make_served_model(info: EngineInfo, config: ServerConfig, tokenizer: Tokenizer | None) -> ServedModel:
    """Return the model with a tokenizer that is loaded already. Raises ConfigError for an unknown parser."""
    parsers = choose_parsers(tokenizer, config)
    names = config.served_model_names or (checkpoint_name(info),)
    rules = RequestRules(
        vocab_size=info.vocab_size,
        hidden_size=info.hidden_size,
        eos_token_ids=frozenset(info.eos_token_ids),
        seed=info.seed,
        max_logprobs=info.max_logprobs,
        scheduling_policy=info.scheduling_policy,
        max_model_len=info.max_model_len,
        pooler=info.pooler,
        enable_lora=info.enable_lora,
    )
    return ServedModel(
        info=info,
        names=names,
        has_default_name=not config.served_model_names,
        tokenizer=tokenizer,
        factory=RequestFactory(rules, tokenizer),
        parsers=parsers,
        marker_token_ids=_special_markers(tokenizer, parsers),
        fingerprint=_fingerprint(info),
        content=content_digest(info),
        created_s=int(time.time()),
        preparation=TokenizerPool(weight_of=config.weight_of),
        template_variables=_template_variables(tokenizer),
        longest_token_bytes=0 if tokenizer is None else _longest_token_bytes(tokenizer),
        max_prompt_characters=config.max_prompt_characters
        or max(CHARACTERS_PER_TOKEN * info.max_model_len, LEAST_PROMPT_CHARACTERS),
    )


def choose_parsers(tokenizer: Tokenizer | None, config: ServerConfig) -> ParserChoice:
    """Return the formats that the options select; "auto" detects them from the chat template, "none" gives None."""
    found = ParserChoice(None, None)
    if tokenizer is not None and tokenizer.chat_template is not None:
        found = detect_formats(tokenizer.chat_template.source, tokenizer.id_of)
    # A template that shows no tools known here, in a model for chats: see quire.serving.core.shown_tools.
    has_template = tokenizer is not None and tokenizer.chat_template is not None
    tool_format = found.tool_format or (FALLBACK_TOOL_FORMAT if has_template else None)
    chosen = ParserChoice(
        _choose(config.tool_call_parser, tool_format), _choose(config.reasoning_parser, found.reasoning_format)
    )
    find_tool_format(chosen.tool_format)
    find_reasoning_format(chosen.reasoning_format)
    return chosen


def _choose(option: str, found: str | None) -> str | None:
    return found if option == "auto" else None if option == "none" else option


def _special_markers(tokenizer: Tokenizer | None, parsers: ParserChoice) -> dict[str, int]:
    if tokenizer is None:
        return {}
    ids = {marker: tokenizer.id_of(marker) for marker in markers_of(parsers.tool_format, parsers.reasoning_format)}
    # Other tokens can also spell a marker that is an ordinary token, so only special tokens are recognised by their id.
    return {
        marker: token_id for marker, token_id in ids.items() if token_id is not None and token_id in tokenizer.special_token_ids
    }


def _longest_token_bytes(tokenizer: Tokenizer) -> int:
    return max(len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size))


def _template_variables(tokenizer: Tokenizer | None) -> frozenset[str]:
    template = None if tokenizer is None else tokenizer.chat_template
    try:
        return frozenset() if template is None else template.variables()
    except ModelFormatError:
        return frozenset()  # chats are refused with the template's error; completions work


def _fingerprint(info: EngineInfo) -> str:
    import quire

    parts = (quire.__version__, info.model, info.dtype, str(info.quantization), info.device, str(info.num_parameters))
    return f"fp_{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:12]}"
