"""Verification of some of a step's sequences, whose logits may lie on a device."""

import random

import pytest
import torch

from quire import SamplingParams
from quire.contracts.request import Request
from quire.sampling.row_state import SamplingRow
from quire.sampling.sampler import sample
from quire.speculate.draft import Draft
from quire.speculate.typical import TypicalAcceptance
from quire.speculate.verifier import Candidate, verify, verify_sampled

VOCAB, NUM_SEQS, NUM_DRAFTS = 12, 6, 5


def candidates_of(logits):
    """Return candidates whose drafts are followed for the first few tokens, more of them for each one."""
    best = logits.argmax(-1).tolist()
    found = []
    for index in range(NUM_SEQS):
        first = NUM_SEQS + index * NUM_DRAFTS
        rows = [index, *range(first, first + NUM_DRAFTS - 1)]
        tokens = [best[row] if place < index else (best[row] + 1) % VOCAB for place, row in enumerate(rows)]
        params = SamplingParams(max_tokens=100, temperature=0.0, logprobs=2)
        request = Request(request_id=str(index), prompt_token_ids=(1, 2), params=params, seed=0)
        found.append(Candidate(SamplingRow(request, 0, (1, 2), VOCAB), Draft.chain(tuple(tokens)), first))
    return found


@pytest.mark.covering(keep=False)
@pytest.mark.parametrize("chosen", [[0, 1, 2, 3, 4, 5], [2, 3, 4], [0, 3, 5], [4], [5, 1]])
@pytest.mark.parametrize("is_typical", [False, True])
def test_some_sequences_are_verified_as_with_all_others_and_never_with_more_rows_than_there_are(chosen, is_typical):
    logits = torch.randn(NUM_SEQS * (1 + NUM_DRAFTS), VOCAB, generator=torch.Generator().manual_seed(1))
    all_walks = verify(logits, candidates_of(logits))
    assert [len(verification.path) for verification in all_walks] == list(range(NUM_SEQS))
    num_rows = []

    def draw(part, rows, options):
        num_rows.append(len(part))
        return [(int(part[row].argmax()), 0) for row in rows]

    own = candidates_of(logits)
    typical = TypicalAcceptance(0.09, 0.3) if is_typical else None
    verifications = verify(logits, [own[index] for index in chosen], typical, draw=draw, rows=chosen)
    assert [(verification.tokens, verification.path) for verification in verifications] == [
        (all_walks[i].tokens, all_walks[i].path) for i in chosen
    ]
    assert [verification.logprobs for verification in verifications] == [all_walks[i].logprobs for i in chosen]
    assert num_rows == [sum(index >= level for index in chosen) for level in range(max(chosen) + 1)]


def test_what_is_not_drawn_on_a_device_is_brought_from_it_row_by_row(monkeypatch):
    logits = torch.randn(NUM_SEQS * (1 + NUM_DRAFTS), VOCAB, generator=torch.Generator().manual_seed(2))
    brought = []
    fetch = torch.Tensor.cpu

    def cpu(tensor):
        brought.append(len(tensor))
        return fetch(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    own = candidates_of(logits)
    verifications = verify(logits, [own[index] for index in (1, 3)], TypicalAcceptance(0.09, 0.3), rows=[1, 3])
    assert brought == [2, 2, 1, 1]
    plain = verify(logits, candidates_of(logits))
    assert [verification.tokens for verification in verifications] == [plain[1].tokens, plain[3].tokens]


@pytest.mark.parametrize("seed", range(40))
def test_a_chain_is_walked_as_any_tree_is(seed):
    rng = random.Random(seed)
    count = rng.randrange(7)
    drafted = tuple(rng.randrange(3) for _ in range(count))
    drawn = [rng.choice([*drafted[index : index + 1], rng.randrange(3)]) for index in range(count + 1)]
    params = SamplingParams(
        max_tokens=100, temperature=0.0, min_tokens=rng.randrange(4), stop_token_ids=rng.sample(range(3), rng.randrange(2))
    )
    request = Request(
        request_id="a", prompt_token_ids=(1, 2), params=params, seed=0, eos_token_ids=frozenset({rng.randrange(6)})
    )
    verifications = []
    for errors in ({}, {-1: None}):  # of a row that is not there: nothing is asked but the general verification
        sampling = SamplingRow(request, 0, (1, 2), VOCAB)
        (verification,) = verify_sampled(drawn, [Candidate(sampling, Draft.chain(drafted), 1)], [0], errors)
        verifications.append((verification.tokens, verification.path, verification.error, list(sampling.output_token_ids)))
    assert verifications[0] == verifications[1]
    assert len(verifications[0][0]) == len(verifications[0][1]) + 1


class OneWay:
    """A grammar, and its matcher, that lets nothing but these tokens come."""

    has_given_up = False

    def __init__(self, tokens):
        self.tokens, self.num_taken = tokens, 0

    def new_matcher(self):
        return OneWay(self.tokens)

    def advance(self, token_id):
        assert token_id == self.tokens[self.num_taken]
        self.num_taken += 1

    @property
    def is_complete(self):
        return self.num_taken == len(self.tokens)


def mask_of(token_id):
    return torch.tensor([1 << token_id], dtype=torch.int32)


class Forced:
    """A constrained sequence that drafts what its grammar forces, and how it is verified."""

    way = (7, 3, 9, 4)

    def __init__(self, drafted, options, monkeypatch):
        self.drafted = drafted
        self.params = SamplingParams(max_tokens=100, temperature=1.0, **options)
        self.logits = torch.randn(1 + len(drafted), VOCAB, generator=torch.Generator().manual_seed(3))
        self.num_rows = []
        monkeypatch.setattr("quire.speculate.verifier.sample", self._sample)

    def _sample(self, part, rows, draw):
        self.num_rows.append(len(rows))
        return sample(part, rows, draw)

    def verify(self, num_forced, num_unasked=0):
        """Verify a draft with the given number of forced first tokens, and of tokens without logits."""
        request = Request(
            request_id="a",
            prompt_token_ids=(1, 2),
            params=self.params,
            seed=0,
            grammar=OneWay(self.way),
            eos_token_ids=frozenset({5}),
        )
        sampling = SamplingRow(request, 0, (1, 2), VOCAB)
        sampling.token_mask = mask_of(self.way[0])
        masks = [mask_of(token_id) for token_id in self.way[1:]][: len(self.drafted)]
        self.num_rows.clear()
        logits = torch.cat((self.logits[:1], self.logits[1 + num_unasked :]))
        draft = Draft.chain(self.drafted)
        (verification,) = verify(logits, [Candidate(sampling, draft, 1 - num_unasked, masks, num_forced, num_unasked)])
        assert sampling.output_token_ids == verification.tokens
        assert sampling.token_mask is None
        return verification


DRAFTED = [((7, 3, 9), 3), ((7, 3, 9, 4), 4), ((7, 3, 8), 2)]


@pytest.mark.parametrize("options", [{}, {"logprobs": 2}, {"min_tokens": 2}])
@pytest.mark.parametrize(("drafted", "num_forced"), DRAFTED)
def test_forced_drafts_are_taken_as_if_they_were_sampled_but_sampled_only_where_more_is_asked_for(
    drafted, num_forced, options, monkeypatch
):
    forced = Forced(drafted, options, monkeypatch)
    plain = forced.verify(0)
    num_sampled = len(forced.num_rows)
    assert plain.tokens == list(forced.way[:num_sampled])
    assert forced.verify(num_forced) == plain
    assert len(forced.num_rows) == (num_sampled if options else num_sampled - min(num_forced, num_sampled))


@pytest.mark.parametrize(("drafted", "num_forced"), DRAFTED)
def test_behind_forced_drafts_no_logits_are_needed_but_behind_the_last(drafted, num_forced, monkeypatch):
    forced = Forced(drafted, {}, monkeypatch)
    assert forced.verify(num_forced, num_forced - 1) == forced.verify(0)


@pytest.mark.parametrize("num_forced", [0, 1, 2])
def test_where_fewer_drafts_are_forced_than_have_no_logits_the_walk_ends_with_what_is_known(num_forced, monkeypatch):
    forced = Forced((7, 3, 9, 4), {}, monkeypatch)
    verification = forced.verify(num_forced, 3)
    assert verification.tokens == list(forced.way[: max(1, num_forced)])
    assert verification.path == list(range(len(verification.tokens) - 1))
