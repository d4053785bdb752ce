"""Conversion of Anthropic request bodies to the input of the neutral core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.api.anthropic.blocks import (
    AssistantBlock,
    AssistantMessage,
    TextBlock,
    Texts,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserBlock,
    UserMessage,
)
from quire.api.anthropic.messages import (
    MessagesRequest,
    PromptFields,
    ThinkingAdaptive,
    ThinkingEnabled,
    Tool,
    ToolChoiceAny,
    ToolChoiceNone,
    ToolChoiceTool,
)
from quire.base.errors import RequestError
from quire.serving.anthropic.thinking import ThinkingSigner, effort_of
from quire.serving.core.constraints import schema_constraint
from quire.serving.core.conversation import Conversation
from quire.serving.core.plan import ChatInput, GenerationOptions
from quire.serving.core.reasoning_effort import has_effort
from quire.serving.core.served_model import ServedModel

_RETENTION_S = {"5m": 300.0, "1h": 3600.0}
BILLING_HEADER = "x-anthropic-billing-header"  # a client's hash, new with every request: no prefix would be found again


def chat_input(served: ServedModel, body: PromptFields, signer: ThinkingSigner) -> ChatInput:
    """Return the conversation. Raises RequestError."""
    is_prefilled = isinstance(body.messages[-1], AssistantMessage)
    tools = [] if isinstance(body.tool_choice, ToolChoiceNone) else body.offered_tools
    return ChatInput(
        messages=messages_of(body, signer),
        tools=[_tool(tool) for tool in tools] or None,
        add_generation_prompt=not is_prefilled,
        continues_final_message=is_prefilled,
        reasoning_effort=effort_of(served.template_source, served.reasons, body.thinking, body.output_config),
        parallel_tool_calls=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        forced_tools=_forced_tools(body),
        strict_tools=frozenset(tool.name for tool in tools if tool.strict),
    )


def ignored_by_model(served: ServedModel, body: PromptFields) -> tuple[str, ...]:
    """Return the paths of the fields that have no effect with this model."""
    if has_effort(served.template_source):
        return ()
    has_level = body.output_config is not None and body.output_config.effort is not None
    is_ignored = {
        "thinking": isinstance(body.thinking, ThinkingEnabled) and not served.reasons,
        "output_config.effort": has_level,
    }
    return tuple(path for path, ignored in is_ignored.items() if ignored)


def _forced_tools(body: PromptFields) -> tuple[str, ...]:
    if isinstance(body.tool_choice, ToolChoiceTool):
        return (body.tool_choice.name,)
    return tuple(tool.name for tool in body.offered_tools) if isinstance(body.tool_choice, ToolChoiceAny) else ()


def message_options(body: MessagesRequest) -> GenerationOptions:
    """Return the options other than the conversation."""
    wanted = None if body.output_config is None else body.output_config.format
    sampling = {
        "constraint": None if wanted is None else schema_constraint(wanted.schema, "output_config.format.schema"),
        "max_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop_sequences,
    }
    has_display = isinstance(body.thinking, ThinkingEnabled | ThinkingAdaptive)
    is_omitted = has_display and body.thinking.display == "omitted"  # type: ignore[union-attr]
    return GenerationOptions(
        sampling=sampling, cache_retention_s=cache_retention_s(body), shows_reasoning=not is_omitted, wants_start=True
    )


def cache_retention_s(body: PromptFields) -> float:
    """Return for how many seconds the marks with cache_control ask to keep the prompt: the longest of them, 0 without any."""
    contents = [body.system, *(message.content for message in body.messages)]
    blocks: list[object] = [body, *(body.tools or ())]
    for content in contents:
        for block in () if content is None or isinstance(content, str) else content:
            blocks.append(block)
            if isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                blocks += block.content
    marks = [mark for block in blocks if (mark := getattr(block, "cache_control", None)) is not None]
    return max((_RETENTION_S[mark.ttl or "5m"] for mark in marks), default=0.0)


def messages_of(body: PromptFields, signer: ThinkingSigner) -> list[dict[str, Any]]:
    """Return the messages for a chat template. Raises RequestError for a tool result without its call."""
    conversation = Conversation(joins_users=True)
    system = [text for text in _texts(body.system) if not text.startswith(BILLING_HEADER)]
    if system:
        conversation.say("system", system)
    for index, message in enumerate(body.messages):
        if isinstance(message, UserMessage):
            _add_user(conversation, message.content, f"messages[{index}]")
        elif isinstance(message, AssistantMessage):
            _add_assistant(conversation, message.content, signer)
        else:
            conversation.say("system", _texts(message.content))
    return conversation.messages


def _add_user(conversation: Conversation, content: str | Sequence[UserBlock], where: str) -> None:
    texts: list[str] = [content] if isinstance(content, str) else []
    has_results = False
    for position, block in enumerate(() if isinstance(content, str) else content):
        if isinstance(block, TextBlock):
            texts.append(block.text)
            continue
        if texts:
            conversation.say("user", texts)
            texts = []
        has_results = True
        _add_result(conversation, block, f"{where}.content[{position}]")
    if texts or not has_results:
        conversation.say("user", texts)


def _add_result(conversation: Conversation, block: ToolResultBlock, where: str) -> None:
    if not conversation.knows_call(block.tool_use_id):
        raise RequestError(
            f"{where}.tool_use_id: no tool_use block before it has the id {block.tool_use_id[:100]!r}", f"{where}.tool_use_id"
        )
    texts = _texts(block.content)
    if block.is_error:
        texts = [f"Error: {texts[0]}", *texts[1:]] if texts else ["Error"]
    conversation.result(block.tool_use_id, texts)


def _add_assistant(conversation: Conversation, content: str | Sequence[AssistantBlock], signer: ThinkingSigner) -> None:
    conversation.answer([content] if isinstance(content, str) else [])
    for block in () if isinstance(content, str) else content:
        if isinstance(block, TextBlock):
            conversation.answer([block.text])
        elif isinstance(block, ToolUseBlock):
            conversation.call(block.id, block.name, block.input)
        elif isinstance(block, ThinkingBlock) and signer.is_own(block.thinking, block.signature):
            conversation.reason(block.thinking)


def _texts(content: Texts | None) -> list[str]:
    if content is None:
        return []
    return [content] if isinstance(content, str) else [block.text for block in content]


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": {**function, "parameters": tool.input_schema or {}}}
