"""Verification of drafts: samples along a draft exactly as plain decoding would, and stops where the draft differs.

Every token is sampled by the ordinary sampler, from the logits after exactly the tokens before it, with the noise of its
position (kernels/reference/noise.py) and with logits processors that have seen exactly those tokens. A draft decides only for
how many tokens the logits exist already. So the tokens are those of plain decoding for any draft, and no state is rolled back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from quire.contracts.step import TokenLogprobs
from quire.sampling.row_state import SamplingRow
from quire.sampling.sampler import Draw, Sampled, sample, sample_ahead, with_logprobs
from quire.speculate.draft import ROOT, Draft
from quire.speculate.typical import TypicalAcceptance

_MAX_DRAWN_ELEMENTS = 1 << 18
"""Up to this number of logits all tokens are sampled at once, needed or not; a call per level takes longer."""


_NO_ERRORS: Mapping[int, str | None] = {}


class Candidate(NamedTuple):
    """A sequence whose next tokens are sampled.

    first_draft_row  row of the logits after draft token 0, if it has drafts; the rows of the others follow
    masks            of a constrained sequence, the masks after its first draft tokens; verification ends where one is missing
    num_forced       number of leading draft tokens that are the only ones the constraint allows at their position
    num_unasked      number of leading draft tokens without logits; nothing is sampled after them
    """

    sampling: SamplingRow
    draft: Draft
    first_draft_row: int
    masks: Sequence[Tensor | None] = ()
    num_forced: int = 0
    num_unasked: int = 0

    def take_mask(self, node: int) -> bool:
        """Set the token mask after draft token `node`; return whether it is known."""
        if self.sampling.matcher is None:
            return True
        self.sampling.token_mask = self.masks[node] if node < len(self.masks) else None
        return self.sampling.token_mask is not None


@dataclass(slots=True)
class Verification:
    """The result of verifying the draft of one candidate: at least one token, or an error.

    tokens    the accepted draft tokens, then one sampled token
    logprobs  one for each token, if the request asks for them
    path      indices of the accepted draft tokens
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    error: str | None = None


def verify(
    logits: Tensor,
    candidates: Sequence[Candidate],
    typical: TypicalAcceptance | None = None,
    best: Sequence[int] | None = None,
    draw: Draw | None = None,
    rows: Sequence[int] | None = None,
) -> list[Verification]:
    """Sample the next tokens of every candidate, and append them to its sampling state.

    logits   [R, V] row i is that after the last known token of candidate i; the rows of the drafts follow. It may lie on a
             device without a `draw`: one row per candidate is then copied to the host for each level
    typical  None: tokens are those of plain decoding; else it may accept drafts that were not sampled
    best     [R] the best tokens, if these are known to be the sampled ones
    draw     samples from logits on a device; see sampling.sampler.sample
    rows     the row of each candidate after its last known token, if these candidates are not all of the step's
    """
    if best is None and draw is None and typical is None and rows is None and logits.numel() <= _MAX_DRAWN_ELEMENTS:
        best = _draw_all(logits, candidates)
    rows = range(len(candidates)) if rows is None else rows
    if best is not None:
        return verify_sampled(best, candidates, rows)
    verifications = [Verification() for _ in candidates]
    active = [index for index, candidate in enumerate(candidates) if _take_forced(candidate, verifications[index])]
    while active:
        part = _take_behind(logits, candidates, verifications, active, rows, draw)
        going: list[int] = []
        sampled = sample(part, [candidates[index].sampling for index in active], draw)
        for row, (index, found) in enumerate(zip(active, sampled, strict=True)):
            verification, candidate = verifications[index], candidates[index]
            error = candidate.sampling.grammar_error or found.error
            if found.token_id is None or error is not None:
                _fail(verification, error)
                continue
            found, node = _match(candidate, verification.path[-1] if verification.path else ROOT, found, part[row], typical)
            token_id = found.token_id
            verification.tokens.append(token_id)
            if found.logprobs is not None:
                verification.logprobs.append(found.logprobs)
            candidate.sampling.append(token_id)
            goes_on = node is not None and node >= candidate.num_unasked
            if goes_on and not _is_ended(candidate, token_id) and candidate.take_mask(node):
                verification.path.append(node)
                going.append(index)
        active = going
    for candidate in candidates:
        candidate.sampling.token_mask = None
    return verifications


def _take_forced(candidate: Candidate, verification: Verification) -> bool:
    """Append the forced draft tokens without reading logits; return whether more tokens have to be sampled."""
    sampling = candidate.sampling
    if candidate.num_forced == 0 or not sampling.takes_forced or sampling.grammar_error is not None:
        return True
    for node, token_id in enumerate(candidate.draft.tokens[: candidate.num_forced]):
        verification.tokens.append(token_id)
        sampling.append(token_id)
        if _is_ended(candidate, token_id) or not candidate.take_mask(node):
            return False
        verification.path.append(node)
    if verification.path[-1] < candidate.num_unasked:  # fewer tokens are forced than was assumed
        verification.path.pop()
        return False
    return True


def _take_behind(
    logits: Tensor,
    candidates: Sequence[Candidate],
    verifications: Sequence[Verification],
    active: Sequence[int],
    first_rows: Sequence[int],
    draw: Draw | None,
) -> Tensor:
    """Return the logits after the last accepted draft of each active candidate; first_rows: the row of those without one."""
    rows = [
        candidates[index].first_draft_row + verifications[index].path[-1] if verifications[index].path else first_rows[index]
        for index in active
    ]
    return _take_rows(logits, rows, draw)


def _take_rows(logits: Tensor, rows: Sequence[int], draw: Draw | None) -> Tensor:
    is_run = len(rows) > 0 and rows[-1] - rows[0] == len(rows) - 1 and list(rows) == list(range(rows[0], rows[-1] + 1))
    part = logits[rows[0] : rows[-1] + 1] if is_run else logits[list(rows)]
    return part if draw is not None else part.cpu()


def _match(
    candidate: Candidate, node: int, found: Sampled, logits: Tensor, typical: TypicalAcceptance | None
) -> tuple[Sampled, int | None]:
    """Return the token after `node`, sampled or a typical draft, and its index in the draft, None if it was not drafted."""
    child = candidate.draft.child(node, found.token_id)
    if child is None and typical is not None:
        child = typical.pick(logits, candidate.sampling, candidate.draft, node)
        if child is not None:
            found = with_logprobs(candidate.draft.tokens[child], logits, candidate.sampling)
    return found, child


def _draw_all(logits: Tensor, candidates: Sequence[Candidate]) -> list[int] | None:
    """Sample the tokens of all rows at once, needed or not; return None if they depend on each other."""
    rows = [candidate.sampling for candidate in candidates]
    positions = [row.position for row in rows]
    for candidate, position in zip(candidates, positions[:], strict=True):
        rows += [candidate.sampling] * len(candidate.draft)
        positions += [position + depth for depth in candidate.draft.depths()]
    return sample_ahead(logits, rows, positions)


def verify_sampled(
    drawn: Sequence[int], candidates: Sequence[Candidate], rows: Sequence[int], errors: Mapping[int, str | None] = _NO_ERRORS
) -> list[Verification]:
    """Verify drafts against tokens that are already sampled after every known token and every draft; see verify.

    drawn   [R] the sampled tokens
    rows    the row of each candidate after its last known token
    errors  row -> why no token could be sampled there
    """
    verifications = [Verification() for _ in candidates]
    for first_row, candidate, verification in zip(rows, candidates, verifications, strict=True):
        tokens, path, draft, sampling = verification.tokens, verification.path, candidate.draft, candidate.sampling
        if sampling.matcher is None and not errors and draft.is_chain:
            verification.tokens = match_chain(drawn, first_row, candidate.first_draft_row, sampling, draft)
            verification.path = list(range(len(verification.tokens) - 1))
            continue
        node, row = ROOT, first_row
        while True:
            if row in errors:
                _fail(verification, errors[row])
                break
            token_id = drawn[row]
            tokens.append(token_id)
            sampling.append(token_id)
            child = draft.child(node, token_id)
            if child is None or _is_ended(candidate, token_id):
                break
            path.append(child)
            node = child
            row = candidate.first_draft_row + node
    return verifications


def match_chain(drawn: Sequence[int], row: int, first: int, sampling: SamplingRow, draft: Draft) -> list[int]:
    """Return the next tokens of an unconstrained sequence with a chain of drafts, given the sampled tokens; see verify.

    All but the last are its accepted drafts. The tokens are appended to its sampling state.

    drawn  [R] the sampled tokens
    row    the index in `drawn` after its last known token
    first  the index in `drawn` after its first draft; those of the other drafts follow
    """
    drafted, endings = draft.tokens, sampling.ending_token_ids
    tokens = [drawn[row], *drawn[first : first + len(drafted)]]
    least, count = sampling.params.min_tokens - len(sampling.output_token_ids), 0
    for token_id in drafted:
        if tokens[count] != token_id:
            break
        count += 1
        if token_id in endings and count >= least:
            count -= 1  # nothing is generated after an end token
            break
    del tokens[count + 1 :]
    sampling.extend(tokens)
    return tokens


def _fail(verification: Verification, error: str | None) -> None:
    if verification.tokens:
        # The next step computes the same logits again, and fails as plain decoding does there.
        verification.path.pop()
    else:
        verification.error = error or "no token could be sampled"


def _is_ended(candidate: Candidate, token_id: int) -> bool:
    sampling = candidate.sampling
    if sampling.matcher is not None and (sampling.grammar_error is not None or sampling.is_grammar_complete):
        return True
    return token_id in sampling.ending_token_ids and sampling.num_output_tokens >= sampling.params.min_tokens
