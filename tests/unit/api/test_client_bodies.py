"""Bodies as clients build them by themselves, each taken as it is: what it may name as ignored is stated beside it."""

from __future__ import annotations

import json

import pytest

from quire.api.anthropic.messages import MessagesRequest
from quire.api.decode import decode_body
from quire.api.openai.chat import ChatCompletionRequest
from quire.api.openai.completions import CompletionRequest
from quire.api.openai.embeddings import EmbeddingRequest
from quire.api.openai.responses import ResponsesRequest

USER = {"role": "user", "content": "hi"}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "c", "index": 0, "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT = {"model": "m", "messages": [USER], "stream": True, "stream_options": {"include_usage": True}}
EPHEMERAL = {"type": "ephemeral"}

BODIES = {
    "langchain": (
        ChatCompletionRequest,
        {
            **CHAT,
            "n": 1,
            "temperature": 0.7,
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "annotations": []},
                {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "4"}]},
            ],
        },
        ("messages[1].tool_calls[0].index", "messages[1].annotations"),
    ),
    "langchain-embeddings": (EmbeddingRequest, {"model": "m", "input": [[1, 2]], "encoding_format": "base64"}, ()),
    "llama-index": (
        ChatCompletionRequest,
        {
            **CHAT,
            "tools": [{"type": "function", "function": {**FUNCTION, "strict": False}}],
            "tool_choice": "auto",
            "user": "u",
        },
        (),
    ),
    "litellm": (
        ChatCompletionRequest,
        {**CHAT, "max_tokens": 5, "logit_bias": {}, "metadata": {"a": "b"}, "user": "u", "thinking": {"type": "disabled"}},
        (),
    ),
    "vercel-ai-sdk": (
        ChatCompletionRequest,
        {
            **CHAT,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"type": "object"}, "strict": True, "name": "response", "description": "d"},
            },
            "messages": [USER, {"role": "assistant", "content": "a", "reasoning_content": "r"}, USER],
        },
        (),
    ),
    "vercel-ai-sdk-responses": (
        ResponsesRequest,
        {
            "model": "m",
            "input": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
            "include": ["web_search_call.action.sources"],
            "tools": [{"type": "web_search"}, {"type": "function", **FUNCTION, "strict": False}],
            "tool_choice": "auto",
            "stream": True,
        },
        ("tools[0].web_search", "include[0].web_search_call.action.sources"),
    ),
    "openai-agents": (
        ResponsesRequest,
        {
            "model": "m",
            "input": [
                {"role": "user", "content": "hi"},
                {
                    "id": "m",
                    "type": "message",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}],
                },
            ],
            "include": [],
            "tools": [{"type": "function", **FUNCTION, "strict": True}],
            "prompt_cache_retention": None,
            "reasoning": None,
            "conversation": None,
            "truncation": None,
        },
        (),
    ),
    "open-webui": (
        ChatCompletionRequest,
        {**CHAT, "seed": 0, "stop": ["a"], "frequency_penalty": 0, "top_k": 40, "min_p": 0, "think": False, "keep_alive": "5m"},
        ("keep_alive",),
    ),
    "continue": (
        CompletionRequest,
        {
            "model": "m",
            "prompt": "def f(",
            "suffix": "",
            "max_tokens": 64,
            "stop": [f"stop {n}" for n in range(40)],
            "stream": True,
        },
        (),
    ),
    "continue-apply": (
        ChatCompletionRequest,
        {**CHAT, "prediction": {"type": "content", "content": "x"}},
        ("prediction",),
    ),
    "cline": (
        ChatCompletionRequest,
        {
            **CHAT,
            "temperature": 0,
            "max_tokens": -1,
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "s", "cache_control": EPHEMERAL}]},
                {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": EPHEMERAL}]},
            ],
        },
        ("messages[0].content[0].cache_control",),
    ),
    "llama.cpp-webui": (
        ChatCompletionRequest,
        {
            **CHAT,
            "cache_prompt": True,
            "timings_per_token": True,
            "return_progress": True,
            "reasoning_format": "auto",
            "mirostat": 0,
            "xtc_probability": 0,
            "dry_multiplier": 0,
            "dynatemp_range": 0,
            "typical_p": 1,
            "max_tokens": -1,
            "seed": -1,
        },
        ("cache_prompt", "timings_per_token", "return_progress"),
    ),
    "anthropic-sdk": (
        MessagesRequest,
        {
            "model": "m",
            "max_tokens": 1024,
            "messages": [USER],
            "tools": [
                {"name": "f", "input_schema": {"type": "object"}, "eager_input_streaming": True, "cache_control": EPHEMERAL}
            ],
            "tool_choice": {"type": "auto"},
            "temperature": 1,
            "stream": True,
        },
        ("tools[0].eager_input_streaming",),
    ),
}


@pytest.mark.parametrize("client", BODIES)
def test_body_of_a_client_is_taken_and_named_is_only_what_says_nothing_of_the_answer(client):
    kind, body, ignored = BODIES[client]
    assert decode_body(json.dumps(body).encode(), kind)[1] == ignored
