"""`quire serve --config FILE` with models: the file is checked as a whole before anything starts, and errors name the place."""

import subprocess
import sys

import pytest

pytest.importorskip("uvicorn", reason="needs quire[server]")

from quire.base.errors import ConfigError
from quire.cli import fleet
from quire.cli.main import main, make_parser

MIB = 1 << 20
REPORT = fleet.MeasuredModel(
    device="cpu", available_bytes=1000 * MIB, needed_bytes=100 * MIB, num_kv_blocks=77, has_draft_model=False
)


@pytest.fixture
def measured(monkeypatch):
    """Replace the process that reads the models; a test may change the reports, one for each entry."""
    reports = {}
    seen = []

    def measure(entries, planned):
        seen.extend(planned)
        return [reports.get(entry.name, REPORT) for entry in entries]

    monkeypatch.setattr(fleet, "measure", measure)
    reports["planned"] = seen
    return reports


def config_of(tmp_path, text, *words):
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    return fleet.fleet_config(make_parser().parse_args(["serve", "--config", str(path), *words]))


GOOD = """
port: 9000
memory: 600MiB
api-key: [one, two]
max_waiting_requests: 7
swap-after-s: 2.5
models:
  - name: large
    model: demo
    aliases: [gpt-4, default]
    memory: 50%
    preload: true
    keep_alive_s: 300
    options:
      max-model-len: 512
      enable_prefix_caching: false
      speculative-config: {method: ngram, num_speculative_tokens: 3}
  - model: demo-draft
    options: {max-num-seqs: 4}
"""


def test_file_becomes_a_configuration(tmp_path, measured):
    config = config_of(tmp_path, GOOD, "--host", "127.0.0.2")
    assert (config.host, config.port, config.memory_bytes) == ("127.0.0.2", 9000, 600 * MIB)
    assert (config.max_waiting_requests, config.swap_after_s, config.max_wait_s) == (7, 2.5, 300.0)
    assert [key.name for key in config.api_keys] == ["key-1", "key-2"]
    large, small = config.models
    assert (large.name, large.memory_bytes, large.preload, large.pinned) == ("large", 300 * MIB, True, False)
    assert (large.aliases, large.keep_alive_s) == (("gpt-4", "default"), 300.0)
    assert large.options == {
        "model": "demo",
        "max-model-len": "512",
        "enable-prefix-caching": "false",
        "speculative-config": '{"method": "ngram", "num_speculative_tokens": 3}',
        "host-memory-bytes": str(300 * MIB),
    }
    assert (small.name, small.memory_bytes, small.keep_alive_s) == ("demo-draft", 100 * MIB, None)
    assert small.options["num-kv-blocks"] == "77"  # the plan's, whatever is free when the process starts
    assert [options["host-memory-bytes"] for options in measured["planned"]] == [str(300 * MIB), str(600 * MIB)]


def test_memory_of_the_machine_is_the_budget_where_none_is_given(tmp_path, measured):
    config = config_of(tmp_path, "models: [{model: demo}]")
    assert config.memory_bytes == 1000 * MIB
    assert measured["planned"] == [{"model": "demo"}]


def test_command_line_wins_over_the_file(tmp_path, measured):
    assert config_of(tmp_path, GOOD, "--port", "1234").port == 1234


M = "models: [{model: demo}]\n"
BAD = {
    "models: []": r"models must be a list with at least one entry",
    "models: demo": r"models must be a list",
    "models: [demo]": r"models\[0\]: must have the fields name, model",
    "models: [{name: a}]": r"models\[0\]: model is needed",
    "models: [{model: demo, nam: x}]": r"models\[0\]: 'nam' is no field of a model \(did you mean name\?\)",
    "models: [{model: demo, max-model-len: 5}]": r"'max-model-len' is no field of a model, but an option: it goes into options",
    "models: [{model: demo, model: demo}]": r"models\[0\]: 'model' is set twice",
    "models: [{model: demo}, {model: demo}]": r"models\[1\]: the name 'demo' is taken by models\[0\]",
    "models: [{name: a, model: demo, aliases: [b]}, {name: b, model: demo}]": r"the name 'b' is taken by models\[0\]",
    "models: [{model: demo, memory: lots}]": r"models\[0\] \(demo\): memory: must be a size like 4GiB.*'lots'",
    "models: [{model: demo, memory: 50%}]": r"\(demo\): memory: a share needs memory at the top",
    "memory: 1GiB\nmodels: [{model: demo, memory: 120%}]": r"a share must be between 0% and 100%, got '120%'",
    "models: [{model: demo, preload: perhaps}]": r"\(demo\): preload: must be true or false, got 'perhaps'",
    "models: [{model: demo, keep_alive_s: soon}]": r"keep_alive_s: must be a number, got 'soon'",
    "models: [{model: demo, keep_alive_s: -1}]": r"keep_alive_s must not be negative, got -1",
    "models: [{model: demo, keep_alive_s: 3, pinned: true}]": r"keep_alive_s has no effect for a model that is pinned",
    "models: [{model: demo, options: [x]}]": r"options: must be a mapping",
    "models: [{model: demo, options: {max-modellen: 5}}]": r"\(demo\): options: 'max-modellen' is no option.*max-model-len",
    "models: [{model: demo, options: {max-num-seqs: many}}]": r"\(demo\): options: max-num-seqs: invalid int value: 'many'",
    "models: [{model: demo, options: {max-num-seqs: 0}}]": r"\(demo\): options: max_num_seqs must be",
    "models: [{model: demo, options: {dtype: float8}}]": r"\(demo\): options: dtype: invalid choice: 'float8'",
    "models: [{model: demo, options: {port: 1}}]": r"\(demo\): options: 'port' cannot be set for one model: set it at the top",
    "models: [{model: demo, options: {tool-call-parser: none-such}}]": r"\(demo\): options: tool_call_parser",
    "models: [{model: demo, memory: 0}]": r"\(demo\): memory: must be more than 0 bytes, got '0'",
    "models: [{model: demo, name: '*'}]": r"\(\*\): name and aliases must not be '\*'",
    M + "memory: 0": r"memory: must be more than 0 bytes",
    M + "memory: 1XB": r"memory: must be a size",
    M + "memory: 50MiB": r"models\[0\] \(demo\) needs 100\.0 MiB, but the memory of the fleet is 50\.0 MiB",
    M + "max-wait-s: 0": r"max_wait_s must be a positive number of seconds, got 0",
    M + "max-wait-s: long": r"max_wait_s: must be a number, got 'long'",
    "memory: 150MiB\nmodels: [{model: demo, pinned: true}, {model: demo-draft}]": r"\(demo-draft\) needs 100\.0 MiB and the "
    r"pinned models 100\.0 MiB in addition, but the memory of the fleet is 150\.0 MiB",
    "memory: 150MiB\nmodels: [{model: demo, preload: true}, {model: demo-draft, preload: true}]": r"the models with preload "
    r"need 200\.0 MiB together",
    "memory: 1GiB\nmodels: [{model: demo, memory: 60MiB}]": r"memory is 60\.0 MiB, but the model needs 100\.0 MiB",
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("text", BAD)
def test_bad_file_is_refused_with_its_place(tmp_path, measured, text):
    with pytest.raises(ConfigError, match=BAD[text]):
        config_of(tmp_path, text)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("dtype: float32", "'dtype' is no option of several models: put it into a model's options"),
        ("ssl-keyfile: x", "'ssl-keyfile' is no option of several models: it needs a server with one model"),
        ("memry: 1GiB", "did you mean memory?"),
    ],
)
def test_option_of_one_model_at_the_top_is_refused(tmp_path, capsys, line, message):
    with pytest.raises(SystemExit):
        config_of(tmp_path, M + line)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--dtype", "float32"), ("demo-draft",), ("--uds", "x.sock")])
def test_option_of_one_model_on_the_command_line_is_refused(tmp_path, measured, words):
    with pytest.raises(ConfigError, match="cannot be given for several models"):
        config_of(tmp_path, M, *words)


def test_option_of_one_model_in_the_environment_is_refused(tmp_path, measured, monkeypatch):
    monkeypatch.setenv("QUIRE_SERVE_MAX_NUM_SEQS", "3")
    with pytest.raises(ConfigError, match="max-num-seqs cannot be given for several models"):
        config_of(tmp_path, M)


@pytest.mark.parametrize("name", ["lora-modules", "enable_lora"])
def test_adapters_are_refused(tmp_path, measured, name):
    text = f"models:\n  - {{model: demo, options: {{{name}: a=b}}}}\n"
    with pytest.raises(ConfigError, match=rf"models\[0\] \(demo\): options: '{name}' .*one model: it needs"):
        config_of(tmp_path, text)


def test_two_models_need_two_folders_for_their_data(tmp_path, measured):
    text = f"models:\n  - {{model: demo, options: {{data-dir: {tmp_path}}}}}\n"
    assert config_of(tmp_path, text).models[0].options["data-dir"] == str(tmp_path)
    other = f"  - {{model: demo-draft, options: {{data_dir: {tmp_path}/}}}}\n"
    with pytest.raises(ConfigError, match=r"models\[1\] \(demo-draft\): options: data-dir .* is that of .*models\[0\]"):
        config_of(tmp_path, text + other)


def test_models_on_several_devices_are_refused(tmp_path, measured):
    measured["demo-draft"] = fleet.MeasuredModel("cuda:0", 1, 1, 1, has_draft_model=False)
    with pytest.raises(ConfigError, match=r"all models must be on one device.*cuda:0"):
        config_of(tmp_path, "models: [{model: demo}, {model: demo-draft}]")


def test_memory_on_a_gpu_needs_the_size_of_the_pool(tmp_path, measured):
    measured["demo"] = fleet.MeasuredModel("cuda:0", 10**12, 10**8, 1, has_draft_model=False)
    with pytest.raises(ConfigError, match="needs kv-cache-memory-bytes"):
        config_of(tmp_path, "models: [{model: demo, memory: 1GiB}]")
    config = config_of(tmp_path, "models: [{model: demo, memory: 1GiB, options: {kv-cache-memory-bytes: 1000000}}]")
    assert config.models[0].memory_bytes == 1 << 30


def test_draft_model_needs_memory(tmp_path, measured):
    measured["demo"] = fleet.MeasuredModel("cpu", 10**12, 10**8, 1, has_draft_model=True)
    with pytest.raises(ConfigError, match="memory is needed: the plan does not count the draft model"):
        config_of(tmp_path, M)


def test_file_of_one_model_is_no_fleet(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("model: demo\nport: 9000\n")
    assert not fleet.is_fleet_file(str(path))


@pytest.mark.slow
def test_models_are_measured_in_a_process_and_torch_is_not_loaded(tmp_path):
    path = tmp_path / "fleet.yaml"
    path.write_text(f"models: [{{model: demo, options: {{num-kv-blocks: 64}}}}, {{name: none, model: {tmp_path}/none}}]")
    assert main(["serve", "--config", str(path)]) == 1
    path.write_text("memory: 1MiB\nmodels: [{model: demo, options: {num-kv-blocks: 64}}]")
    code = (
        "import sys; from quire.cli import main; status = main.main(['serve', '--config', sys.argv[1]]); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, "models[0] (demo) needs" in done.stderr) == (1, True)
