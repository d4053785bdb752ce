"""Detects a model's formats from its chat template, and whether a prompt ends inside of reasoning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.text.parsing.formats import FALLBACK_TOOL_FORMAT, find_reasoning_format, find_tool_format


@dataclass(frozen=True, slots=True)
class ParserChoice:
    """Names of formats, None if none matches."""

    tool_format: str | None
    reasoning_format: str | None


# In this order: the first row whose markers are all in the template (or, if none is, among the tokens) is used.
_TOOL_MARKERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>", "<|message|>", "functions.")),
    ("kimi_k2", ("<|tool_call_begin|>", "<|tool_call_argument_begin|>")),
    ("deepseek_v4", ("｜DSML｜", "tool_calls>")),
    ("deepseek_v32", ("｜DSML｜",)),
    ("functiongemma", ("<start_function_call>",)),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("cohere_command4", ("<|START_ACTION|>", "<|START_TEXT|>")),
    ("cohere_command3", ("<|START_ACTION|>",)),
    ("apertus", ("<|tools_prefix|>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("step3", ("<steptml:invoke",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("internlm", ("<|action_start|>", "<|plugin|>")),
    ("nemotron_json", ("<TOOLCALL>",)),
    ("gigachat3", ("function call<|role_sep|>",)),
    ("gigachat3", ("<|function_call|>", "<|role_sep|>")),
    ("hy_v3", ("<tool_sep",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("functionary_v3", (">>>all",)),
    ("functionary_v3", (">>>${recipient}",)),
    ("functionary_v31", ("<function=", "<|start_header_id|>")),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>")),
    ("minimax_m2", ("<minimax:tool_call>", "<invoke name=")),
    ("minimax_m2", ("<minimax:tool_call>",)),
    (FALLBACK_TOOL_FORMAT, ("]<]minimax[>[",)),  # of MiniMax M3, whose own format is not parsed
    ("glm47", ("</arg_key><arg_value>",)),
    ("glm45", ("<arg_key>", "<arg_value>")),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("granite", ("<|tool_call|>",)),
    ("phi4_mini_json", ("<|tool|>", "<|/tool|>")),
    ("llama4_pythonic", ("<|python_start|>",)),
    ("llama4_pythonic", ("<|header_start|>", "[func_name1(")),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters"')),
    ("minimax", ("<tool_calls>", "<beginning_of_sentence>")),
    ("jamba", ("<tool_calls>", "<|bom|>")),
    ("hunyuan_a13b", ("<tool_calls>",)),
    ("ernie45", ("<tool_call>", "<response>", "</think>")),
    ("olmo3", ("<function_calls>",)),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("[func_name1(",)),
)
_REASONING_MARKERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai_gptoss", ("<|channel|>", "<|message|>", "analysis")),
    ("mistral", ("[THINK]",)),
    ("seed_oss", ("<seed:think>",)),
    ("gemma4", ("<|channel>",)),
    ("cohere_command4", ("<|START_THINKING|>", "<|START_TEXT|>")),
    ("cohere_command3", ("<|START_THINKING|>",)),
    ("cohere_command3", ("<|START_RESPONSE|>",)),
    ("apertus", ("<|inner_prefix|>",)),
    ("longcat", ("<longcat_think>",)),
    ("granite", ("Here is my thought process:",)),
    ("granite", ("</think>", "<response>", "<|start_of_role|>")),
    ("minimax_m2", ("</think>", "<minimax:tool_call>")),
    ("ernie45", ("</think>", "<response>")),
    ("hunyuan_a13b", ("</think>", "<answer>")),
    ("hy_v3", ("</think", "<tool_sep")),
    ("deepseek_r1", ("</think>", "<｜Assistant｜>")),
    ("glm45", ("</think>", "<arg_key>")),
    ("kimi_k2", ("</think>", "<|im_middle|>")),
    ("qwen3", ("</think>",)),
)
# Beginnings and ends of turns: text before the last of these is not the model's.
_BOUNDARIES = (
    "<|im_start|>",
    "<|im_end|>",
    "<|im_assistant|>",
    "<|im_middle|>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<|start|>",
    "<|end_of_role|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|header_end|>",
    "<|eot|>",
    "<|endoftext|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<seed:bos>",
    "<|turn>",
    "<turn|>",
    "<|START_OF_TURN_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
    "<|assistant_start|>",
    "<|assistant_end|>",
    "<|start_of_role|>",
    "<|role_sep|>",
    "<longcat_user>",
    "<longcat_assistant>",
    "<|hy_Assistant|>",
    "<|hy_User|>",
    "[/INST]",
    "]~b]",
    "[e~[",
    "</s>",
)


def detect_formats(template_source: str, id_of: Callable[[str], int | None]) -> ParserChoice:
    """Return the formats whose markers are in a chat template; id_of looks a token up, as Tokenizer.id_of does.

    Templates of reasoning models may leave the markers to the model: if the template has no reasoning markers, the tokens
    [THINK], <think> and </think> count too.
    """
    tool_format = _first(_TOOL_MARKERS, template_source)
    reasoning_format = _first(_REASONING_MARKERS, template_source)
    if reasoning_format is None and id_of("[THINK]") is not None:
        reasoning_format = "mistral"
    return ParserChoice(tool_format, reasoning_format)


def _first(rows: tuple[tuple[str, tuple[str, ...]], ...], source: str) -> str | None:
    return next((name for name, markers in rows if all(marker in source for marker in markers)), None)


def starts_in_reasoning(prompt_tail: str, reasoning_format: str | None) -> bool:
    """Whether a rendered prompt leaves reasoning open: its last marker is an opening one of the turn that it ends in.

    prompt_tail  the end of the prompt, its last few thousand characters or all of it
    """
    row = find_reasoning_format(reasoning_format)
    if row is None:
        return False
    at, opener = max((prompt_tail.rfind(marker), marker) for marker in row.opens)
    if at < 0:
        return False
    own = set(row.opens) | set(row.closes)
    boundary = max(prompt_tail.rfind(marker) for marker in _BOUNDARIES if marker not in own and marker not in opener)
    if boundary < 0:
        return not prompt_tail[at + len(opener) :].strip()
    return at > boundary and at > max(prompt_tail.rfind(marker) for marker in row.closes)


def starts_in_call(prompt_tail: str, tool_format: str | None) -> bool:
    """Whether a rendered prompt ends with the opening of a call, in a format whose template does that."""
    row = find_tool_format(tool_format)
    return row is not None and row.prompt_opens and prompt_tail.endswith(row.openers)


def reads_without_tools(tool_format: str | None) -> bool:
    """Whether outputs must be parsed with this format even without tools, because its content has markers."""
    row = find_tool_format(tool_format)
    return row is not None and bool(row.content_names)
