"""Where config.json names no dtype, the weights do."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.base.errors import ModelFormatError
from quire.model.config_reader import read_model_spec
from quire.model.generation_defaults import read_generation_defaults


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_auto_takes_the_dtype_of_the_weights_when_config_names_none(tiny_model, tmp_path, stored):
    config = json.loads((tiny_model / "config.json").read_text())
    del config["torch_dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {k: v.to(getattr(torch, stored)) for k, v in load_file(tiny_model / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert read_model_spec(tmp_path).dtype == stored
    assert read_model_spec(tmp_path, "float32").dtype == "float32"
    (tmp_path / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
    assert read_model_spec(tmp_path).dtype == "float32"


def test_generation_defaults_are_those_that_quire_knows(tmp_path):
    assert read_generation_defaults(tmp_path) == {}
    path = tmp_path / "generation_config.json"
    path.write_text('{"temperature": 0.6, "top_k": 20, "max_length": 5, "eos_token_id": [1]}')
    assert read_generation_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20}
    path.write_text('{"do_sample": false, "temperature": 0.6}')
    assert read_generation_defaults(tmp_path) == {"temperature": 0.0}
    path.write_text('{"top_k": 50.0}')
    assert read_generation_defaults(tmp_path) == {"top_k": 50}
    path.write_text('{"top_p": 0}')
    with pytest.raises(ModelFormatError, match="generation_config.json: top_p must be"):
        read_generation_defaults(tmp_path)
    path.write_text('{"temperature": "hot"}')
    with pytest.raises(ModelFormatError, match="temperature must be a number, got 'hot'"):
        read_generation_defaults(tmp_path)
