"""Typical acceptance: by its formula, lossy where it is asked for, and never else."""

import json
import math

import pytest
import torch

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.contracts.request import Request
from quire.sampling.row_state import SamplingRow
from quire.speculate.draft import ROOT, Draft
from quire.speculate.typical import TypicalAcceptance, target_probs
from quire.speculate.verifier import Candidate, verify

VOCAB = 12
TYPICAL = TypicalAcceptance(0.09, 0.3)


def row(seed=0, **params):
    params = {"temperature": 1.0, "max_tokens": 8, **params}
    request = Request(request_id=str(seed), prompt_token_ids=(1, 2, 3), params=SamplingParams(**params), seed=seed)
    return SamplingRow(request, 0, (1, 2, 3), VOCAB)


def worlds(count, scale):
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(7)) * scale


def entropy(law):
    return -sum(p * math.log(p) for p in law.tolist() if p > 0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("params", [{}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.7}, {"repetition_penalty": 1.4}])
def test_law_is_what_the_sampler_draws_by(params):
    """Over many seeds, by chi-square; the penalty is on prompt tokens."""
    logits = worlds(1, 1.5)[0]
    num_seeds = 3000
    law = target_probs(logits, row(**params))
    counts = [0] * VOCAB
    candidates = [Candidate(row(seed, **params), Draft(), 0) for seed in range(num_seeds)]
    for walk in verify(logits.expand(num_seeds, VOCAB), candidates):
        counts[walk.tokens[0]] += 1
    assert all(count == 0 for count, share in zip(counts, law.tolist(), strict=True) if share == 0)
    found = sum((n - num_seeds * p) ** 2 / (num_seeds * p) for n, p in zip(counts, law.tolist(), strict=True) if p > 0)
    assert found < 45.0  # p < 1e-4 with 11 degrees of freedom or fewer


@pytest.mark.parametrize(
    ("params", "num_left"),
    [({"top_p": 0.95}, 940), ({"min_p": 0.2}, 1000), ({"top_p": 0.5, "min_p": 0.2}, 490), ({"top_k": 300}, 1000)],
)
def test_law_holds_what_a_flat_distribution_leaves_beyond_the_best_few_hundred(params, num_left):
    params = {"temperature": 1.0, "max_tokens": 8, **params}
    request = Request(request_id="a", prompt_token_ids=(1, 2, 3), params=SamplingParams(**params), seed=0)
    logits = torch.linspace(0.0, 0.1, 1000)
    logits[:] = logits if "top_p" in params else 1.0  # all tie
    law = target_probs(logits, SamplingRow(request, 0, (1, 2, 3), 1000))
    kept = law > 0
    assert law.sum().item() == pytest.approx(1.0, abs=1e-4)
    assert num_left - 20 <= int(kept.sum()) <= num_left + 20
    if "top_p" in params:  # the best ones, and no others
        assert bool(kept[-int(kept.sum()) :].all())
    assert torch.allclose(law[kept], logits[kept].softmax(0), atol=1e-6)


@pytest.mark.covering
@pytest.mark.parametrize("scale", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("bounds", [(0.09, 0.3), (0.3, 0.9), (0.02, 0.05)])
def test_a_draft_is_taken_if_and_only_if_it_was_sampled_or_is_likelier_than_the_bound(scale, bounds):
    typical = TypicalAcceptance(*bounds)
    num_taken = 0
    for seed, logits in enumerate(worlds(150, scale)):
        law = logits.softmax(0)
        bound = min(bounds[0], bounds[1] * math.exp(-entropy(law)))
        assert typical.bound(law) == pytest.approx(bound, rel=1e-5)
        drafts = [seed % VOCAB, (seed + 5) % VOCAB]
        (sampled,) = verify(logits[None], [Candidate(row(seed), Draft(), 0)])
        both = torch.stack([logits, logits, logits])
        (walk,) = verify(both, [Candidate(row(seed), Draft(tuple(drafts), (ROOT, ROOT)), 1)], typical)
        best = max(drafts, key=lambda token_id: float(law[token_id]))
        if sampled.tokens[0] in drafts:
            expected = sampled.tokens[0]
        elif float(law[best]) > bound:
            expected, num_taken = best, num_taken + 1
        else:
            expected = sampled.tokens[0]
        assert walk.tokens[0] == expected
        assert len(walk.path) == (expected in drafts) == len(walk.tokens) - 1
    assert num_taken > 0


def test_greedy_tokens_are_exact():
    for seed, logits in enumerate(worlds(50, 0.2)):
        candidate = Candidate(row(seed, temperature=0.0), Draft.chain((seed % VOCAB,)), 1)
        (walk,) = verify(torch.stack([logits, logits]), [candidate], TYPICAL)
        assert walk.tokens[0] == int(logits.argmax())
        assert len(walk.path) == (walk.tokens[0] == seed % VOCAB)


def test_law_of_the_tokens_is_another_one():
    """What makes it lossy; the same draft leaves the law alone in test_law."""
    logits = worlds(1, 1.0)[0]
    best, num_seeds = int(logits.argmax()), 500
    both = torch.cat([logits.expand(num_seeds, VOCAB)] * 2)
    candidates = [Candidate(row(seed), Draft.chain((best,)), num_seeds + seed) for seed in range(num_seeds)]
    assert all(walk.tokens[0] == best for walk in verify(both, candidates, TYPICAL))


def generate(model, method, **params):
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": False}
    llm = LLM(str(model), num_kv_blocks=80, speculative_config={**config, "acceptance_method": method})
    requests = [SamplingParams(**{"max_tokens": 40, "seed": seed, **params}) for seed in range(4)]
    outputs = llm.generate([[5, 6, 7] * 4] * 4, requests, use_tqdm=False)
    stats = llm.llm_engine.stats
    llm.close()
    return [output.outputs[0] for output in outputs], stats.num_accepted_tokens / max(1, stats.num_draft_tokens)


def test_more_is_accepted_of_sampled_requests_and_each_token_has_its_log_probability(tiny_model):
    options = {"temperature": 0.7, "ignore_eos": True, "logprobs": 1}
    _, exact = generate(tiny_model, "rejection_sampler", **options)
    choices, share = generate(tiny_model, "typical_acceptance_sampler", **options)
    assert share > exact
    for choice in choices:
        assert len(choice.logprobs) == len(choice.token_ids) == 40
        assert all(token_id in entry for token_id, entry in zip(choice.token_ids, choice.logprobs, strict=True))


def test_greedy_outputs_are_those_of_plain_decoding(tiny_model):
    options = {"temperature": 0.0, "ignore_eos": True}
    found, _ = generate(tiny_model, "typical_acceptance_sampler", **options)
    expected, _ = generate(tiny_model, "rejection_sampler", **options)
    assert [choice.token_ids for choice in found] == [choice.token_ids for choice in expected]


def test_constraints_are_kept(tiny_model):
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["one", "other"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    asked = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    choices, _ = generate(tiny_model, "typical_acceptance_sampler", temperature=1.0, structured_outputs=asked)
    assert all(json.loads(choice.text)["a"] in ("one", "other") for choice in choices)
