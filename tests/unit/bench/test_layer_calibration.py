"""Calibration of skipped layers: a layer that does nothing is found first."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.base.errors import ConfigError
from quire.bench.layer_calibration import calibrate_layers, choose_layers
from quire.cli.main import main
from quire.contracts.config import EngineConfig
from quire.contracts.speculative import SpeculativeConfig
from quire.model.build import build_model
from quire.model.checkpoint import open_parameters
from quire.model.config_reader import read_model_spec
from quire.speculate.layer_probe import LayerProbe

TEXT = "The quick brown fox jumps over the lazy dog, and over many a word beside it. " * 12


@pytest.fixture(scope="module")
def idle_layer(tiny_model, tmp_path_factory):
    """A model whose layer 1 leaves everything as it is."""
    folder = tmp_path_factory.mktemp("idle")
    for path in tiny_model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.startswith("model.layers.1.") and name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = torch.zeros_like(weights[name])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("is_native", [True, False])
def test_the_layer_that_does_nothing_is_skipped(idle_layer, is_native, monkeypatch):
    if not is_native:
        monkeypatch.setenv("QUIRE_NATIVE", "0")
    found = calibrate_layers(EngineConfig(model=str(idle_layer)), TEXT, 600)
    first = found.choices[0]
    assert (first.skipped_layers, first.agreement) == ((1,), 1.0)
    assert found.num_places > 10
    assert SpeculativeConfig.read(first.config()).skipped_layers == (1,)


def test_a_step_of_all_layers_agrees_with_itself(tiny_model):
    spec = read_model_spec(tiny_model, "auto")
    model = build_model(spec, open_parameters(tiny_model, spec), 256, 16)
    generator = torch.Generator().manual_seed(0)
    windows = [torch.randint(0, 250, (length,), generator=generator).tolist() for length in (200, 17, 97)]
    probe = LayerProbe(model, windows)
    assert probe.num_places == 12 + 1 + 6
    for _ in range(2):
        assert probe.agreement(range(len(spec.layers))) == 1.0
        assert probe.agreement([0]) < 1.0
    assert probe.cost(16) > 0
    assert len(choose_layers(probe, len(spec.layers))[0].skipped_layers) == 1


def test_a_text_too_short_is_refused(tiny_model):
    with pytest.raises(ConfigError, match="at least 17 are needed"):
        calibrate_layers(EngineConfig(model=str(tiny_model)), "a", 100)


def test_the_command_prints_a_configuration(idle_layer, tmp_path, capsys):
    (tmp_path / "text").write_text(TEXT)
    out = tmp_path / "out.json"
    assert main(["calibrate-layers", str(idle_layer), str(tmp_path / "text"), "--no-progress", "--output-json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "agreement" in printed.splitlines()[0]
    assert json.loads(out.read_text())["choices"][0]["skipped_layers"] == [1]


def test_costs_are_right_when_the_machine_becomes_a_hundred_times_faster_meanwhile(tiny_model, monkeypatch):
    spec = read_model_spec(tiny_model, "auto")
    model = build_model(spec, open_parameters(tiny_model, spec), 256, 16)
    probe = LayerProbe(model, [list(range(100))])
    clock, steps = [0.0], []

    def step(tokens, *_, layers=None, **__):
        steps.append(1)
        clock[0] += (len(tokens) + 3 * len(range(4) if layers is None else layers)) * (100.0 if len(steps) < 40 else 1.0)

    monkeypatch.setattr(model, "step", step)
    monkeypatch.setattr("quire.speculate.layer_probe.time.perf_counter", lambda: clock[0])
    assert probe.cost(1, [0, 1, 2]) == pytest.approx(10 / 13)
    assert probe.cost(1, [0, 1]) == pytest.approx(7 / 13)
    assert probe.cost(9) == pytest.approx(21 / 13)
