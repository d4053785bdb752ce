"""The verifier: samples along a draft as plain decoding would, and stops where the draft does not follow.

Every token is the ordinary sampler's, from the logits behind exactly the tokens before it, with the noise of its position
(kernels/reference/noise.py), and processors that have seen exactly those tokens. A draft decides only for how many tokens the
logits are there already. Hence the tokens are those of plain decoding for any draft, and no state is ever rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from quire.contracts.request import Request
from quire.contracts.step import TokenLogprobs
from quire.sampling.row_state import SamplingRow
from quire.sampling.sampler import sample, sample_ahead
from quire.speculate.draft import ROOT, Draft

_MAX_DRAWN_ELEMENTS = 1 << 18
"""Logits up to which tokens are drawn that may not be needed: a call for each level takes longer."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence whose next tokens are sought.

    first_draft_row  row of the logits behind draft token 0; those of the others follow
    masks            of a constrained one, what may follow the first draft tokens; where that is not known the walk ends
    """

    request: Request
    sampling: SamplingRow
    draft: Draft
    first_draft_row: int
    masks: Sequence[Tensor | None] = ()

    def take_mask(self, node: int) -> bool:
        """Set what may follow draft token `node`; return whether that is known."""
        if self.sampling.matcher is None:
            return True
        self.sampling.token_mask = self.masks[node] if node < len(self.masks) else None
        return self.sampling.token_mask is not None


@dataclass(slots=True)
class Walk:
    """What was sampled for a candidate, at least one token or an error.

    tokens    all but the last are tokens of the draft
    logprobs  one per token, where the request asks for them
    path      the indices of those draft tokens
    """

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    path: list[int] = field(default_factory=list[int])
    error: str | None = None


def verify(logits: Tensor, candidates: Sequence[Candidate]) -> list[Walk]:
    """Sample the next tokens of every candidate, and append them to its sampling state.

    logits  [R, V] row i is that behind the last known token of candidate i; those behind drafts come after these
    """
    walks = [Walk() for _ in candidates]
    if logits.numel() <= _MAX_DRAWN_ELEMENTS and _walk_drawn(logits, candidates, walks):
        return walks
    active = list(range(len(candidates)))
    part = logits[: len(candidates)]
    while active:
        going: list[int] = []
        for index, found in zip(active, sample(part, [candidates[index].sampling for index in active]), strict=True):
            walk, candidate = walks[index], candidates[index]
            error = candidate.sampling.grammar_error or found.error
            if found.token_id is None or error is not None:
                _fail(walk, error)
                continue
            walk.tokens.append(found.token_id)
            if found.logprobs is not None:
                walk.logprobs.append(found.logprobs)
            candidate.sampling.append(found.token_id)
            node = candidate.draft.child(walk.path[-1] if walk.path else ROOT, found.token_id)
            if node is not None and not _is_ended(candidate, found.token_id) and candidate.take_mask(node):
                walk.path.append(node)
                going.append(index)
        active = going
        if active:
            rows = [candidates[index].first_draft_row + walks[index].path[-1] for index in active]
            part = logits[rows[0] : rows[0] + 1] if len(rows) == 1 else logits[rows]
    for candidate in candidates:
        candidate.sampling.token_mask = None
    return walks


def _walk_drawn(logits: Tensor, candidates: Sequence[Candidate], walks: list[Walk]) -> bool:
    """Draw all tokens at once, also those that no walk will reach; return False where they depend on each other."""
    rows = [candidate.sampling for candidate in candidates]
    positions = [row.position for row in rows]
    for candidate, position in zip(candidates, positions[:], strict=True):
        rows += [candidate.sampling] * len(candidate.draft)
        positions += [position + depth for depth in candidate.draft.depths()]
    drawn = sample_ahead(logits, rows, positions)
    if drawn is None:
        return False
    for index, (candidate, walk) in enumerate(zip(candidates, walks, strict=True)):
        row: int | None = index
        while row is not None:
            token_id = drawn[row]
            walk.tokens.append(token_id)
            candidate.sampling.append(token_id)
            node = candidate.draft.child(walk.path[-1] if walk.path else ROOT, token_id)
            row = None
            if node is not None and not _is_ended(candidate, token_id):
                walk.path.append(node)
                row = candidate.first_draft_row + node
    return True


def _fail(walk: Walk, error: str | None) -> None:
    if walk.tokens:
        # The next step computes the same logits again, and fails as plain decoding does there.
        walk.path.pop()
    else:
        walk.error = error or "no token could be sampled"


def _is_ended(candidate: Candidate, token_id: int) -> bool:
    request, sampling = candidate.request, candidate.sampling
    if sampling.matcher is not None and (sampling.grammar_error is not None or sampling.is_grammar_complete):
        return True
    return token_id in request.ending_token_ids and sampling.num_output_tokens >= request.params.min_tokens
