"""Chats with a model that says what a test wants, and what a client makes of a stream."""

from __future__ import annotations

import json

from tests.unit.serving.fakes import TOOL_TEMPLATE, FakeGateway, make_context, make_served, text_script
from tests.unit.serving.openai.asking import ask_chat

PLAIN = make_served()
TOOLED = make_served(TOOL_TEMPLATE)
TOKENIZER = PLAIN.tokenizer
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é\\n"}}\n</tool_call>'
ARGUMENTS = '{"a": "é\\n"}'


def context(script, served=PLAIN, **gateway):
    return make_context(FakeGateway(script, **gateway), served)


def say(*texts, served=PLAIN, gateway=None, **options):
    return context(text_script(TOKENIZER, *texts, **options), served, **(gateway or {}))


def params_of(where):
    return where.gateway.jobs[0].request.params


def whole(where, **body):
    return json.loads(ask_chat(where, **body))


def fold_stream(chunks):
    """Add a stream up by hand, as a client does."""
    choices: dict[int, dict] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if "role" in delta:
                assert choice["index"] not in choices
                choices[choice["index"]] = {"content": delta["content"], "calls": {}, "logprobs": [], "end": None}
            found = choices[choice["index"]]
            assert found["end"] is None
            for name in ("content", "reasoning_content"):
                if "role" not in delta and name in delta:
                    found[name] = (found.get(name) or "") + delta[name]
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(found["calls"])
                    found["calls"][call["index"]] = [call["function"]["name"], ""]
                found["calls"][call["index"]][1] += call["function"]["arguments"]
            logprobs = choice["logprobs"]
            if logprobs is not None:
                joined = b"".join(bytes(entry["bytes"]) for entry in logprobs["content"])
                assert joined.decode() == delta["content"]
                found["logprobs"] += logprobs["content"]
            found["end"] = choice["finish_reason"]
    return [choices[index] for index in sorted(choices)]
