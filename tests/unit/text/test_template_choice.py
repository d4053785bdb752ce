"""Chat templates that an option names."""

from __future__ import annotations

import json

import pytest

from quire.base.errors import ConfigError
from quire.model.resolve import resolve_model
from quire.text.template_choice import read_template
from quire.text.tokenizer import load_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(tmp_path):
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("R")
    return tmp_path


def test_name_finds_a_template_of_the_checkpoint(folder):
    assert [read_template(folder, name)[0] for name in ("default", "tool_use", "rag")] == ["D", "T", "R"]


def test_file_is_read(folder, tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text("mine")
    assert read_template(folder, str(path)) == ("mine", path)


def test_unknown_name_is_refused_with_the_known_ones(folder):
    with pytest.raises(ConfigError, match=r"one of chatml, default, rag, tool_use, got 'tool-use' \(did you mean tool_use\?\)"):
        read_template(folder, "tool-use")


def test_tokenizer_renders_with_the_template_that_is_named(tmp_path):
    demo = resolve_model("demo")
    chatml = load_tokenizer(demo, "chatml").apply_chat_template(MESSAGES)
    assert chatml == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    path = tmp_path / "t.jinja"
    path.write_text("{{ messages[0]['content'] }}!")
    assert load_tokenizer(demo, str(path)).apply_chat_template(MESSAGES) == "hi!"
