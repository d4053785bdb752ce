"""The scores of blocks that KV compression asks for: which tokens of a step are observed, and the inputs of a plan's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.base.ids import SequenceId
from quire.contracts.step import StepPlan
from quire.worker.input_batch import InputBatch, Row, StepInput
from quire.worker.step_executor import BlockScorer, ObservedToken


class ObservedRow(NamedTuple):
    """A token of a step whose attention is observed; index: among the tokens of the step."""

    row: Row
    position: int
    index: int


def find_observed(step: StepInput) -> list[ObservedRow]:
    """Return the tokens of a step, before it is counted as computed, whose attention a KV compression observes."""
    found: list[ObservedRow] = []
    for place, row in enumerate(step.rows):
        wanted = _observed_positions(row)
        first = row.num_computed_tokens
        if first >= wanted.stop:
            continue
        num_known = step.tokens.starts[place + 1] - step.tokens.starts[place]
        for position in range(max(first, wanted.start), min(first + num_known, wanted.stop)):
            found.append(ObservedRow(row, position, step.tokens.starts[place] + position - first))
    return found


def _observed_positions(row: Row) -> range:
    compression = row.start.request.params.kv_compression
    if compression is None or not compression.observes_attention or row.pooler is not None:
        return range(0)
    end = compression.first_len(row.num_prompt_tokens)
    return range(max(0, end - compression.recent_tokens), end)


def keep_observed(scorer: BlockScorer, observed: Sequence[ObservedRow]) -> None:
    """Give the rows what their observed tokens attend to, after the step that computed them."""
    places = [ObservedToken(one.row.batch_slot, one.position) for one in observed]  # nothing is evicted before
    for one, attention in zip(observed, scorer.take_observed(places), strict=True):
        one.row.observed[one.position] = attention


def score_blocks(scorer: BlockScorer, batch: InputBatch, plan: StepPlan) -> dict[SequenceId, tuple[float, ...]]:
    """Return the scores that a plan asks for, after its step."""
    found: dict[SequenceId, tuple[float, ...]] = {}
    for sequence_id, num_blocks in (plan.scored_blocks or {}).items():
        row = batch.row(sequence_id)
        compression = row.start.request.params.kv_compression
        if compression is not None and compression.observes_attention:
            total = [0.0] * num_blocks
            for position in _observed_positions(row):
                for index, attention in enumerate(row.observed[position][:num_blocks].tolist()):
                    total[index] += attention
            row.observed.clear()
            found[sequence_id] = tuple(total)
        else:
            found[sequence_id] = scorer.score_key_norms(row.block_table[:num_blocks].tolist())
    return found
