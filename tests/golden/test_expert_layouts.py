"""Checkpoints that store each expert by itself and those that stack them, as transformers 5 may, give the same parameters."""

from __future__ import annotations

import pytest
import torch

from quire.model.checkpoint import load_parameters
from quire.model.config_reader import read_model_spec
from tests.golden.make_checkpoints import case_params, reference_model

pytestmark = pytest.mark.golden

CASES = (
    *("mixtral", "qwen3-moe", "qwen2-moe", "olmoe", "flex-olmo", "glm4-moe", "minimax-m2", "ernie4-5-moe", "hunyuan-moe"),
    *("phimoe", "granitemoe", "granitemoe-shared", "dots1", "solar-open", "exaone-moe", "deepseek-v2", "deepseek-v3"),
    *("glm4-moe-lite", "mistral4", "deepseek-v32"),
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", case_params(CASES))
def test_stacked_experts_are_those_that_are_stored_one_by_one(checkpoint, tmp_path, case):
    folder = checkpoint(case, "v5")
    reference_model(folder).save_pretrained(tmp_path, save_original_format=False)
    spec = read_model_spec(folder)
    assert read_model_spec(tmp_path) == spec
    expected, found = load_parameters(folder, spec), load_parameters(tmp_path, spec)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
