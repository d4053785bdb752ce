"""ServedModel: all that the HTTP process needs of the loaded model to make requests and to read answers."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quire.engine.request_factory import RequestFactory, RequestRules
from quire.serving.config import ServerConfig
from quire.serving.generation.executor import Preparation
from quire.serving.link.messages import EngineInfo
from quire.text.parsing.detection import ParserChoice, detect_formats
from quire.text.parsing.formats import find_reasoning_format, find_tool_format, markers_of
from quire.text.tokenizer import Tokenizer, load_tokenizer

WILDCARD = "*"


def _count_nothing(_output_format: str, _outcome: str) -> None:
    """Count nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The loaded model as the APIs see it. Safe to share between threads, but for `preparation`, which is the event loop's.

    names             what clients may call it; "*" among them allows any name
    parsers           the formats of tool calls and reasoning in its output
    marker_token_ids  markers of the formats that are special tokens
    count_tool_output  told, with the format, of every output read for tool calls and whether there were any
    fingerprint       changes with the weights, the precision or the server's version: the API's system_fingerprint
    """

    info: EngineInfo
    names: tuple[str, ...]
    tokenizer: Tokenizer | None
    factory: RequestFactory
    parsers: ParserChoice
    marker_token_ids: Mapping[str, int]
    fingerprint: str
    created_s: int
    preparation: Preparation
    count_tool_output: Callable[[str, str], None] = _count_nothing
    _indexes: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def name(self) -> str:
        """What answers call the model."""
        return next((name for name in self.names if name != WILDCARD), checkpoint_name(self.info))

    @property
    def template_source(self) -> str:
        """The source of the chat template, "" where there is none."""
        template = None if self.tokenizer is None else self.tokenizer.chat_template
        return "" if template is None else template.source

    def next_index(self) -> int:
        """Return the index of a new request: requests without a seed get theirs from it."""
        return next(self._indexes)


def checkpoint_name(info: EngineInfo) -> str:
    """Return what a checkpoint is called: the last part of a path to one, else its name as it is."""
    path = Path(info.model)
    return path.name if path.is_absolute() or info.model.startswith(".") or path.exists() else info.model


def load_served_model(info: EngineInfo, config: ServerConfig) -> ServedModel:
    """Load the tokenizer and find the formats of the output. Takes up to seconds: call it off the event loop.

    Raises ModelFormatError for a damaged tokenizer, ConfigError for an unknown parser.
    """
    tokenizer = None if info.tokenizer_folder is None else load_tokenizer(Path(info.tokenizer_folder))
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
    )
    return ServedModel(
        info=info,
        names=names,
        tokenizer=tokenizer,
        factory=RequestFactory(rules, tokenizer),
        parsers=parsers,
        marker_token_ids=_special_markers(tokenizer, parsers),
        fingerprint=_fingerprint(info),
        created_s=int(time.time()),
        preparation=Preparation(),
    )


def choose_parsers(tokenizer: Tokenizer | None, config: ServerConfig) -> ParserChoice:
    """Return the formats that the options name, for "auto" those of the chat template, for "none" None."""
    found = ParserChoice(None, None)
    if tokenizer is not None and tokenizer.chat_template is not None:
        found = detect_formats(tokenizer.chat_template.source, tokenizer.id_of)
    chosen = ParserChoice(
        _choose(config.tool_call_parser, found.tool_format), _choose(config.reasoning_parser, found.reasoning_format)
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
    # A marker that is one ordinary token may also be spelled by others, so only special tokens are told by their id.
    return {
        marker: token_id for marker, token_id in ids.items() if token_id is not None and token_id in tokenizer.special_token_ids
    }


def _fingerprint(info: EngineInfo) -> str:
    import quire

    parts = (quire.__version__, info.model, info.dtype, str(info.quantization), info.device, str(info.num_parameters))
    return f"fp_{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:12]}"
