"""The bundled model with a chat template that knows tools: what it says is nonsense, its form is what is tested."""

import json
from pathlib import Path

import quire

DEMO = Path(quire.__file__).parent / "demo_models" / "demo"
KEY = "e2e-secret"
MAX_BODY_BYTES = 200_000
TEMPLATE = """{%- if tools %}Tools:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
<tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}
{%- for message in messages %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}

{% endfor %}"""
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def make_tooled_model(folder):
    """Return a checkpoint named "demo" in a folder."""
    made = folder / "demo"
    made.mkdir()
    for path in DEMO.iterdir():
        if path.name != "tokenizer_config.json":
            (made / path.name).symlink_to(path)
    config = json.loads((DEMO / "tokenizer_config.json").read_text())
    (made / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return made


def fits_schema(value):
    """Whether a value is of SCHEMA."""
    return set(value) == {"city", "days"} and isinstance(value["city"], str) and value["days"] in range(10)
