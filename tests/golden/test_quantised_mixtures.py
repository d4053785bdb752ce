"""Mixtures and latent attention from quantised checkpoints: the logits of the numbers that these stand for."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.kernels.native import load_native
from quire.model.build import build_model, load_model, whole_prompt_logits
from quire.model.checkpoint import open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.native_decoder import NativeDecoder
from quire.quant.policy import POLICIES
from tests.golden.make_checkpoints import case_params
from tests.unit.kernels.gpu.quantized_checkpoints import CONFIGS, quantise

pytestmark = [
    pytest.mark.golden,
    pytest.mark.skipif(load_native() is None, reason="the native kernels are not built"),
]

CASES = ("qwen2-moe", "glm4-moe", "ernie4-5-moe-bias", "granitemoe-shared", "deepseek-v2-lite", "deepseek-v3", "minicpm3")
PROMPT = torch.randint(3, 131, (40,), generator=torch.Generator().manual_seed(5)).tolist()
POLICY_ERRORS = {"int8": 0.06, "int4": 0.2, "fp8": 0.25}
"""Of the mean size of logits, for their mean error; a few tokens meet other experts."""


def write(source, folder, method):
    """Write a quantised checkpoint and the dense one of its numbers; return both folders."""
    quantised, dense = (shutil.copytree(source, folder / kind) for kind in ("quantised", "dense"))
    stored, numbers = {}, {}
    for index, (name, tensor) in enumerate(load_file(dense / "model.safetensors").items()):
        module, _, kind = name.rpartition(".")
        stored[name] = numbers[name] = tensor
        if kind != "weight" or "_proj" not in module:
            continue
        del stored[name]
        parts, numbers[name] = quantise(method, tensor, index)
        stored |= {f"{module}.{part}": value for part, value in parts.items()}
    config = json.loads((dense / "config.json").read_text())
    for folder, tensors, extra in ((quantised, stored, {"quantization_config": CONFIGS[method]}), (dense, numbers, {})):
        (folder / "model.safetensors").unlink()
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**config, **extra}))
    return quantised, dense


@pytest.mark.covering
@pytest.mark.parametrize("method", ["fp8-small", "int8"])
@pytest.mark.parametrize("case", case_params(CASES))
def test_logits_are_those_of_the_dense_weights(checkpoint, tmp_path, case, method):
    quantised, dense = write(checkpoint(case, "v5"), tmp_path, method)
    want = whole_prompt_logits(load_model(dense, "float32"), PROMPT)
    spec = read_model_spec(quantised, "float32")
    model = build_model(spec, open_parameters(quantised, spec), 64, 16)
    assert isinstance(model, NativeDecoder)
    for found in (model, load_model(quantised, "float32")):
        assert (whole_prompt_logits(found, PROMPT) - want).abs().max() <= 2e-5 * (want.max() - want.min())


@pytest.mark.covering
@pytest.mark.parametrize("quantization", POLICY_ERRORS)
@pytest.mark.parametrize("case", case_params(CASES))
def test_weights_are_quantised_when_they_are_loaded(checkpoint, case, quantization):
    folder = checkpoint(case, "v5")
    spec, want = read_model_spec(folder), whole_prompt_logits(load_model(folder), PROMPT)
    dense, model = (
        build_model(spec, open_parameters(folder, spec), 64, 16, policy) for policy in (None, POLICIES[quantization])
    )
    assert isinstance(model, NativeDecoder)
    assert model.weight_bytes < dense.weight_bytes
    error = (whole_prompt_logits(model, PROMPT) - want).abs().mean() / want.abs().mean()
    assert 0 < error < POLICY_ERRORS[quantization]
