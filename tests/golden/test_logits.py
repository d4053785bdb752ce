"""Logits of whole prompts against transformers (eager attention, eager loop over experts)."""

from __future__ import annotations

import pytest
import torch

from quire.model.build import whole_prompt_logits
from quire.model.checkpoint import load_parameters
from quire.model.config_reader import read_model_spec
from quire.model.decoder import Decoder
from tests.golden.make_checkpoints import CASES, LATENT_CASES, STRUCTURES, case_params, reference_model

pytestmark = pytest.mark.golden

VOCAB_SIZE = 131
# Shorter and longer than a KV block (16), a window (11) and the original length of the scaled ropes (16, 32).
LENGTHS = (1, 10, 17, 40)
F32_TOLERANCE = 3e-5
# transformers rounds after each operation of gelu_new; we use torch's gelu, which rounds once. It multiplies with the experts
# of gpt-oss as they are stored, transposed, in another order of sums: single rows differ by a unit in the last place.
F16_TOLERANCE = 2**-6  # a few units in the last place: float16 products of other shapes are summed in other orders
BF16_TOLERANCE = {"gpt2": 0.25, "gpt-oss": 0.05, "gpt-oss-no-bias": 0.05}
# Phi-2, GPT-NeoX and GPT-J add their two blocks before the residual; OPT scales queries before the product with keys; Llama 4
# rotates complex numbers.
BF16_TOLERANCE |= {"phi": 0.07, "phi-qk-norm": 0.07, "gpt-neox": 0.07, "gptj": 0.07, "opt": 0.25, "opt-no-bias": 0.25}
BF16_TOLERANCE["falcon-new"] = 0.15  # divides scores by a square root, and adds its two blocks before the residual
BF16_TOLERANCE |= dict.fromkeys(("llama4", "llama4-dense", "llama4-moe"), 0.05)
_OTHERWISE = (*LATENT_CASES, "mimo-v2-flash")
"""Which round in other places; mimo-v2-flash: transformers rounds scores once more in layers without sinks."""


def _prompt(length):
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def _errors(folder, dtype):
    """Return per prompt length the largest difference of a logit."""
    reference = reference_model(folder, dtype)
    spec = read_model_spec(folder, str(dtype).removeprefix("torch."))
    parameters = load_parameters(folder, spec)
    errors = []
    for length in LENGTHS:
        token_ids = _prompt(length)
        with torch.inference_mode():
            want = reference(torch.tensor([token_ids])).logits[0].float()
        # The length of the prompt decides dynamic and longrope in transformers, max_model_len does here.
        got = whole_prompt_logits(Decoder(spec, parameters, max_model_len=length), token_ids).float()
        assert got.shape == (length, VOCAB_SIZE)
        errors.append((got - want).abs().max().item())
    return errors


@pytest.mark.parametrize("case", case_params(CASES))  # the others: test_dense_families.py
def test_f32_logits_are_those_of_transformers(checkpoint, case):
    errors = _errors(checkpoint(case, "v5"), torch.float32)
    assert max(errors) <= F32_TOLERANCE, dict(zip(LENGTHS, errors, strict=True))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", case_params(case for case in STRUCTURES if case not in _OTHERWISE))
def test_bf16_logits_round_where_transformers_rounds(checkpoint, case):
    errors = _errors(checkpoint(case, "v5"), torch.bfloat16)
    assert max(errors) <= BF16_TOLERANCE.get(case, 0.0), dict(zip(LENGTHS, errors, strict=True))


@pytest.mark.parametrize("case", ["llama", "gemma2", "qwen3-moe", "gpt2-scaled"])
def test_f16_logits_round_where_transformers_rounds(checkpoint, case):
    errors = _errors(checkpoint(case, "v5"), torch.float16)
    assert max(errors) <= F16_TOLERANCE, dict(zip(LENGTHS, errors, strict=True))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", case_params())
def test_both_config_styles_give_one_spec(checkpoint, case):
    assert read_model_spec(checkpoint(case, "v5")) == read_model_spec(checkpoint(case, "v4"))
