"""Logits of the native decoder against transformers (eager attention, eager loop over experts), for every family and case."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.native import load_native
from quire.model.build import whole_prompt_logits
from quire.model.checkpoint import load_parameters
from quire.model.config_reader import read_model_spec
from quire.model.native_decoder import NativeDecoder
from quire.model.native_model import native_refusal
from tests.golden.all_cases import ALL_CASES
from tests.golden.make_checkpoints import reference_model

pytestmark = [
    pytest.mark.golden,
    pytest.mark.skipif(load_native() is None, reason="the native kernels are not built"),
]

VOCAB_SIZE = 131
# Shorter and longer than a KV block (16), a window (11) and the original length of the scaled ropes (16, 32).
LENGTHS = (1, 10, 17, 40)
BLOCK_SIZE = 16
F32_TOLERANCE = 5e-5
# In bfloat16 the oracle itself is off: transformers' own bfloat16 against its float32 says by how much. The native path rounds
# less often (sums, norms and the residual stay in float32; it measured 0.4 to 1.2 of that error at the worst logit, 0.6 to 0.9
# in the mean), so it may not be further off than half as much again.
BF16_SHARE = 1.5
BF16_FLOOR = 2e-3
# Two experts whose router logits are closer than this can change places in bfloat16 (logits of about 1, rounded at 2^-8 in
# several places); then another function is computed, and no bound holds. The prompts of mixtures have no such tokens.
LEAST_ROUTER_MARGIN = 0.04


def _random_prompt(length):
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def _prompt_without_near_ties(model, length):
    """Return a prompt grown token by token, in which the experts of every token are clear in float32."""
    draws = iter(_random_prompt(4 * length))
    token_ids = []
    while len(token_ids) < length:
        token_ids.append(next(draws))
        with torch.inference_mode():
            layers = model(torch.tensor([token_ids]), output_router_logits=True).router_logits
        last = torch.stack([layer[-1].float() for layer in layers]).sort(1, descending=True).values
        top_k = model.config.num_experts_per_tok
        if (last[:, top_k - 1] - last[:, top_k]).min() < LEAST_ROUTER_MARGIN:
            token_ids.pop()
    return token_ids


def _prompts(model):
    if getattr(model.config, "num_experts_per_tok", None) is None or getattr(model.config, "moe_layers", None) == []:
        return [_random_prompt(length) for length in LENGTHS]
    longest = _prompt_without_near_ties(model, max(LENGTHS))
    return [longest[:length] for length in LENGTHS]


def _reference_logits(model, prompts):
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0].float() for prompt in prompts]


def _native_logits(folder, dtype, prompts):
    spec = read_model_spec(folder, dtype)
    assert native_refusal(spec, BLOCK_SIZE) is None
    found = []
    for prompt in prompts:
        # The length of the prompt decides dynamic and longrope in transformers, max_model_len does here.
        decoder = NativeDecoder(load_native(), spec, load_parameters(folder, spec), max_model_len=len(prompt))
        found.append(whole_prompt_logits(decoder, prompt, BLOCK_SIZE))
        assert found[-1].shape == (len(prompt), VOCAB_SIZE)
    return found


def _errors(found, exact):
    return torch.cat([(a - b).abs().flatten() for a, b in zip(found, exact, strict=True)])


@pytest.mark.parametrize("case", ALL_CASES)
def test_f32_logits_are_those_of_transformers(checkpoint, case):
    folder, prompts = checkpoint(case, "v5"), [_random_prompt(length) for length in LENGTHS]
    want = _reference_logits(reference_model(folder), prompts)
    assert _errors(_native_logits(folder, "float32", prompts), want).max() <= F32_TOLERANCE


@pytest.mark.parametrize("case", ALL_CASES)
def test_bf16_logits_are_not_much_further_from_f32_than_those_of_transformers(checkpoint, case):
    folder = checkpoint(case, "v5")
    model = reference_model(folder)
    prompts = _prompts(model)
    exact = _reference_logits(model, prompts)
    theirs = _errors(_reference_logits(reference_model(folder, torch.bfloat16), prompts), exact)
    ours = _errors(_native_logits(folder, "bfloat16", prompts), exact)
    assert ours.max() <= BF16_SHARE * theirs.max() + BF16_FLOOR
    assert ours.mean() <= BF16_SHARE * theirs.mean() + BF16_FLOOR / 10
