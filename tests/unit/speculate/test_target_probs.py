"""Sampled tokens follow the model's law whatever is drafted: two places together, however they are sampled and walked."""

import random

import pytest
import torch

from quire import SamplingParams
from quire.contracts.request import Request
from quire.kernels.native import load_native
from quire.sampling.row_state import SamplingRow
from quire.speculate import verifier
from quire.speculate.draft import NO_DRAFT, ROOT, Draft
from quire.speculate.typical import TypicalAcceptance
from quire.speculate.verifier import Candidate, verify

VOCAB = 12
PROMPT = (1, 2, 3)
LEAST = 1e-4
"""Probability of what is found, if the law is the one that is expected, below which it is not."""
NUM_SEEDS, MANY_SEEDS = 8000, 100_000
STRIDE = 1000  # so few that all of a step may be drawn at once
SAMPLERS = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top_k": {"temperature": 1.3, "top_k": 5},
    "top_p": {"temperature": 0.8, "top_p": 0.75},
    "all cuts": {"temperature": 1.5, "top_k": 8, "top_p": 0.9, "min_p": 0.25},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.5},
    "penalties and cuts": {"temperature": 1.2, "repetition_penalty": 1.3, "presence_penalty": 0.7, "top_p": 0.9},
    "bias": {"temperature": 0.9, "logit_bias": {2: 1.5, 7: -1.0}},
}
EDITED = ("penalties", "penalties and cuts", "bias")
"""What edits logits is sampled level by level; with the others all may be drawn before anything is walked."""


def p_value(counts, shares):
    """Return how likely counts are that differ from a law at least as much, by chi-square; rare cells are taken together."""
    total, cells = int(counts.sum()), []
    assert int(counts[shares == 0].sum()) == 0  # what is cut away is never drawn
    rest = [0.0, 0.0]
    for count, expected in zip(counts[shares > 0].tolist(), (shares[shares > 0] * total).tolist(), strict=True):
        if expected >= 5:
            cells.append((count, expected))
        else:
            rest = [rest[0] + count, rest[1] + expected]
    cells += [tuple(rest)] if rest[1] >= 5 else []
    chi_square = sum((count - expected) ** 2 / expected for count, expected in cells)
    half = torch.tensor([(len(cells) - 1) / 2, chi_square / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def law(logits, output, sampler):
    """Return the probabilities of tokens [V] after an output, computed from the definition of the parameters."""
    x = logits.double().clone()
    for token_id, bias in sampler.get("logit_bias", {}).items():
        x[token_id] += bias
    penalty = sampler.get("repetition_penalty", 1.0)
    for token_id in {*PROMPT, *output}:
        x[token_id] = x[token_id] / penalty if x[token_id] > 0 else x[token_id] * penalty
    for token_id in set(output):
        x[token_id] -= sampler.get("frequency_penalty", 0.0) * output.count(token_id) + sampler.get("presence_penalty", 0.0)
    shares = (x / sampler.get("temperature", 1.0)).softmax(0)
    order = shares.argsort(descending=True)
    shares[order[sampler.get("top_k", VOCAB) :]] = 0
    shares /= shares.sum()
    before = shares[order].cumsum(0) - shares[order]
    shares[order[before >= sampler.get("top_p", 1.0)]] = 0
    shares /= shares.sum()
    shares[shares < sampler.get("min_p", 0.0) * shares.max()] = 0
    return shares / shares.sum()


def joint_law(world, sampler):
    """Return the probabilities of two consecutive tokens [V, V]."""
    first = law(world[0], [], sampler)
    return torch.stack([first[token] * law(world[1 + token], [token], sampler) for token in range(VOCAB)])


@pytest.fixture(scope="module")
def world():
    """Logits after the prompt, and after every token (row 1 + token)."""
    return torch.randn(1 + VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)) * 1.5


def drafts(world):
    """Return functions of a seed: the drafts that two tokens are sampled along."""
    order = world[0].argsort(descending=True).tolist()
    behind = world[1:].argsort(descending=True).tolist()
    pairs = [(token, behind[token][0]) for token in order[:3]]
    tree = Draft((*order[:4], *(second for _, second in pairs)), (ROOT,) * 4 + (0, 1, 2))

    def guessed(seed):
        rng = random.Random(seed)
        size = rng.randrange(6)
        return Draft(tuple(rng.randrange(VOCAB) for _ in range(size)), tuple(rng.randrange(-1, node) for node in range(size)))

    chosen = {
        "likeliest": Draft.chain(pairs[0]),
        "tree": tree,
        "every token": Draft(tuple(range(VOCAB)), (ROOT,) * VOCAB),
        "unlikely": Draft((order[-1], order[0]), (ROOT, ROOT)),
    }
    return {"guessed": guessed, **{name: lambda seed, draft=draft: draft for name, draft in chosen.items()}}


def draw_pairs(world, make_draft, sampler, num_seeds=NUM_SEEDS, is_drawn=True, accept=None, typical=None, goes_on=None):
    """Return how often there were which two tokens [V, V], and in how many steps both came.

    is_drawn  all is sampled before anything is walked, where the sampler allows it; else level by level
    accept    changes what a verification took
    goes_on   returns the sampling state of the next step, None: that of the step before
    """
    params = SamplingParams(max_tokens=8, **({} if is_drawn else {"logprobs": 0}), **sampler)
    counts, num_both = torch.zeros(VOCAB, VOCAB, dtype=torch.int64), 0

    def verify_all(rows, drafts, roots):
        candidates, offset = [], len(rows)
        for one, draft in zip(rows, drafts, strict=True):
            candidates.append(Candidate(one, draft, offset))
            offset += len(draft)
        behind = [1 + token for draft in drafts for token in draft.tokens]
        return verify(world[[*roots, *behind]], candidates, typical), candidates

    def row(seed):
        return SamplingRow(Request(request_id="", prompt_token_ids=PROMPT, params=params, seed=seed), 0, PROMPT, VOCAB)

    for start in range(0, num_seeds, STRIDE):
        rows = [row(seed) for seed in range(start, min(start + STRIDE, num_seeds))]
        verifications, candidates = verify_all(rows, [make_draft(start + i) for i in range(len(rows))], [0] * len(rows))
        taken = [
            verification.tokens if accept is None else accept(verification, c)
            for verification, c in zip(verifications, candidates, strict=True)
        ]
        num_both += sum(len(tokens) > 1 for tokens in taken)
        short = [index for index, tokens in enumerate(taken) if len(tokens) == 1]
        later = [rows[index] if goes_on is None else goes_on(row(start + index)) for index in short]
        if later:
            more, _ = verify_all(later, [NO_DRAFT] * len(short), [1 + taken[index][0] for index in short])
            for index, verification in zip(short, more, strict=True):
                taken[index] = [taken[index][0], verification.tokens[0]]
        places = torch.tensor([tokens[0] * VOCAB + tokens[1] for tokens in taken])
        counts += places.bincount(minlength=VOCAB * VOCAB).view(VOCAB, VOCAB)
    return counts, num_both


def expect_law(counts, expected):
    assert p_value(counts.sum(1), expected.sum(1)) > LEAST
    assert p_value(counts.flatten(), expected.flatten()) > LEAST


# Each way of sampling with one of the drafts, in turn, walked both ways where it can be.
SOME = [
    (sampler, ("tree", "likeliest", "guessed", "every token")[index % 4], is_drawn)
    for index, sampler in enumerate(SAMPLERS)
    for is_drawn in ((False,) if sampler in EDITED else (True, False) if index < 2 else (index % 2 == 0,))
]


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("sampler", "kind", "is_drawn"), SOME)
def test_two_tokens_follow_the_law_together(world, monkeypatch, sampler, kind, is_drawn):
    verify_sampled, walked = verifier.verify_sampled, []

    def note(drawn, candidates, rows):
        walked.extend(candidate for candidate in candidates if len(candidate.draft) > 0)
        return verify_sampled(drawn, candidates, rows)

    monkeypatch.setattr(verifier, "verify_sampled", note)
    num_seeds = NUM_SEEDS // 4 if sampler in EDITED else NUM_SEEDS // 2
    counts, num_both = draw_pairs(world, drafts(world)[kind], SAMPLERS[sampler], num_seeds, is_drawn)
    assert (len(walked) > num_seeds / 2) is (is_drawn and load_native() is not None)
    assert num_both > num_seeds / 20
    assert is_drawn or not walked
    expect_law(counts, joint_law(world, SAMPLERS[sampler]))


# Each way of sampling with another draft, and walked both ways, in turn, where it can be.
MANY = [
    (sampler, kind, is_drawn)
    for index, sampler in enumerate(SAMPLERS)
    for place, kind in enumerate(("likeliest", "tree", "every token", "unlikely", "guessed"))
    if (place - index) % 5 == 1
    for is_drawn in [sampler not in EDITED and (index + place) % 2 == 0]
]


@pytest.mark.slow
@pytest.mark.parametrize(("sampler", "kind", "is_drawn"), MANY)
def test_two_tokens_follow_the_law_together_in_many_samples(world, sampler, kind, is_drawn):
    counts, _ = draw_pairs(world, drafts(world)[kind], SAMPLERS[sampler], NUM_SEEDS, is_drawn)
    expect_law(counts, joint_law(world, SAMPLERS[sampler]))


def leak(one_in, token_id):
    """Let one draft in so many pass unverified."""
    return lambda verification, candidate: [token_id] if candidate.sampling.seed % one_in == 0 else verification.tokens


@pytest.mark.parametrize(
    ("one_in", "num_seeds"), [(10, NUM_SEEDS), (20, NUM_SEEDS), pytest.param(50, MANY_SEEDS, marks=pytest.mark.slow)]
)
def test_the_law_is_seen_to_be_broken_when_some_drafts_pass_unverified(world, one_in, num_seeds):
    best = int(world[0].argmax())
    counts, _ = draw_pairs(world, lambda seed: Draft.chain((best,)), {}, num_seeds, accept=leak(one_in, best))
    assert p_value(counts.sum(1), joint_law(world, {}).sum(1)) < LEAST


def test_the_law_is_seen_to_be_broken_by_typical_acceptance(world):
    draft = drafts(world)["likeliest"]
    counts, _ = draw_pairs(world, draft, {}, NUM_SEEDS // 4, is_drawn=False, typical=TypicalAcceptance(0.09, 0.3))
    assert p_value(counts.sum(1), joint_law(world, {}).sum(1)) < LEAST


def test_the_law_of_both_is_seen_to_be_broken_when_they_share_their_noise(world):
    """Each by itself follows its law where the noise of one place is used at the next one: their joint law alone tells."""
    counts, _ = draw_pairs(world, lambda seed: NO_DRAFT, {}, goes_on=lambda row: row)
    expected = joint_law(world, {})
    assert p_value(counts.sum(1), expected.sum(1)) > LEAST
    assert p_value(counts.flatten(), expected.flatten()) < LEAST


WRONG = {
    "cold": {"temperature": 0.65},
    "top_p": {"temperature": 0.8},
    "penalties": {"repetition_penalty": 1.4},
    "all cuts": {"temperature": 1.5, "top_k": 8, "top_p": 0.9},
}


@pytest.mark.parametrize("sampler", [pytest.param("penalties", marks=pytest.mark.slow), "cold", "top_p", "all cuts"])
def test_another_law_is_told_from_the_right_one(world, sampler):
    counts, _ = draw_pairs(world, drafts(world)["tree"], WRONG[sampler])
    expected = joint_law(world, SAMPLERS[sampler])
    if sampler in ("top_p", "all cuts"):
        assert int(counts[expected == 0].sum()) > 0  # what would be cut away
    else:
        assert p_value(counts.flatten(), expected.flatten()) < LEAST
