"""Tool calls as the models' own templates render them, parsed back at every cut of their bytes and tokens.

What a template makes of an assistant's message with tool_calls is the format that the model was trained on. Qwen's templates
are rendered here, from shared/data. rendered_outputs.jsonl holds what others made of such messages: the chat templates of
Llama 3.1, DeepSeek R1, V3.1, V3.2 and V4, GLM-4.6 and 4.7, MiniMax M2, Kimi K2, Qwen3-Coder, Gemma 4, Command R7B and A+, and
mistral_common with its tokenizers v2, v3, v7 and Tekken.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.text.chat_template import ChatTemplate
from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.parsing.detection import detect_formats, starts_in_reasoning
from quire.text.parsing.events import fold
from quire.text.parsing.parser import OutputParser
from quire.text.token_streams import Utf8Stream
from tests.unit.text.conftest import shared
from tests.unit.text.parsing.outputs import TOOLS

RECORDED = [
    json.loads(line) for line in (Path(__file__).parent / "rendered_outputs.jsonl").read_text(encoding="utf-8").splitlines()
]
MESSAGES = {
    "one": ("", "", (("get_weather", {"city": "Paris", "days": 3}),)),
    "two": (
        "I look at it first.",
        "",
        (
            ("get_weather", {"city": "東京", "near": ["Zürich", "💨"], "options": {"fields": [{"a": None}, True], "days": -1}}),
            ("now", {}),
        ),
    ),
    "markers": (
        "",
        "The user <wants> rain.",
        (("get_weather", {"city": '</tool_call>\n"}]} \\ <tool_call>{"name": "now"}', "exact": False, "factor": 0.25}),),
    ),
}


def parse(pieces, tool_format, reasoning_format=None, starts=False):
    parser = OutputParser(tool_format=tool_format, reasoning_format=reasoning_format, tools=TOOLS, starts_in_reasoning=starts)
    found = fold([*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()])
    calls = [(call.name, json.loads(call.arguments)) for call in found.calls]
    return found.content.strip(), found.reasoning.strip(), calls


def texts_of(parts):
    """Return what each part of an output's bytes makes certain, and the rest."""
    stream = Utf8Stream(parts.__getitem__, strips_first_space=False)
    return [*(stream.push(number) for number in range(len(parts))), stream.finish()]


def byte_cuts(output):
    """Return the output cut into bytes, and in two at every byte."""
    data = output.encode()
    return [[data[i : i + 1] for i in range(len(data))], *([data[:i], data[i:]] for i in range(len(data) + 1))]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", RECORDED, ids=[f"{case['source']}-{number}" for number, case in enumerate(RECORDED)])
def test_recorded_message_comes_back_at_every_cut_of_its_bytes(case):
    expected = (case["content"], case.get("reasoning", ""), [(call["name"], call["arguments"]) for call in case["calls"]])
    formats = case["tool_format"], case.get("reasoning_format"), case.get("starts_in_reasoning", False)
    for parts in byte_cuts(case["output"]):
        assert parse(texts_of(parts), *formats) == expected, parts


def render(config, name, real_tokenizer):
    """Return (the prompt, what the template makes of the assistant's turn behind it, its source) by one of Qwen's templates."""
    tokenizer = real_tokenizer("qwen3")
    content, reasoning, calls = MESSAGES[name]
    source = json.loads(shared(f"tokenizers/qwen3/{config}").read_text(encoding="utf-8"))["chat_template"]
    template = ChatTemplate(source, {})
    tools = [{"type": "function", "function": {"name": tool.name, "parameters": {"type": "object"}}} for tool in TOOLS]
    asked = [{"role": "user", "content": "How is the weather?"}]
    called = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    answer = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": called}
    prompt = template.render(asked, add_generation_prompt=True, tools=tools)
    whole = template.render([*asked, answer], add_generation_prompt=False, tools=tools)
    begin = prompt.removesuffix("\n")  # the older template ends it with the line break of the first call
    assert whole.startswith(begin)
    return tokenizer, prompt, whole[len(begin) :].removesuffix("<|im_end|>\n"), source


@pytest.mark.covering
@pytest.mark.parametrize("config", ["tokenizer_config.json", "tokenizer_config.0.6b.json"])
@pytest.mark.parametrize("name", MESSAGES)
def test_message_of_qwens_template_comes_back_at_every_cut_of_its_bytes_and_tokens(config, name, real_tokenizer):
    tokenizer, prompt, output, source = render(config, name, real_tokenizer)
    formats = detect_formats(source, tokenizer.id_of)
    assert formats.tool_format == "hermes"
    content, reasoning, calls = MESSAGES[name]
    shown = reasoning if "reasoning_content" in source else ""  # the older template knows no reasoning
    expected = (content, shown, list(calls))
    starts = starts_in_reasoning(prompt, formats.reasoning_format)
    token_ids = tokenizer.encode(output, add_special_tokens=False)
    stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    by_token = [*(stream.append([token_id]) for token_id in token_ids), stream.finish()]
    assert "".join(by_token) == output
    for pieces in (by_token, *map(texts_of, byte_cuts(output))):
        assert parse(pieces, formats.tool_format, formats.reasoning_format, starts) == expected, pieces
