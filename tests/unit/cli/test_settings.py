"""Options from a file and from the environment."""

from __future__ import annotations

import os

import pytest

from quire.cli.main import make_parser


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("QUIRE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def write(tmp_path):
    def write_file(text):
        path = tmp_path / "serve.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write_file


def parse(*words):
    return make_parser().parse_args(words)


def refusal(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        parse(*words)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_file_sets_options_of_every_kind(write):
    path = write(
        "model: demo-moe\nport: 9000\nserved-model-name: [a, b]\npage: off\nstrict: true\nmetric_labels: zone=a\n"
        "speculative-config: {method: ngram, num_speculative_tokens: 6}\ntensor-parallel-shares: [2, 1]\n"
        "api-key: 0123\nlog-level: warning\n"
    )
    args = parse("serve", "--config", path)
    assert (args.model, args.port, args.served_model_name, args.page, args.strict) == (
        "demo-moe",
        9000,
        ["a", "b"],
        False,
        True,
    )
    assert args.speculative_config == '{"method": "ngram", "num_speculative_tokens": 6}'
    assert (args.metric_labels, args.tensor_parallel_shares, args.api_key) == (["zone=a"], (2.0, 1.0), ["0123"])
    assert (args.log_level, args.host) == ("warning", "127.0.0.1")


def test_command_line_wins_over_environment_over_file_over_default(write, monkeypatch):
    path = write("port: 1\nhost: file\nmax-n: 2\napi-key: [a, b]\nmodel: of-file\n")
    monkeypatch.setenv("QUIRE_SERVE_PORT", "3")
    monkeypatch.setenv("QUIRE_SERVE_HOST", "environment")
    args = parse("serve", "of-command", "--config", path, "--port=4", "--api-key", "c")
    assert (args.port, args.host, args.max_n, args.api_key, args.model) == (4, "environment", 2, ["c"], "of-command")
    assert args.max_queued_requests == 1024


def test_environment_sets_options_of_every_kind(write, monkeypatch):
    for name, value in {
        "QUIRE_SERVE_CONFIG": write("max-restarts: 7"),
        "QUIRE_SERVE_MODEL": "demo-moe",
        "QUIRE_SERVE_PAGE": "0",
        "QUIRE_SERVE_ALLOWED_HOSTS": "a 'b c'",
        "QUIRE_SERVE_MAX_MODEL_LEN": "64",
        "QUIRE_SERVE_API_KEY": "a key",
    }.items():
        monkeypatch.setenv(name, value)
    args = parse("serve")
    assert (args.model, args.page, args.allowed_hosts, args.max_model_len) == ("demo-moe", False, ["a", "b c"], 64)
    assert (args.api_key, args.max_restarts) == (["a key"], 7)


def test_variables_of_one_command_do_not_reach_another(monkeypatch):
    monkeypatch.setenv("QUIRE_SERVE_MAX_MODEL_LEN", "64")
    monkeypatch.setenv("QUIRE_BATCH_RUN_INPUT_FILE", "in")
    monkeypatch.setenv("QUIRE_BATCH_RUN_OUTPUT_FILE", "out")
    assert parse("chat").max_model_len is None
    args = parse("batch", "run")
    assert (str(args.input_file), str(args.output_file)) == ("in", "out")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "'prot' is no option of `quire serve` (did you mean port?)"),
        ("tp-size: 2", "'tp-size' is no option of `quire serve` (use --tensor-parallel-size)"),
        ("port: x", "serve.yaml: port: invalid int value: 'x'"),
        ("port: [1, 2]", "port: takes one value, got a list"),
        ("port:", "port: has no value"),
        ("page: maybe", "page: must be true or false, got 'maybe'"),
        ("log-format: jsn", "log-format: invalid choice: 'jsn' (choose from 'text', 'json'; did you mean json?)"),
        ("port: 1\nport: 2", "'port' is set twice"),
        ("config: x", "'config' is no option"),
        ("help: true", "'help' is no option"),
        ("- port", "must have lines of the form NAME: VALUE"),
        ("port: {a: 1}", "port: must be a value or a list, got a mapping"),
        ("a: b: c", "is not valid YAML"),
        ("allowed-hosts: []", "allowed-hosts: needs at least one value"),
    ],
)
def test_file_is_refused_when_it_is_wrong(write, capsys, text, message):
    assert message in refusal(capsys, "serve", "--config", write(text))


def test_missing_file_is_refused(capsys, tmp_path):
    assert "cannot be read: No such file" in refusal(capsys, "serve", "--config", str(tmp_path / "none.yaml"))


def test_variable_is_refused_when_it_is_wrong(monkeypatch, capsys):
    monkeypatch.setenv("QUIRE_SERVE_PORT", "tcp://10.0.0.1:80")
    assert "QUIRE_SERVE_PORT: invalid int value: 'tcp://10.0.0.1:80' (Kubernetes" in refusal(capsys, "serve")


def test_unknown_variable_is_told_and_not_refused(monkeypatch, capsys):
    monkeypatch.setenv("QUIRE_SERVE_HSOT", "x")
    assert parse("serve").host == "127.0.0.1"
    assert "QUIRE_SERVE_HSOT is no option (did you mean QUIRE_SERVE_HOST?)" in capsys.readouterr().err


def test_option_of_the_command_line_takes_the_place_of_those_it_excludes(monkeypatch, capsys):
    monkeypatch.setenv("QUIRE_GENERATE_REGEX", "a")
    assert (parse("generate", "x", "--json-object").regex, parse("generate", "x").regex) == (None, "a")
    monkeypatch.setenv("QUIRE_GENERATE_GRAMMAR", "b")
    assert "not allowed together with QUIRE_GENERATE_REGEX" in refusal(capsys, "generate", "x")


def test_help_and_yaml_cost_nothing_without_a_file():
    import subprocess
    import sys

    code = (
        "import sys; from quire.cli.main import make_parser; make_parser().parse_args(['serve']); print('yaml' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serv"], "; did you mean serve?)"),
        (["bench", "throughputs"], "did you mean throughput?"),
        (
            ["serve", "--log-level", "inf"],
            "invalid choice: 'inf' (choose from 'debug', 'info', 'warning', 'error'; did you mean info?)",
        ),
        (["serve", "--prot", "1"], "(did you mean --port?)"),
    ],
)
def test_near_name_is_suggested(capsys, words, message):
    assert message in refusal(capsys, *words)


def test_help_of_serve_has_examples(capsys):
    with pytest.raises(SystemExit):
        parse("serve", "--help")
    assert "  quire serve Qwen/Qwen3-0.6B --port 9000" in capsys.readouterr().out
