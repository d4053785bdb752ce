from __future__ import annotations

import pytest

from quire.text.parsing.detection import ParserChoice, detect_formats, starts_in_call, starts_in_reasoning
from quire.text.parsing.formats import REASONING_FORMATS, TOOL_FORMATS, markers_of


def no_token(token):
    return None


@pytest.mark.parametrize(
    ("source", "tool_format", "reasoning_format"),
    [
        ("{{ messages }}", None, None),
        ("<tool_call>\\n{{ tool_call.name }}</tool_call>", "hermes", None),
        ("</think><tool_call><function={{ f }}><parameter={{ k }}>", "qwen3_coder", "qwen3"),
        ("</think><arg_key></arg_key>\n<arg_value><tool_call>", "glm45", "glm45"),
        ("</think><arg_key></arg_key><arg_value><tool_call>", "glm47", "glm45"),
        ("</think><response><minimax:tool_call><invoke name=", "minimax_m2", "minimax_m2"),
        ("{% set mark = ']<]minimax[>[' %}<tool_call>", "json", None),
        ("[TOOL_CALLS]{{ name }}[ARGS]", "mistral", None),
        ("[THINK][/THINK][TOOL_CALLS]", "mistral", "mistral"),
        ("<｜Assistant｜></think><｜tool▁call▁begin｜>x<｜tool▁sep｜>y```json", "deepseek_v3", "deepseek_r1"),
        ("<｜tool▁call▁begin｜>x<｜tool▁sep｜>y", "deepseek_v31", None),
        ("<|tool_call_begin|><|tool_call_argument_begin|>", "kimi_k2", None),
        ("{% set dsml = '｜DSML｜' %}<think></think>", "deepseek_v32", "qwen3"),
        ("{% set dsml = '｜DSML｜' %}{{ dsml + 'tool_calls>' }}<think></think>", "deepseek_v4", "qwen3"),
        ("<start_of_turn>model<start_function_call>call:", "functiongemma", None),
        (">>>${recipient}\n${content}<|start_header_id|>", "functionary_v3", None),
        ("<function=example>{}</function><|start_header_id|><|python_tag|>", "functionary_v31", None),
        ("<|start_header_id|><|python_tag|>", "llama3_json", None),
        ("<|channel|>analysis<|message|>functions.", "openai", "openai_gptoss"),
        ("<|tool_call>call:<tool_call|><|channel>thought", "gemma4", "gemma4"),
        ("<|START_ACTION|><|START_THINKING|><|START_TEXT|>", "cohere_command4", "cohere_command4"),
        ("<|START_ACTION|><|START_RESPONSE|>", "cohere_command3", "cohere_command3"),
        ("</think><seed:think><seed:tool_call><function=<parameter=", "seed_oss", "seed_oss"),
        ("<tool_calls><tool_call>{{ f }}<tool_sep><arg_key><arg_value></think>", "hy_v3", "hy_v3"),
        ("<longcat_think><longcat_tool_call>", "longcat", "longcat"),
        ("<think></think><response><tool_call>", "ernie45", "ernie45"),
        ("<think></think><answer><tool_calls>", "hunyuan_a13b", "hunyuan_a13b"),
        ("<functions><function_calls><think></think>", "olmo3", "qwen3"),
        ("<｜tool_calls_begin｜><steptml:invoke", "step3", None),
        ("<|bom|><tool_calls>", "jamba", None),
    ],
)
def test_formats_are_found_by_the_markers_of_the_template(source, tool_format, reasoning_format):
    assert detect_formats(source, no_token) == ParserChoice(tool_format, reasoning_format)


def test_every_detected_name_is_in_a_table():
    from quire.text.parsing import detection

    assert {name for name, _ in detection._TOOL_MARKERS} <= set(TOOL_FORMATS)
    assert {name for name, _ in detection._REASONING_MARKERS} <= set(REASONING_FORMATS)


def test_real_template_is_recognised(shared_path):
    import json

    config = json.loads(shared_path("tokenizers/qwen3/tokenizer_config.json").read_text())
    assert detect_formats(config["chat_template"], no_token) == ParserChoice("hermes", "qwen3")


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\nhalf a thought", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>user\nwhat is <think><|im_end|>\n<|im_start|>assistant\n", False),
        ("user: what is <think> good for?", False),
        ("anything<think>\n", True),
        ("", False),
    ],
)
def test_reasoning_is_open_when_the_prompt_leaves_it_open(tail, expected):
    assert starts_in_reasoning(tail, "qwen3") is expected
    assert starts_in_reasoning(tail, None) is False


def test_reasoning_that_a_prompt_of_gemma_closes_is_not_open():
    turn = "<|turn>model\n<|channel>thought\n"
    assert starts_in_reasoning(turn, "gemma4")
    assert not starts_in_reasoning(f"{turn}<channel|>", "gemma4")
    assert not starts_in_reasoning("<|turn>user\nsay <|channel>thought<turn|>\n<|turn>model\n", "gemma4")


def test_harmony_reasoning_is_open_when_the_channel_is():
    assert starts_in_reasoning("<|start|>assistant<|channel|>analysis<|message|>well", "openai_gptoss")
    assert not starts_in_reasoning("<|start|>assistant", "openai_gptoss")


def test_markers_of_formats_are_listed_once():
    assert markers_of("hermes", "qwen3") == ("<tool_call>", "</tool_call>", "<think>", "</think>")


def test_a_call_is_begun_when_the_prompt_of_such_a_format_ends_with_its_opener():
    assert starts_in_call("assistant<|end_header_id|>\n\n>>>", "functionary_v3")
    assert not starts_in_call("assistant<|end_header_id|>\n\n", "functionary_v3")
    assert not starts_in_call("<tool_call>", "hermes")
    assert not starts_in_call(">>>", None)
