"""Tiny checkpoints written by the formats' own tools, with recorded logits of the dense weights."""

from pathlib import Path

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.kernels.native import load_native
from quire.model.build import build_model, load_model, whole_prompt_logits
from quire.model.checkpoint import open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.native_decoder import NativeDecoder

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "quantised"
NAMES = sorted(path.name for path in FOLDER.glob("*/") if path.is_dir())
TOLERANCE = 1e-4
NATIVE_SHARE = 0.03
"""Of the range of the logits: native kernels quantise the inputs of integers to int8, and round to the dtype."""
INT8_INPUTS = "llama-ct-w8a8-dynamic"
"""Declares inputs that are quantised token by token, and so has them in float32, too."""

pytestmark = [pytest.mark.golden, pytest.mark.skipif(not FOLDER.is_dir(), reason="../shared/data is not there")]


@pytest.mark.parametrize("name", NAMES)
def test_f32_logits_are_those_of_the_dense_weights(name):
    golden = np.load(FOLDER / name / "golden.npz")
    token_ids = golden["ids"].reshape(-1).tolist()
    expected = torch.from_numpy(golden["logits"]).float().view(len(token_ids), -1)
    got = whole_prompt_logits(load_model(FOLDER / name, "float32"), token_ids)
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= TOLERANCE


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_the_logits_when_generated(name):
    if not (FOLDER / name / "tokenizer.json").is_file():
        pytest.skip(f"{name} has no tokenizer")
    decoder = load_model(FOLDER / name, "float32")
    llm = LLM(model=str(FOLDER / name), dtype="float32", max_model_len=64, num_kv_blocks=16)
    [output] = llm.generate(["the cat"], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True), use_tqdm=False)
    token_ids = list(output.prompt_token_ids)
    for _ in range(6):
        token_ids.append(int(whole_prompt_logits(decoder, token_ids)[-1].argmax()))
    assert list(output.outputs[0].token_ids) == token_ids[len(output.prompt_token_ids) :]


@pytest.mark.covering
@pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_native_logits_are_near_those_of_the_dense_weights(name, dtype):
    golden = np.load(FOLDER / name / "golden.npz")
    token_ids = golden["ids"].reshape(-1).tolist()
    expected = torch.from_numpy(golden["logits"]).float().view(len(token_ids), -1)
    spec = read_model_spec(FOLDER / name, dtype)
    decoder = build_model(spec, open_parameters(FOLDER / name, spec), len(token_ids), block_size=16)
    assert isinstance(decoder, NativeDecoder)
    error = (whole_prompt_logits(decoder, token_ids) - expected).abs()
    is_exact = dtype == "float32" and name != INT8_INPUTS
    assert error.max() <= (TOLERANCE if is_exact else NATIVE_SHARE * (expected.max() - expected.min()))
