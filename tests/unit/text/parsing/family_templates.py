"""How the published chat templates of families write an assistant's turn: short templates of our own in the same format."""

from __future__ import annotations

from dataclasses import dataclass

_HEAD = """{%- for message in messages -%}{%- if message.role == 'user' -%}USER {{ message.content }} END
{%- else -%}"""
_TAIL = "{%- endif -%}{%- endfor -%}"


@dataclass(frozen=True)
class Family:
    """begin, body and end of the assistant's turn, the text before everything, and the formats to detect."""

    begin: str
    body: str
    end: str
    tool_format: str
    reasoning_format: str | None = None
    macros: str = ""

    @property
    def template(self) -> str:
        opening = "{{- " + repr(self.begin) + " -}}"
        generation = "{%- if add_generation_prompt -%}" + opening + "{%- endif -%}"
        return f"{self.macros}{_HEAD}{opening}{self.body}{{{{- {self.end!r} -}}}}{_TAIL}{generation}"


_THINK = "{%- if message.reasoning_content -%}{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' -}}{%- endif -%}"
_CONTENT = "{{- message.content -}}"
_CALLS = "{%- for call in message.tool_calls -%}{%- set f = call.function -%}"
_PAIRS = "{%- for key, value in f.arguments.items() -%}"
_PLAIN = "(value if value is string else value | tojson)"
_BARE = """
{%- macro bare(value) -%}
{%- if value is string -%}QUOTE{{ value }}QUOTE
{%- elif value is boolean -%}{{ 'true' if value else 'false' }}
{%- elif value is none -%}null
{%- elif value is mapping -%}{{ '{' }}{%- for k, v in value | dictsort -%}{{ k }}:{{ bare(v) }}
{{- ',' if not loop.last }}{%- endfor -%}{{ '}' }}
{%- elif value is sequence -%}[{%- for item in value -%}{{ bare(item) }}{{ ',' if not loop.last }}{%- endfor -%}]
{%- else -%}{{ value }}
{%- endif -%}{%- endmacro -%}
"""


def _bare_calls(begin: str, end: str) -> str:
    pairs = "{{- '{' }}{%- for key, value in f.arguments | dictsort -%}{{ key }}:{{ bare(value) }}{{ ',' if not loop.last }}"
    return f"{_CALLS}{{{{- {begin!r} + f.name -}}}}{pairs}{{%- endfor -%}}{{{{ '}}' + {end!r} -}}}}{{%- endfor -%}}"


_JSON_LIST = """[{%- for call in message.tool_calls -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments
| tojson }}}
{{- ', ' if not loop.last -}}{%- endfor -%}]"""
_XML = (
    _CALLS + "{{- '<tool_call>\n<function=' + f.name + '>\n' -}}" + _PAIRS + "{{- '<parameter=' + key + '>\n' + "
    f"{_PLAIN} + '\n</parameter>\n' -}}}}" + "{%- endfor -%}{{- '</function>\n</tool_call>' -}}{%- endfor -%}"
)
_GLM = (
    _CALLS
    + "{{- '\n<tool_call>' + f.name + '\n' -}}"
    + _PAIRS
    + (
        "{{- '<arg_key>' + key + '</arg_key>\n<arg_value>' + " + _PLAIN + " + '</arg_value>\n' -}}{%- endfor -%}"
        "{{- '</tool_call>' -}}{%- endfor -%}"
    )
)
_GLM_THINK = (
    "{{- '<think>' + message.reasoning_content + '</think>' -}}"
    "{%- if message.content -%}{{- '\n' + message.content -}}{%- endif -%}"
)
_MINIMAX = (
    "{%- if message.tool_calls -%}{{- '\n<minimax:tool_call>\n' -}}"
    + _CALLS
    + "{{- '<invoke name=\"' + f.name + '\">' -}}"
    + _PAIRS
    + "{{- '<parameter name=\"' + key + '\">' + "
    + _PLAIN
    + " + '</parameter>' -}}{%- endfor -%}"
    "{{- '</invoke>\n' -}}{%- endfor -%}{{- '</minimax:tool_call>' -}}{%- endif -%}"
)
_KIMI = (
    "{%- if message.tool_calls -%}{{- '<|tool_calls_section_begin|>' -}}"
    + _CALLS
    + "{{- '<|tool_call_begin|>functions.' + f.name + ':' + loop.index0 | string + '<|tool_call_argument_begin|>' "
    "+ f.arguments | tojson + '<|tool_call_end|>' -}}{%- endfor -%}{{- '<|tool_calls_section_end|>' -}}{%- endif -%}"
)
_DEEPSEEK_V3 = (
    "{%- for call in message.tool_calls -%}{{- '<｜tool▁calls▁begin｜>' if loop.first else '\n' -}}"
    "{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\n```json\n' + call.function.arguments | tojson "
    "+ '\n```<｜tool▁call▁end｜>' -}}{{- '<｜tool▁calls▁end｜>' if loop.last else '' -}}{%- endfor -%}"
)
_DEEPSEEK_V31 = (
    "{%- for call in message.tool_calls -%}{{- '<｜tool▁calls▁begin｜>' if loop.first else '' -}}"
    "{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments | tojson "
    "+ '<｜tool▁call▁end｜>' -}}{{- '<｜tool▁calls▁end｜>' if loop.last else '' -}}{%- endfor -%}"
)
_DEEPSEEK_V32 = (
    "{%- if message.tool_calls -%}{{- '\n\n<｜DSML｜function_calls>\n' -}}"
    + _CALLS
    + "{{- '<｜DSML｜invoke name=\"' + f.name + '\">\n' -}}"
    + _PAIRS
    + "{{- '<｜DSML｜parameter name=\"' + key + '\" string=\"' + ('true' if value is string else 'false') + '\">' + "
    + _PLAIN
    + " + '</｜DSML｜parameter>\n' -}}{%- endfor -%}{{- '</｜DSML｜invoke>\n' -}}{%- endfor -%}"
    "{{- '</｜DSML｜function_calls>' -}}"
    "{%- endif -%}"
)
_COHERE = (
    "{%- if message.reasoning_content -%}{{- '<|START_THINKING|>' + message.reasoning_content + '<|END_THINKING|>' -}}"
    "{%- endif -%}{%- if message.tool_calls -%}{{- '<|START_ACTION|>[\n' -}}"
    + _CALLS
    + '{{- \'    {"tool_call_id": "\' + loop.index0 | string + \'", "tool_name": "\' + f.name + \'", "parameters": \' '
    "+ f.arguments | tojson + '}' + (',' if not loop.last else '') + '\n' -}}{%- endfor -%}{{- ']<|END_ACTION|>' -}}"
    "{%- else -%}{{- '<|START_RESPONSE|>' + message.content + '<|END_RESPONSE|>' -}}{%- endif -%}"
)
_ERNIE = (
    _THINK
    + "{%- if message.content -%}{{- '<response>\n' + message.content + '\n</response>\n' -}}{%- endif -%}"
    + _CALLS
    + "{{- '\n<tool_call>\n{\"name\": \"' + f.name + '\", \"arguments\": ' + f.arguments | tojson + '}\n</tool_call>\n' -}}"
    "{%- endfor -%}"
)
_HUNYUAN = (
    "{%- if message.reasoning_content -%}{{- '<think>\n' + message.reasoning_content + '\n</think>\n' -}}{%- endif -%}"
    "{%- if message.tool_calls -%}{{- message.content + '<tool_calls>' -}}"
    + _JSON_LIST
    + "{{- '</tool_calls>' -}}{%- else -%}{{- '<answer>\n' + message.content + '\n</answer>' -}}{%- endif -%}"
)
_SEED = (
    "{%- if message.reasoning_content -%}{{- '<seed:think>' + message.reasoning_content + '</seed:think>' -}}{%- endif -%}"
    + _CONTENT
    + _CALLS
    + "{{- '\n<seed:tool_call>\n<function=' + f.name + '>\n' -}}"
    + _PAIRS
    + "{{- '<parameter=' + key + '>' + "
    + _PLAIN
    + " + '</parameter>\n' -}}{%- endfor -%}"
    "{{- '</function>\n</seed:tool_call>' -}}{%- endfor -%}"
)
_PYTHON = (
    "{%- for call in message.tool_calls -%}{{- call.function.name -}}({%- for key, value in call.function.arguments.items() -%}"
    "{{- key -}}={{- value | tojson -}}{{- ', ' if not loop.last -}}{%- endfor -%})"
    "{{- SEPARATOR if not loop.last -}}{%- endfor -%}"
)
_OLMO3 = (
    _THINK
    + _CONTENT
    + "{%- if message.tool_calls -%}<function_calls>"
    + _PYTHON.replace("SEPARATOR", "'\n'")
    + "</function_calls>{%- endif -%}"
)
_LFM2 = (
    _CONTENT
    + "{%- if message.tool_calls -%}{{- '<|tool_call_start|>[' -}}"
    + _PYTHON.replace("SEPARATOR", "', '")
    + "{{- ']<|tool_call_end|>' -}}{%- endif -%}"
)
_APERTUS = (
    "{%- if message.reasoning_content -%}{{- '<|inner_prefix|>' + message.reasoning_content + '<|inner_suffix|>' -}}"
    "{%- endif -%}"
    + _CONTENT
    + "{%- if message.tool_calls -%}{{- '<|tools_prefix|>[' -}}"
    + _CALLS
    + "{{- '{\"' + f.name + '\": ' + f.arguments | tojson + '}' + (', ' if not loop.last else '') -}}{%- endfor -%}"
    "{{- ']<|tools_suffix|>' -}}{%- endif -%}"
)
_GRANITE = _CONTENT + "{%- if message.tool_calls -%}{{- '<|tool_call|>' -}}" + _JSON_LIST + "{%- endif -%}"
_PHI4 = (
    "{{- '<|tool|>' if false else '' -}}{{- '<|/tool|>' if false else '' -}}"
    + _CONTENT
    + ("{%- if message.tool_calls -%}functools" + _JSON_LIST + "{%- endif -%}")
)
_GEMMA4_THINK = (
    "{%- if message.reasoning_content -%}"
    "{{- '<|channel>thought\n' + message.reasoning_content + '\n<channel|>' -}}{%- endif -%}"
)

FAMILIES: dict[str, Family] = {
    "GLM-4.5": Family("<|assistant|>\n", _GLM_THINK + _GLM, "<|user|>", "glm45", "glm45"),
    "MiniMax M2": Family("]~b]ai\n", _THINK + _CONTENT + _MINIMAX, "[e~[\n", "minimax_m2", "minimax_m2"),
    "Kimi K2": Family("<|im_assistant|>assistant<|im_middle|>", _THINK + _CONTENT + _KIMI, "<|im_end|>", "kimi_k2", "kimi_k2"),
    "DeepSeek V3": Family("<｜Assistant｜>", _CONTENT + _DEEPSEEK_V3, "<｜end▁of▁sentence｜>", "deepseek_v3"),
    "DeepSeek V3.1": Family(
        "<｜Assistant｜>", _THINK + _CONTENT + _DEEPSEEK_V31, "<｜end▁of▁sentence｜>", "deepseek_v31", "deepseek_r1"
    ),
    "DeepSeek V3.2": Family(
        "<｜Assistant｜>", _THINK + _CONTENT + _DEEPSEEK_V32, "<｜end▁of▁sentence｜>", "deepseek_v32", "deepseek_r1"
    ),
    "Qwen3-Coder": Family("<|im_start|>assistant\n", _CONTENT + _XML, "<|im_end|>\n", "qwen3_coder"),
    "Qwen3.5": Family("<|im_start|>assistant\n", _THINK + _CONTENT + _XML, "<|im_end|>\n", "qwen3_coder", "qwen3"),
    "Gemma 4": Family(
        "<|turn>model\n",
        _GEMMA4_THINK + _CONTENT + _bare_calls("<|tool_call>call:", "<tool_call|>"),
        "<turn|>\n",
        "gemma4",
        "gemma4",
        _BARE.replace("QUOTE", '<|"|>'),
    ),
    "FunctionGemma": Family(
        "<start_of_turn>model\n",
        _CONTENT + _bare_calls("<start_function_call>call:", "<end_function_call>"),
        "<end_of_turn>\n",
        "functiongemma",
        None,
        _BARE.replace("QUOTE", "<escape>"),
    ),
    "Command A": Family(
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", _COHERE, "<|END_OF_TURN_TOKEN|>", "cohere_command3", "cohere_command3"
    ),
    "ERNIE 4.5": Family("<|im_start|>assistant\n", _ERNIE, "<|im_end|>\n", "ernie45", "ernie45"),
    "Hunyuan A13B": Family("<|startoftext|>", _HUNYUAN, "<|eos|>", "hunyuan_a13b", "hunyuan_a13b"),
    "Seed-OSS": Family("<seed:bos>assistant\n", _SEED, "<seed:eos>", "seed_oss", "seed_oss"),
    "OLMo 3": Family("<|im_start|>assistant\n", _OLMO3, "<|im_end|>\n", "olmo3", "qwen3"),
    "LFM2": Family("<|im_start|>assistant\n", _LFM2, "<|im_end|>\n", "lfm2"),
    "Apertus": Family("<|assistant_start|>", _APERTUS, "<|assistant_end|>", "apertus", "apertus"),
    "Granite 3": Family("<|start_of_role|>assistant<|end_of_role|>", _GRANITE, "<|end_of_text|>\n", "granite"),
    "Phi-4-mini": Family("<|assistant|>", _PHI4, "<|end|>", "phi4_mini_json"),
}
"""By the names of the families."""
