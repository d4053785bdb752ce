"""Options that can be checked without the model are, before it is loaded: a bad value fails at once with what is allowed."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path

import pytest

from quire.base.errors import ConfigError
from quire.cli.main import main
from quire.serving.config import ServerConfig
from quire.serving.http.main import check_data_dir
from quire.text.parsing.formats import REASONING_FORMATS, TOOL_FORMATS


def refused(capsys, monkeypatch, *options):
    """Return what `quire serve` says, which must not have begun to load anything."""

    starts = []

    async def start(lifecycle):
        starts.append(lifecycle)
        return 0

    monkeypatch.setattr("quire.serving.http.lifecycle.Lifecycle.run", start)
    try:
        status = main(["serve", "demo", "--port", "0", *map(str, options)])
    except SystemExit as end:
        status = end.code
    assert status in (1, 2)
    assert starts == []
    return capsys.readouterr().err


@pytest.mark.parametrize("kind", ["tool-call", "reasoning"])
def test_parser_is_refused_with_those_that_there_are(capsys, monkeypatch, kind):
    said = refused(capsys, monkeypatch, f"--{kind}-parser", "wizard")
    table = TOOL_FORMATS if kind == "tool-call" else REASONING_FORMATS
    for name in (f"{kind.replace('-', '_')}_parser", "'wizard'", "auto", "none", *table):
        assert name in said


@pytest.mark.parametrize("name", [*TOOL_FORMATS, "auto", "none"])
def test_every_parser_of_tool_calls_is_taken(name):
    assert ServerConfig(tool_call_parser=name).tool_call_parser == name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--served-model-name", ""], ["served_model_names", "''"]),
        (["--served-model-name", "a", " "], ["served_model_names", "' '"]),
        (["--served-model-name", "a\nb"], ["served_model_names"]),
        (["--served-model-name", "x" * 513], ["served_model_names", "512"]),
        (["--host", ""], ["host", "0.0.0.0"]),
        (["--allowed-origins", "example.com"], ["allowed_origins", "'example.com'", "https://"]),
        (["--allowed-origins", "https://example.com/path"], ["allowed_origins"]),
        (["--allowed-hosts", ""], ["allowed_hosts"]),
        (["--drain-timeout", "nan"], ["drain_timeout_s", "nan"]),
        (["--otlp-endpoint", "localhost:4318"], ["otlp_endpoint", "http://"]),
        (["--data-dir", ""], ["data-dir"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_value_is_refused_before_anything_is_loaded(capsys, monkeypatch, options, words):
    said = refused(capsys, monkeypatch, *options)
    assert all(word in said for word in words), said


def test_data_dir_is_refused_before_anything_is_loaded_when_it_is_a_file(capsys, monkeypatch, tmp_path):
    path = tmp_path / "taken"
    path.write_text("x")
    said = refused(capsys, monkeypatch, "--data-dir", path)
    assert "data_dir" in said
    assert str(path) in said


def below_a_file(folder: Path) -> Path:
    (folder / "taken").write_text("x")
    return folder / "taken" / "data"


def with_a_file_that_is_no_database(folder: Path) -> Path:
    (folder / "responses.sqlite").write_bytes(b"no database" * 1000)
    return folder


def of_another_version(folder: Path) -> Path:
    with sqlite3.connect(folder / "batches.sqlite") as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    return folder


@pytest.mark.parametrize("make", [below_a_file, with_a_file_that_is_no_database, of_another_version])
def test_data_dir_that_cannot_be_used_is_named(tmp_path, make):
    folder = make(tmp_path)
    with pytest.raises(ConfigError, match="data_dir") as caught:
        check_data_dir(folder)
    assert str(folder) in str(caught.value)


def test_data_dir_is_made_where_it_is_missing(tmp_path):
    check_data_dir(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    check_data_dir(tmp_path / "a" / "b")  # and may be there
    check_data_dir(None)


@pytest.mark.parametrize(
    "origin", ["*", "https://example.com", "http://localhost:3000", "http://[::1]:80", "chrome-extension://abc"]
)
def test_origin_is_taken(origin):
    assert ServerConfig(allowed_origins=(origin,)).allowed_origins == (origin,)


@pytest.mark.parametrize("name", ["drain_grace_s", "drain_timeout_s", "default_timeout_s"])
def test_time_that_is_no_number_is_refused(name):
    with pytest.raises(ConfigError, match=name):
        ServerConfig(**{name: math.nan})


def test_tokenizer_is_read_before_the_weights_when_it_is_not_the_models_own(tmp_path, monkeypatch):
    from quire import LLM
    from quire.base.errors import QuireError

    def load(*args):
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr("quire.engine.loading.build_runner", load)
    with pytest.raises(QuireError, match="tokenizer"):
        LLM("demo", tokenizer=str(tmp_path), num_kv_blocks=16)
