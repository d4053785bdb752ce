"""Sampled tokens follow the model's law whatever is drafted, and the cache holds what a fresh prefill would put there."""

from types import SimpleNamespace

import pytest
import torch
from proposers import PROPOSERS, install

from quire import LLM, SamplingParams
from quire.contracts.request import Request
from quire.kernels.native import load_native
from quire.sampling.row_state import SamplingRow
from quire.speculate.draft import ROOT, Draft
from quire.speculate.verifier import Candidate, verify

VOCAB = 12
NUM_SEEDS = 4000
LIMIT = 60.0  # of chi-square with at most 23 degrees of freedom: p < 1e-4


def chi_square(counts, shares):
    total = sum(counts)
    return sum((count - total * share) ** 2 / (total * share) for count, share in zip(counts, shares, strict=True))


def row(seed, temperature=1.0):
    params = SamplingParams(temperature=temperature, max_tokens=8)
    request = Request(request_id=str(seed), prompt_token_ids=(1, 2, 3), params=params, seed=seed)
    return request, SamplingRow(request, 0, (1, 2, 3), VOCAB)


@pytest.fixture(scope="module")
def world():
    """Logits behind the root, and behind every first token (row 1 + token)."""
    return torch.randn(1 + VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)) * 1.5


def pairs(world, make_draft, accept=None):
    """Return the counts of first tokens, and of second tokens behind the likeliest first, over many seeds."""
    best = int(world[0].argmax())
    first, second = [0] * VOCAB, [0] * VOCAB
    candidates: list[Candidate] = []
    offset = NUM_SEEDS
    for seed in range(NUM_SEEDS):
        draft = make_draft(seed)
        candidates.append(Candidate(*row(seed), draft, offset))
        offset += len(draft)
    logits = torch.cat([world[0].expand(NUM_SEEDS, VOCAB), *(world[[1 + t for t in c.draft.tokens]] for c in candidates)])
    for walk, candidate in zip(verify(logits, candidates), candidates, strict=True):
        tokens = walk.tokens if accept is None else accept(walk, candidate)
        first[tokens[0]] += 1
        if tokens[0] == best and len(tokens) > 1:
            second[tokens[1]] += 1
    return first, second, best


@pytest.mark.parametrize("kind", ["likeliest", "tree", "unlikely"])
def test_tokens_follow_the_law_when_drafts_do_not(world, kind):
    order = world[0].argsort(descending=True).tolist()
    drafts = {
        "likeliest": Draft.chain((order[0],)),
        "tree": Draft(tuple(order[:4]), (ROOT,) * 4),
        "unlikely": Draft((order[-1], order[0]), (ROOT, ROOT)),
    }
    first, second, best = pairs(world, lambda seed: drafts[kind])
    assert sum(first) == NUM_SEEDS
    assert chi_square(first, world[0].softmax(0).tolist()) < LIMIT
    assert sum(second) == first[best]  # where the draft was right, the same step gave the next token too
    assert chi_square(second, world[1 + best].softmax(0).tolist()) < LIMIT


def test_the_test_of_the_law_fails_when_drafts_are_believed(world):
    best = int(world[0].argmax())

    def believe_some(walk, candidate):
        return [best] if candidate.request.seed % 10 == 0 else walk.tokens  # a tenth of the drafts pass unverified

    first, _, _ = pairs(world, lambda seed: Draft.chain((best,)), believe_some)
    assert chi_square(first, world[0].softmax(0).tolist()) > LIMIT


@pytest.mark.skipif(load_native() is None, reason="needs the native kernels, whose sums have one order")
@pytest.mark.parametrize("kind", PROPOSERS)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_cache_holds_after_every_step_what_a_fresh_prefill_would(tiny_model, kind, kv_cache_dtype):
    options = {"block_size": 16, "num_kv_blocks": 40, "kv_cache_dtype": kv_cache_dtype, "dtype": "bfloat16"}
    prompts = [list(range(20, 50)), [7, 8, 9]]
    requests = [SamplingParams(temperature=i * 0.9, seed=i, max_tokens=40, ignore_eos=True) for i in range(2)]
    fresh = LLM(str(tiny_model), enable_prefix_caching=False, **options)
    outputs = fresh.generate(prompts, requests, use_tqdm=False)
    by_prompt = {(tuple(o.prompt_token_ids), 0): o.outputs[0].token_ids for o in outputs}
    llm = LLM(str(tiny_model), speculative_config={"method": "ngram"}, **options)
    install(llm, PROPOSERS[kind](5, by_prompt), 5)
    engine = llm.llm_engine
    for index, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        engine.add_request(str(index), prompt, request)
    num_compared = 0
    while engine.has_unfinished_requests():
        engine.step()
        for sequence in engine.scheduler.running:
            num_compared += 1
            expect_same_cache(fresh, engine, sequence)
    assert num_compared > 10
    fresh.close()
    llm.close()


def expect_same_cache(fresh, engine, sequence):
    """Prefill the computed tokens elsewhere and compare every layer's keys, values and scales, token by token."""
    computed = sequence.token_ids[: sequence.num_computed_tokens]
    other = fresh.llm_engine
    other.add_request("fresh", computed, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    other.step()
    (alone,) = other.scheduler.running
    caches = [SimpleNamespace(kv=e._runner._kv, table=s.block_ids) for e, s in ((engine, sequence), (other, alone))]
    for first in range(0, len(computed), 16):
        whole = first + 16 <= len(computed)
        blocks = [cache.table[first // 16] for cache in caches]
        for layer in range(len(caches[0].kv.k)):
            for part in ("k", "v"):
                ours, theirs = (getattr(c.kv, part)[layer][b] for c, b in zip(caches, blocks, strict=True))
                if whole:
                    assert torch.equal(ours, theirs)
            for kind in range(2 if caches[0].kv.scales else 0):
                ours, theirs = (c.kv.scales[layer][kind][b] for c, b in zip(caches, blocks, strict=True))
                count = min(16, len(computed) - first)
                assert torch.equal(ours[:, :count], theirs[:, :count])
    other.abort_request("fresh")
