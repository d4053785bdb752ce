"""The options of `quire serve` and what they mean to the server."""

from __future__ import annotations

import argparse
import dataclasses
import json

import pytest

from quire.base.errors import ConfigError
from quire.cli import options
from quire.cli.main import make_parser
from quire.cli.serve import server_config
from quire.serving.config import ServerConfig
from quire.serving.metrics.definitions import Definitions, GaugeSources

OPTIONS = (
    "--host 0.0.0.0 --port 1 --api-key k --served-model-name m --allowed-origins http://o --allowed-hosts h --data-dir d "
    "--max-body-bytes 1 --max-file-bytes 1 --head-timeout 1 --body-timeout 1 --slow-reader-bytes 1 --slow-reader-timeout 1 "
    "--keep-alive-comments 1 --no-page --no-metrics --metric-labels zone=a rack=b --log-format json --otlp-endpoint http://t "
    "--goodput ttft:1 tpot:1 e2el:1 --max-queued-requests 1 --max-queued-tokens 1 --max-queue-wait 1 --request-timeout 1 "
    "--drain-grace 1 --drain-timeout 1 --watchdog-timeout 1 --start-timeout 1 --max-restarts 1 --restart-window 1 "
    "--tool-call-parser hermes --reasoning-parser qwen3 --max-n 1 --strict --max-stored-files 1 --max-stored-batches 3 "
    "--max-stored-bytes 1 --max-held-body-bytes 1 --max-prompt-characters 1 "
    "--metrics-names both --kv-events-endpoint tcp://*:5557 --kv-events-replay-endpoint tcp://*:5558 --kv-events-encoding map "
    "--uds u --ssl-keyfile k --ssl-certfile c "
    "--root-path /p/ --no-access-log --cache-secret-file s --lora-modules sql=/a chat=/b --max-timelines 1 --replica-id k3fa"
)


def config_of(*options):
    return server_config(make_parser().parse_args(["serve", *options]))


def test_every_setting_of_the_server_has_an_option(monkeypatch):
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    plain, changed = config_of(), config_of(*OPTIONS.split())
    assert plain == ServerConfig()
    same = [
        field.name for field in dataclasses.fields(ServerConfig) if getattr(plain, field.name) == getattr(changed, field.name)
    ]
    assert same == []
    assert changed.metric_labels == {"zone": "a", "rack": "b"}
    assert changed.lora_modules == (("sql", "/a"), ("chat", "/b"))


@pytest.mark.parametrize("label", ["zone", "model_name=x", "le=1", "0a=1", "__a=1", "a b=1", "=1"])
def test_label_is_refused_when_it_cannot_be_one(label):
    with pytest.raises(ConfigError, match="metric.labels"):
        config_of("--metric-labels", label)
    with pytest.raises(ConfigError, match="each name once"):
        config_of("--metric-labels", "a=1", "a=2")


def test_labels_of_all_metrics_are_refused_as_names_of_others():
    defined = Definitions({}, [GaugeSources(*[lambda: None for _ in range(5)])] * 2)
    names = {name for metric in defined.all for name in metric.label_names}
    assert len(names) > 10
    for name in names:
        with pytest.raises(ConfigError, match=name):
            ServerConfig(metric_labels={name: "x"})


def test_key_of_a_file_stores_what_it_says_else_what_the_server_does(tmp_path):
    path = tmp_path / "keys.json"
    path.write_text(json.dumps([{"name": "a", "key": "1", "max_stored_files": 0}, {"name": "b", "key": "2"}]))
    config = config_of("--api-key-file", str(path), "--max-stored-bytes", "7")
    found = [config.stored_limits(name) for name in ("a", "b", "one that is gone")]
    assert found == [(0, 7), (10_000, 7), (10_000, 7)]


def test_key_of_a_file_has_as_many_batches_as_it_says_else_as_the_server_does(tmp_path):
    path = tmp_path / "keys.json"
    path.write_text(json.dumps([{"name": "a", "key": "1", "max_stored_batches": 0}, {"name": "b", "key": "2"}]))
    config = config_of("--api-key-file", str(path), "--max-stored-batches", "7")
    assert [config.max_batches_of(name) for name in ("a", "b", "one that is gone")] == [0, 7, 7]


def test_key_of_the_command_line_may_hurry_and_one_of_a_file_where_it_says_so(tmp_path):
    path = tmp_path / "keys.json"
    path.write_text(json.dumps([{"name": "a", "key": "1"}, {"name": "b", "key": "2", "priority": True}]))
    keys = config_of("--api-key", "k", "--api-key-file", str(path)).api_keys
    assert {key.name: key.may_use_interactive for key in keys} == {"default": True, "a": False, "b": True}


@pytest.mark.parametrize(
    "words",
    [
        ("--distributed-timeout", "5"),
        ("--prefill-url", "unix:/a,unix:/b"),
        ("--kv-cache-dtype-skip-layers=-1,0",),
        ("--no-enable-prefix-caching", "-tp", "2", "--tensor-parallel-shares", "2,1"),
    ],
)
def test_the_engines_options_are_passed_on_as_they_were_given(words):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    options.add_engine_options(parser)
    args = parser.parse_args(words)
    assert parser.parse_args(options.engine_arguments(args)) == args
