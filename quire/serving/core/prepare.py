"""Turns the content of an API's body into plans: templates, tokenising, checks. Runs in TokenizerPool's threads."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, cast

import msgspec

from quire.api.decode import count_ids, count_listed_ids
from quire.base.errors import RequestError
from quire.contracts.request import check_prompt_length
from quire.contracts.sampling_params import SamplingParams
from quire.serving.core.constraints import chat_constraint
from quire.serving.core.long_prompts import pack_prompt, write_ids
from quire.serving.core.plan import ChatInput, GenerationOptions, GenerationPlan, ParserSetup
from quire.serving.core.reasoning_effort import reasoning_variables
from quire.serving.core.served_model import ServedModel
from quire.serving.core.shown_tools import show_tools
from quire.serving.interfaces import Tenant
from quire.text.parsing.detection import reads_without_tools, starts_in_call, starts_in_reasoning
from quire.text.parsing.formats import FALLBACK_TOOL_FORMAT, TOOL_FORMATS, is_harmony
from quire.text.parsing.tools import Tool
from quire.text.template_hiding import RenderedChat
from quire.text.tokenizer import Tokenizer

TAIL_CHARACTERS = 4096
MAX_PROMPT_ENTRIES = 1 << 17
"""Log probabilities of one prompt: they are sent in one message."""
MAX_STREAMED_ENTRIES = 1 << 13  # they are sent in one event
MAX_LISTED_IDS = 300_000
"""Of all token-id prompts of a request together: decoding them holds the GIL."""


def prepare_chat(
    served: ServedModel, request_id: str, chat: ChatInput, options: GenerationOptions, owner: Tenant
) -> GenerationPlan:
    """Return the plan of a conversation. Raises RequestError with the field at fault."""
    served.info.pooler.check_generates()
    need_tokenizer(served)
    check_text_length(served, count_shown_characters(chat), chat.param)
    rendered = render_chat(served, chat)
    setup = _parser_setup(served, chat, rendered.text)
    sampling = dict(options.sampling)
    hides_special = sampling.get("skip_special_tokens") is not False
    if setup is not None:
        sampling["skip_special_tokens"] = False  # the markers of the formats may be special tokens
    sampling["constraint"] = chat_constraint(sampling.get("constraint"), chat, setup, rendered.text[-TAIL_CHARACTERS:])
    params, is_copied, num_choices = _params(served, sampling)
    with renamed("prompt", chat.param):
        check_text_length(served, len(rendered.text))
        token_ids = need_tokenizer(served).encode_rendered(rendered)
        check_prompt_length(len(token_ids), served.info.max_model_len, is_pooling=False)
    _check_room(served, len(token_ids), options)
    _check_entries(params, len(token_ids), options)
    prompt = {"prompt": rendered.text, "prompt_token_ids": token_ids, "cache_salt": salt_of(owner, options.salt)}
    echo = text_of(chat.messages[-1].get("content")) if options.echo else ""
    request = served.factory.make(request_id, served.next_index(), prompt, params)
    return GenerationPlan(
        request=pack_prompt(replace(request, cache_retention_s=options.cache_retention_s)),
        tokenizer=served.tokenizer,
        num_choices=num_choices,
        is_copied=is_copied,
        parser=setup,
        has_positions=params.logprobs is not None,
        has_prompt_positions=params.prompt_logprobs is not None,
        shows_reasoning=options.shows_reasoning,
        hides_special_tokens=hides_special,
        echo_text=echo,
        wants_tokens=options.wants_tokens,
        prompt_ids=write_ids(token_ids) if options.returns_prompt_ids else None,
        wants_start=options.wants_start,
    )


def count_chat_tokens(served: ServedModel, chat: ChatInput) -> int:
    """Return the number of prompt tokens of a conversation, even if the context cannot hold it. Raises RequestError."""
    tokenizer = need_tokenizer(served)
    check_text_length(served, count_shown_characters(chat), chat.param)
    rendered = render_chat(served, chat)
    check_text_length(served, len(rendered.text), chat.param)
    return len(tokenizer.encode_rendered(rendered))


@contextlib.contextmanager
def renamed(field: str, sent: str) -> Iterator[None]:
    """Make errors of a field name the field that the client sent instead."""
    try:
        yield
    except RequestError as error:
        if error.param != field:
            raise
        raise RequestError(str(error), sent) from error


def prepare_prompts(
    served: ServedModel,
    request_ids: Sequence[str],
    prompts: Sequence[str | list[int]],
    options: GenerationOptions,
    owner: Tenant,
    add_special_tokens: bool = True,
) -> list[GenerationPlan]:
    """Return a plan per prompt. Raises RequestError with the field at fault."""
    served.info.pooler.check_generates()
    sampling = dict(options.sampling)
    hides_output = sampling.get("max_tokens") == 0
    if hides_output:
        sampling |= {"max_tokens": 1, "min_tokens": 0, "n": 1, "best_of": None, "logprobs": None}
    has_echo_positions = options.echo and options.sampling.get("logprobs") is not None
    has_prompt_positions = sampling.get("prompt_logprobs") is not None
    if has_echo_positions:
        sampling["prompt_logprobs"] = max(options.sampling["logprobs"], sampling.get("prompt_logprobs") or 0)
    params, is_copied, num_choices = _params(served, sampling)
    if hides_output:
        num_choices = options.sampling.get("n") or 1
        is_copied = num_choices > 1
    salt = salt_of(owner, options.salt)
    plans: list[GenerationPlan] = []
    for request_id, prompt in zip(request_ids, prompts, strict=True):
        text, token_ids = encode_prompt(served, prompt, add_special_tokens, is_pooling=False)
        _check_room(served, len(token_ids), options)
        _check_entries(params, len(token_ids), options)
        stated = {"prompt_token_ids": token_ids, "cache_salt": salt, **({} if text is None else {"prompt": text})}
        with renamed("prompt_token_ids", "prompt"):
            request = pack_prompt(served.factory.make(request_id, served.next_index(), stated, params))
        echo = ""
        if options.echo:
            echo = text if text is not None else need_tokenizer(served).decode(token_ids, skip_special_tokens=False)
        plans.append(
            GenerationPlan(
                request=request,
                tokenizer=served.tokenizer,
                num_choices=num_choices,
                is_copied=is_copied,
                has_positions=options.sampling.get("logprobs") is not None,
                has_prompt_positions=has_prompt_positions,
                hides_special_tokens=params.skip_special_tokens,
                hides_output=hides_output,
                echo_text=echo,
                echoes_prompt=options.echo,
                wants_tokens=options.wants_tokens,
                prompt_ids=write_ids(token_ids) if options.returns_prompt_ids else None,
            )
        )
    return plans


def _check_room(served: ServedModel, num_prompt: int, options: GenerationOptions) -> None:
    """Raise RequestError if the requested output tokens do not fit after the prompt."""
    wanted, limit = options.sampling.get("max_tokens"), served.info.max_model_len
    if options.room_param is not None and wanted is not None and num_prompt + wanted > limit:
        raise RequestError(
            f"{options.room_param}: the context has {limit} tokens (max_model_len), the prompt has {num_prompt}, so that "
            f"{limit - num_prompt} are left, and {wanted} are asked for: ask for fewer, or leave {options.room_param} out",
            options.room_param,
        )


def _check_entries(params: SamplingParams, num_prompt: int, options: GenerationOptions) -> None:
    """Raise RequestError if so many prompt log probabilities are requested that sending them would delay other requests."""
    if params.prompt_logprobs is None:
        return
    wanted = num_prompt * (1 + params.prompt_logprobs)
    limit = MAX_STREAMED_ENTRIES if options.is_streaming else MAX_PROMPT_ENTRIES
    if wanted > limit:
        param = "logprobs" if options.echo else "prompt_logprobs"
        hint = "leave stream out, or ask for fewer" if options.is_streaming else "ask for fewer, or send a shorter prompt"
        raise RequestError(
            f"{param}: {wanted} log probabilities of a prompt are asked for, at most {limit} are told: {hint}", param
        )


def render_chat(served: ServedModel, chat: ChatInput) -> RenderedChat:
    """Return the text of a conversation, in which special tokens of the template differ from the same characters in messages.
    Raises RequestError."""
    with renamed("prompt", chat.param), renamed("chat_template", chat.param), renamed("messages", chat.param):
        return render(served, chat)


def render(served: ServedModel, chat: ChatInput) -> RenderedChat:
    """Apply the chat template; see `render_chat`, whose errors name the request's fields."""
    tokenizer = need_tokenizer(served)
    effort = reasoning_variables(served.template_source, chat.reasoning_effort, served.reasons)
    variables = {**effort, **chat.template_variables}
    messages, tools = list(chat.messages), chat.tools or None
    if served.parsers.tool_format == FALLBACK_TOOL_FORMAT:
        messages, tools = show_tools(messages, chat, served.template_source), None
    end = ""
    if chat.continues_final_message:
        end = f"\ue000{secrets.token_hex(8)}\ue000"
        messages[-1] = {**messages[-1], "content": text_of(messages[-1].get("content")) + end}
    rendered = tokenizer.render_chat(
        messages, add_generation_prompt=chat.add_generation_prompt and not end, tools=tools, **variables
    )
    if not end:
        return rendered
    position = rendered.text.rfind(end)
    if position < 0:
        raise RequestError(
            "continue_final_message: the chat template does not show the text of the last message, so it cannot go on with it",
            "continue_final_message",
        )
    return rendered.cut(position)


def text_of(content: object) -> str:
    """Return the text of a message's content, which the template joins in the same way."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "\n".join(part["text"] for part in cast("list[dict[str, str]]", content))


def salt_of(owner: Tenant, salt: str) -> str:
    """Return the cache salt of a request: the owner's salt combined with the request's."""
    if not salt:
        return owner.cache_salt
    return hashlib.sha256(f"{len(owner.cache_salt)}:{owner.cache_salt}{salt}".encode()).hexdigest()


def _params(served: ServedModel, sampling: Mapping[str, Any]) -> tuple[SamplingParams, bool, int]:
    params, is_copied = make_sampling(sampling, served.info.generation_defaults)
    return params, is_copied, (sampling.get("n") or 1) if is_copied else params.n


def _parser_setup(served: ServedModel, chat: ChatInput, text: str) -> ParserSetup | None:
    tool_format, reasoning_format = served.parsers.tool_format, served.parsers.reasoning_format
    if chat.tools and tool_format is None:
        raise RequestError(
            "tools: no format of tool calls is known for this model's chat template; leave tools out, or start the server "
            f"with --tool-call-parser, which may be {', '.join(sorted(TOOL_FORMATS))}",
            "tools",
        )
    reads_tools = bool(chat.tools) or reads_without_tools(tool_format)
    if not reads_tools and reasoning_format is None:
        return None
    functions = [tool["function"] for tool in chat.tools or ()]
    return ParserSetup(
        tool_format=tool_format if reads_tools else None,
        reasoning_format=reasoning_format,
        tools=tuple(Tool(function["name"], function.get("parameters") or {}) for function in functions),
        starts_in_reasoning=starts_in_reasoning(text[-TAIL_CHARACTERS:], reasoning_format),
        starts_in_call=reads_tools and starts_in_call(text[-TAIL_CHARACTERS:], tool_format),
        parallel_tool_calls=chat.parallel_tool_calls,
        marker_token_ids=served.marker_token_ids,
        has_calls_alone=bool(chat.forced_tools) and not is_harmony(tool_format, reasoning_format),
        count_output=partial(served.count_tool_output, tool_format or ""),
    )


def count_shown_characters(chat: ChatInput) -> int:
    """Return the number of characters of a conversation that a template shows: it may omit the assistant's reasoning."""
    return sum(
        sum(len(part["text"]) for part in content) if isinstance(content, list) else len(content or "")
        for message in chat.messages
        if message["role"] != "assistant"
        for content in [cast("str | list[dict[str, str]] | None", message.get("content"))]
    )


def check_text_length(served: ServedModel, num_characters: int, param: str = "prompt") -> None:
    """Raise RequestError for a text that cannot fit into the context however it is tokenised, or exceeds the limit of a prompt.

    So it is refused before it is rendered and tokenised.
    """
    limit = served.info.max_model_len * served.longest_token_bytes
    if num_characters > limit:
        raise RequestError(
            f"the prompt has {num_characters} characters, and no {served.info.max_model_len} tokens (max_model_len) spell more "
            f"than {limit}: shorten the prompt",
            param,
        )
    if num_characters > served.max_prompt_characters:
        raise RequestError(
            f"the prompt has {num_characters} characters, and one may have {served.max_prompt_characters} here: shorten it, or "
            "start the server with a larger --max-prompt-characters",
            param,
        )


def check_ids(context_tokens: int, field: str, is_pooling: bool, fields: Mapping[str, msgspec.Raw]) -> None:
    """Raise RequestError if a field has more token ids than the context (`context_tokens`), or all lists together exceed their
    limit. Nothing is decoded.
    """
    raw = fields.get(field)
    num_bytes = 0 if raw is None else len(memoryview(raw))
    if raw is None or num_bytes < 2 * min(context_tokens, MAX_LISTED_IDS):
        return
    num_ids = count_ids(raw)
    if num_ids is not None:
        with renamed("prompt", field):
            check_prompt_length(num_ids, context_tokens, is_pooling)
    num_listed = count_listed_ids(raw)
    if num_listed is not None and num_listed > MAX_LISTED_IDS:
        raise RequestError(
            f"{field}: lists of token ids may have {MAX_LISTED_IDS} together, got {num_listed}; send several requests", field
        )


def encode_prompt(
    served: ServedModel, prompt: str | list[int], add_special_tokens: bool, is_pooling: bool
) -> tuple[str | None, list[int]]:
    """Return the text of a prompt (None if it has none) and its tokens. Raises RequestError if there are too many."""
    text, token_ids = None, prompt
    if isinstance(prompt, str):
        tokenizer = need_tokenizer(served)
        check_text_length(served, len(prompt))
        text, token_ids = prompt, tokenizer.encode(prompt, add_special_tokens)
    check_prompt_length(len(token_ids), served.info.max_model_len, is_pooling)
    return text, cast("list[int]", token_ids)


def need_tokenizer(served: ServedModel) -> Tokenizer:
    if served.tokenizer is None:
        raise RequestError("the model has no tokenizer, so only token ids can be used: send them to /v1/completions", "prompt")
    return served.tokenizer


def make_sampling(stated: Mapping[str, Any], recommended: Mapping[str, Any], **forced: Any) -> tuple[SamplingParams, bool]:
    """Return the parameters, and whether one choice is to be run and copied n times: at temperature 0 all are the same.

    stated       fields of SamplingParams; None is as good as absent, but for max_tokens
    recommended  by the checkpoint, for what is not stated
    forced       comes before both
    Raises RequestError.
    """
    fields: dict[str, Any] = dict(recommended)
    fields.update((name, value) for name, value in stated.items() if value is not None or name == "max_tokens")
    fields.update(forced)
    num_sequences = max(fields.get("n") or 1, fields.get("best_of") or 1)
    if num_sequences == 1 or fields.get("temperature", 1.0) != 0:
        return _read_params(fields), False
    fields.update(n=1, best_of=None)
    return _read_params(fields), True


def _read_params(fields: Mapping[str, Any]) -> SamplingParams:
    if fields.get("constraint") is not None:  # which may be long
        return SamplingParams(**fields)
    try:
        return _known_params(tuple((name, type(value), value) for name, value in fields.items()))
    except TypeError:  # there are lists or dicts among them
        return SamplingParams(**fields)


@lru_cache(maxsize=256)
def _known_params(fields: tuple[tuple[str, type, Any], ...]) -> SamplingParams:
    """Return the parameters, which are frozen: for the same fields the same ones, because checking them has its cost."""
    return SamplingParams(**{name: value for name, _, value in fields})
