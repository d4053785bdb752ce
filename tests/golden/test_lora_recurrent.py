"""LoRA adapters of models with a recurrent state give the logits of a model of transformers into which they are merged."""

from __future__ import annotations

import re

import pytest
from safetensors.torch import load_file

from quire import LoRARequest
from quire.model.config_reader import read_model_spec
from quire.model.lora.adapter import AdapterReader
from tests.golden.make_checkpoints import reference_model
from tests.golden.test_lora import F32_TOLERANCE, KINDS, PROMPTS, engine, generate, is_equal
from tests.golden.test_lora_experts import check
from tests.lora_adapter import write_adapter, write_merged

pytestmark = pytest.mark.golden

NOT_LINEAR = re.compile(r".*(embed|embeddings|norm)\w*\.weight")
TOLERANCES = {"zamba2": 1e-3}
"""Whose blocks without residual connections amplify rounding: with the merged adapter transformers in f32 differs from f64 by
1e-4 of the largest logit."""
CASES = ("kimi-linear", "falcon-h1")
LAST_LAYERS = ("qwen3-next", "jamba", "kimi-linear", "nemotron-h", "mamba2")
MORE = (
    "lfm2",
    "jamba",
    "qwen3-next",
    "qwen3-5",
    "lfm2-moe",
    "bamba",
    "nemotron-h",
    "granite-hybrid",
    "mamba",
    "mamba2",
    "zamba2",
)


def linear_layers(folder):
    """Return module -> [out, in] of all matrices of a checkpoint, but for embeddings."""
    tensors = load_file(folder / "model.safetensors")
    names = [name for name, tensor in tensors.items() if tensor.dim() == 2 and name.endswith(".weight")]
    return {name.removesuffix(".weight"): tuple(tensors[name].shape) for name in names if not NOT_LINEAR.fullmatch(name)}


@pytest.mark.covering
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)])
def test_every_linear_layer_of_a_recurrent_model_is_adapted(checkpoint, tmp_path, case, kind):
    folder = checkpoint(case, "v5")
    deltas = write_adapter(tmp_path / "a", linear_layers(folder), rank=3)
    merged = write_merged(folder, tmp_path / "merged", deltas)
    adapter = AdapterReader(folder, read_model_spec(folder), 16).read(str(tmp_path / "a"))
    check(folder, reference_model(merged), adapter, kind, TOLERANCES.get(case, F32_TOLERANCE))


@pytest.mark.parametrize("case", ["lfm2", "falcon-h1", *(pytest.param(case, marks=pytest.mark.slow) for case in LAST_LAYERS)])
def test_chunks_states_and_cached_prefixes_keep_adapters_apart(checkpoint, tmp_path, case):
    folder = checkpoint(case, "v5")
    for seed, name in enumerate(("one", "two")):
        deltas = write_adapter(tmp_path / name, linear_layers(folder), rank=3, seed=seed)
    one, two = (LoRARequest(name, number, str(tmp_path / name)) for number, name in enumerate(("one", "two"), start=1))
    llm = engine(folder, max_num_batched_tokens=16)
    prompts, loras = [PROMPTS[0]] * 3, [one, None, two]
    found, again = generate(llm, prompts, loras), generate(llm, prompts, loras)
    llm.close()
    assert is_equal(found, again)
    for model, output in ((folder, found[1]), (write_merged(folder, tmp_path / "merged", deltas), found[2])):
        plain = engine(model, enable_lora=False)
        assert is_equal([output], generate(plain, prompts[:1], None))
        plain.close()
    assert len({tuple(output.token_ids) for output in found}) == 3
