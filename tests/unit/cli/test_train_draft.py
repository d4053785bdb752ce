"""`quire train-draft`, as a user starts it."""

import json

from quire.cli.main import main

WORDS = "the quick brown fox jumps over the lazy dog and runs away from what it has seen in the dark wood "


def test_a_head_is_written_and_its_agreement_printed(tiny_model, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(WORDS * 40)
    out = tmp_path / "head"
    sizes = ["--sequence-tokens", "32", "--prompt-tokens", "24", "--num-sequences", "16", "--batch-tokens", "128"]
    taught = ["--minutes", "0.001", "--num-steps-ahead", "2", "--draft-vocab-size", "50", "--no-progress"]
    assert main(["train-draft", "--kind", "medusa", str(tiny_model), str(text), str(out), *sizes, *taught]) == 0
    assert "by tokens ahead" in capsys.readouterr().out
    assert json.loads((out / "config.json").read_text())["num_heads"] == 2


def test_what_cannot_be_trained_is_said(tiny_model, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("few")
    assert main(["train-draft", "--kind", "mtp", str(tiny_model), str(text), str(tmp_path / "out"), "--no-progress"]) == 1
    assert "holds 3 tokens, too few for 8 sequences of 96; give more text" in capsys.readouterr().err
