"""Parameters that stay in their checkpoint: what is in memory while a model is built, and that it is the same model."""

import gc
import json
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.kernels.native import load_native
from quire.model.build import build_model, whole_prompt_logits
from quire.model.checkpoint import load_parameters, open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.quantized_writer import write_quantized
from quire.quant.parameters import QuantizedStack, StoredParameter
from quire.quant.policy import POLICIES
from quire.quant.weight import QuantizedWeight, StoredWeight
from tests.tiny_checkpoint import write_checkpoint

PROMPT = [5, 100, 7, 44, 300, 2, 9]

needs_native = pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")


def write(tmp_path, family):
    """Write a checkpoint of int4 and int8 weights."""
    source = write_checkpoint(tmp_path / "source", family)
    return write_quantized(source, tmp_path / "quantised", "int4").folder


@pytest.fixture
def unpacked(monkeypatch):
    """The codes of all weights that were unpacked, by weak references."""
    alive = []
    load = StoredWeight.load.__get__

    def record(self, instance, owner=None):
        found = load(instance, owner)
        if instance is None:
            return found

        def run():
            gc.collect()
            alive[:] = [reference for reference in alive if reference() is not None]
            weight = found()
            if isinstance(weight, QuantizedWeight):
                alive.append(weakref.ref(weight.codes))
                record.most = max(record.most, len(alive))
                record.count += 1
            return weight

        return run

    record.most = record.count = 0
    monkeypatch.setattr(StoredWeight, "load", property(lambda self: record(None, self, StoredWeight)))
    return record


def mix_experts(folder):
    """Give one expert scales of its own form: a column less in each group."""
    config = json.loads((folder / "config.json").read_text())
    return config


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_nothing_is_unpacked_when_parameters_are_opened(tmp_path, family, unpacked):
    folder = write(tmp_path, family)
    parameters = open_parameters(folder, read_model_spec(folder))
    assert all(isinstance(parameter, StoredParameter) for parameter in parameters.values())
    assert unpacked.count == 0
