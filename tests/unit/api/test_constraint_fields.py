"""Fields that constrain the output of a chat: what they contradict, and what they need."""

from __future__ import annotations

import pytest

from tests.unit.api.test_decode import CHAT, TOOL, decode, refused


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        (
            {
                "tool_choice": {"type": "function", "function": {"name": "g"}},
                "tools": [{"type": "function", "function": {"name": "f"}}],
            },
            "tool_choice",
        ),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["a"]}}, "response_format"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}, "schema": {}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "type": "object", "properties": {}}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_json_object": True, "guided_json": {}}, "guided_json_object"),
        ({"structured_outputs": {"json": {}}, "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"structured_outputs": {"json": {}}, "guided_decoding_backend": "auto"}, "guided_decoding_backend"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "tools": [TOOL], "tool_choice": "required"}, "structured_outputs"),
        (
            {"guided_json": {}, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "guided_json",
        ),
    ],
)
def test_constraint_is_refused_by_name_when_it_contradicts_itself(extra, param):
    assert refused({**CHAT, **extra}).param == param


def test_response_format_is_taken_beside_a_demanded_call_as_the_official_api_does():
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    body, _ = decode({**CHAT, "response_format": wanted, "tools": [TOOL], "tool_choice": "required"})
    assert body.forced_tools == ("f",)
