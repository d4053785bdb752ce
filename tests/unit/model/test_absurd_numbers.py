"""Numbers in config.json that no model has are errors that name the key, found at once."""

import json

import pytest
import torch

from quire.base.errors import ConfigError, ModelFormatError
from quire.contracts.config import EngineConfig
from quire.model.build import build_model, whole_prompt_logits
from quire.model.checkpoint import open_parameters
from quire.model.config_reader import read_model_spec
from quire.worker.build import build_runner
from quire.worker.inspect import inspect_model
from tests.tiny_checkpoint import write_checkpoint


def write(folder, source, **changes):
    config = {**json.loads((source / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return EngineConfig(model=str(folder), num_kv_blocks=4)


@pytest.mark.covering(keep=False)
@pytest.mark.parametrize(
    "key",
    ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "rms_norm_eps", "rope_theta"],
)
@pytest.mark.parametrize("value", [10**400, 0, -1, "x", [1]])
def test_absurd_value_is_refused_with_its_key(tiny_model, tmp_path, key, value):
    with pytest.raises(ModelFormatError, match=key):
        inspect_model(write(tmp_path, tiny_model, **{key: value}))


def test_absurd_number_of_layers_is_refused(tiny_model, tmp_path):
    with pytest.raises(ModelFormatError, match="num_hidden_layers must be at most 10000, got 1000000"):
        inspect_model(write(tmp_path, tiny_model, num_hidden_layers=10**6))


@pytest.mark.parametrize(
    ("model_type", "values", "reason"),
    [
        ("mpt", {"n_layers": 2**40}, "n_layers must be at most 10000"),
        ("exaone", {"num_layers": 2**40}, "num_layers must be at most 10000"),
        ("mpt", {"n_heads": 2**40, "d_model": 2**40}, "heads of a model with ALiBi must be at most 4096, got 1099511627776"),
    ],
)
def test_absurd_sizes_under_other_names_are_refused(tmp_path, model_type, values, reason):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **values}))
    with pytest.raises(ModelFormatError, match=reason):
        read_model_spec(tmp_path)


def test_absurd_rope_factor_is_refused(tiny_model, tmp_path):
    with pytest.raises(ModelFormatError, match="factor"):
        inspect_model(write(tmp_path, tiny_model, rope_scaling={"rope_type": "linear", "factor": 10**400}))


def test_absurd_longrope_divisor_is_refused(tiny_model, tmp_path):
    scaling = {"rope_type": "longrope", "short_factor": [10**400] * 4, "long_factor": [1.0] * 4, "factor": 2.0}
    with pytest.raises(ModelFormatError, match="short_factor must be a list of positive numbers"):
        inspect_model(write(tmp_path, tiny_model, rope_scaling=scaling))


def test_long_context_takes_no_memory_that_the_pool_cannot_use(tiny_model, tmp_path):
    for path in tiny_model.iterdir():
        if path.name != "config.json":
            (tmp_path / path.name).symlink_to(path)
    runner, report = build_runner(write(tmp_path, tiny_model, max_position_embeddings=10**12))
    assert report.memory.max_model_len == 10**12
    runner.close()


def test_window_beyond_32_bits_is_none(tmp_path):
    logits = []
    for window in (None, 2**31, 2**40):
        folder = write_checkpoint(tmp_path / str(window), "mistral", sliding_window=window)
        spec = read_model_spec(folder)
        decoder = build_model(spec, open_parameters(folder, spec), 64, block_size=16)
        logits.append(whole_prompt_logits(decoder, list(range(40))))
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_model_too_large_for_the_machine_is_refused_with_the_numbers(tiny_model, tmp_path):
    with pytest.raises(ConfigError, match="does not fit"):
        build_runner(write(tmp_path, tiny_model, vocab_size=2**40))


def test_revision_is_of_the_model_and_not_of_another_tokenizer(tiny_model, monkeypatch):
    from quire.worker import inspect

    asked = []

    def resolve(model, revision=None):
        asked.append((model, revision))
        return tiny_model

    monkeypatch.setattr(inspect, "resolve_model", resolve)
    inspect_model(EngineConfig(model="a/b", revision="abc", tokenizer="c/d", num_kv_blocks=4))
    inspect_model(EngineConfig(model="a/b", tokenizer="c/d", skip_tokenizer_init=True, num_kv_blocks=4))
    assert asked == [("a/b", "abc"), ("c/d", None), ("a/b", None)]
