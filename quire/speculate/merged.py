"""Merged proposer: the drafts of several proposers in one tree, the most probable tokens first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from quire.contracts.step import StepPlan
from quire.speculate.acceptance import ALL_FADING, RECENT_FADING, AcceptanceRecord, TreeRecord
from quire.speculate.draft import ROOT, Draft, DraftBuilder, DraftedSequence, best_draft
from quire.speculate.proposer import DraftInput, Outcome, Proposer

_NOTHING = Draft()


@dataclass(slots=True)
class _Part:
    """State of one proposer for a sequence: its view of the sequence, acceptance record, number available, and draft."""

    sequence: DraftedSequence
    record: AcceptanceRecord
    num_found: int = 0
    draft: Draft = _NOTHING


class MergedProposer(Proposer):
    """Lets every proposer draft, and ranks their tokens by the acceptance of their previous drafts.

    max_tokens  of the tree
    """

    record = TreeRecord
    wants_logits = True

    def __init__(self, proposers: Sequence[Proposer], max_tokens: int) -> None:
        self.proposers = tuple(proposers)
        self._max_tokens = max_tokens
        self.pools = tuple(pool for proposer in proposers for pool in proposer.pools)
        # At most one of them reads layers: see SpeculativeConfig.
        read = [one.aux_hidden_state_layers for one in proposers if one.aux_hidden_state_layers is not None]
        self.aux_hidden_state_layers = max(read, key=len) if read else None
        self._reads = tuple(dict.fromkeys(what for proposer in proposers for what in proposer.inputs))
        self._ever = [proposer.record(max_tokens, ALL_FADING) for proposer in proposers]

    @property
    def inputs(self) -> tuple[DraftInput, ...]:
        """See Proposer."""
        return self._reads

    def apply(self, plan: StepPlan) -> None:
        """See Proposer."""
        for proposer in self.proposers:
            proposer.apply(plan)

    def forget_blocks(self) -> None:
        """See Proposer."""
        for proposer in self.proposers:
            proposer.forget_blocks()

    def on_step_states(self, what: DraftInput, fed: Sequence[tuple[DraftedSequence, int, int]], features: Tensor) -> None:
        """See Proposer."""
        for sequence, _, _ in fed:
            self._begin(sequence)
        for index, proposer in enumerate(self.proposers):
            if what in proposer.inputs:
                parts = [(self._parts(sequence)[index].sequence, first, count) for sequence, first, count in fed]
                proposer.on_step_states(what, parts, features)

    def num_available(self, sequence: DraftedSequence, limit: int) -> int:
        """See Proposer; counts tokens twice that two proposers find."""
        self._begin(sequence)
        for proposer, part in zip(self.proposers, self._parts(sequence), strict=True):
            part.num_found = proposer.num_available(part.sequence, limit)
        return min(limit, sum(part.num_found for part in self._parts(sequence)))

    def propose(self, wanted: Sequence[tuple[DraftedSequence, int]]) -> list[Draft]:
        """See Proposer."""
        self.num_caught_up = 0
        for index, proposer in enumerate(self.proposers):
            parts = [(self._parts(sequence)[index], limit) for sequence, limit in wanted]
            asked = [(part, min(part.num_found, limit)) for part, limit in parts if part.num_found > 0]
            drafts = proposer.propose([(part.sequence, limit) for part, limit in asked]) if asked else []
            self.num_caught_up += proposer.num_caught_up if asked else 0
            for part, _ in parts:
                part.draft = _NOTHING
            for (part, _), draft in zip(asked, drafts, strict=True):
                part.draft = draft
        priors = [record.rates() for record in self._ever]
        return [self._merge(self._parts(sequence), priors, limit) for sequence, limit in wanted]

    def _merge(self, parts: list[_Part], priors: list[list[float]], limit: int) -> Draft:
        """Return the most probable tokens of all drafts; a parent's probability is never lower than that of its children."""
        whole = DraftBuilder()
        chances: list[float] = []
        for part, prior in zip(parts, priors, strict=True):
            shares = part.record.shares(prior)
            nodes: list[int] = []
            for index, (token_id, parent) in enumerate(zip(part.draft.tokens, part.draft.parents, strict=True)):
                node = whole.add(ROOT if parent == ROOT else nodes[parent], token_id)
                nodes.append(node)
                if node == len(chances):
                    chances.append(0.0)
                chances[node] = max(chances[node], shares[index])
        nodes = whole.nodes
        parents, tokens = [parent for parent, _ in nodes], [token_id for _, token_id in nodes]
        for node, parent in enumerate(parents):
            if parent != ROOT:
                chances[node] = min(chances[node], chances[parent])
        return best_draft(tokens, parents, chances, limit)

    def on_logits(self, outcomes: Sequence[Outcome]) -> None:
        """See Proposer. Every proposer's draft is scored against the generated tokens, whether it was verified or not."""
        told: list[list[Outcome]] = [[] for _ in self.proposers]
        for outcome in outcomes:
            if outcome.sequence.memo is None:
                continue
            come = outcome.sequence.token_ids[-1 - len(outcome.path) :]
            for index, part in enumerate(self._parts(outcome.sequence)):
                if len(part.draft) > 0:
                    path = _follow(part.draft, come)
                    num_known = min(len(part.draft), len(come)) if part.draft.is_chain else len(part.draft)
                    part.record.note(num_known, path)
                    self._ever[index].note(num_known, path)
                if self.proposers[index].wants_logits:
                    told[index].append(replace(outcome, sequence=part.sequence))
        for proposer, one in zip(self.proposers, told, strict=True):
            if proposer.wants_logits:
                proposer.on_logits(one)

    def release(self, sequence: DraftedSequence) -> None:
        """See Proposer."""
        if sequence.memo is not None:
            for proposer, part in zip(self.proposers, self._parts(sequence), strict=True):
                proposer.release(part.sequence)

    def _begin(self, sequence: DraftedSequence) -> None:
        if sequence.memo is None:
            records = [proposer.record(self._max_tokens, RECENT_FADING) for proposer in self.proposers]
            sequence.memo = [_Part(replace(sequence, memo=None), record) for record in records]

    def _parts(self, sequence: DraftedSequence) -> list[_Part]:
        return sequence.memo


def _follow(draft: Draft, tokens: Sequence[int]) -> list[int]:
    """Return the indices of the leading tokens that the draft contains."""
    path: list[int] = []
    node: int | None = ROOT
    for token_id in tokens:
        node = draft.child(node, token_id)
        if node is None:
            break
        path.append(node)
    return path
