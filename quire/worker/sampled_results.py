"""Sampled tokens: appended to the rows, and put into the result of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from quire.base.ids import SequenceId
from quire.contracts.step import StepResult, TokenLogprobs
from quire.sampling.sampler import Sampled
from quire.speculate.draft import NO_DRAFT
from quire.speculate.verifier import Verification, match_chain
from quire.worker.input_batch import InputBatch, Row, StepInput
from quire.worker.step_executor import UNKNOWN

PromptLogprobs = Mapping[SequenceId, tuple[TokenLogprobs, ...]]


def take_best(step_id: int, rows: Sequence[Row], token_ids: Sequence[int], prompt_logprobs: PromptLogprobs) -> StepResult:
    """Append the token of each row, where rows ask for nothing else and each has a token."""
    sampled: dict[SequenceId, tuple[int, ...]] = {}
    for row, token_id in zip(rows, token_ids, strict=True):
        row.token_ids.append(token_id)
        row.sampling.append(token_id)
        sampled[row.start.sequence_id] = (token_id,)
    return StepResult(step_id, sampled, {}, dict(prompt_logprobs), {})


def expect_tokens(step: StepInput) -> Sequence[int]:
    """Append a placeholder to each row of step.ready for the token that the step samples; return where these are.

    To be called after batch.advance, of a step without drafts.
    """
    for row in step.ready:
        row.token_ids.append(UNKNOWN)
    if len(step.ready) == len(step.rows):
        return step.tokens.ends
    return [row.num_computed_tokens for row in step.ready]


def take_expected(
    step_id: int,
    rows: Sequence[Row],
    places: Sequence[int],
    token_ids: Sequence[int],
    failures: Mapping[int, str],
    prompt_logprobs: PromptLogprobs,
) -> StepResult:
    """Put the tokens of a step into their placeholders, where rows ask for nothing else.

    places    index of each row's placeholder; the row may have another one after it, of the next step
    failures  by index, why a row has no token
    """
    sampled: dict[SequenceId, tuple[int, ...]] = {}
    for row, place, token_id in zip(rows, places, token_ids, strict=True):
        row.token_ids[place] = token_id
        row.sampling.append(token_id)
        sampled[row.start.sequence_id] = (token_id,)
    errors: dict[SequenceId, str] = {}
    for index, error in failures.items():  # the row ends; its placeholder is not read again
        sequence_id = rows[index].start.sequence_id
        del sampled[sequence_id]
        errors[sequence_id] = error
    return StepResult(step_id, sampled, {}, dict(prompt_logprobs), errors)


def take_deferred(
    step: StepInput,
    step_id: int,
    places: Sequence[int],
    token_ids: Sequence[int],
    failures: Mapping[int, str],
    pending: Set[SequenceId],
) -> StepResult:
    """Do what take_expected does, for rows some of which have constraints: grammars advance with the tokens.

    pending  sequences with a pending mask: their placeholders, the last tokens of their rows, are removed
    """
    result, completed = StepResult(step_id, {}, {}, {}, {}), list[SequenceId]()
    for index, (row, place) in enumerate(zip(step.ready, places, strict=True)):
        sequence_id, sampling = row.start.sequence_id, row.sampling
        if sequence_id in pending:
            row.token_ids.pop()
            continue
        sampling.token_mask = None
        error = sampling.grammar_error or failures.get(index)
        if error is not None:
            _note_error(result, row, error)
            continue
        row.token_ids[place] = token_ids[index]
        sampling.append(token_ids[index])
        result.sampled[sequence_id] = (token_ids[index],)
        if sampling.is_grammar_complete:
            completed.append(sequence_id)
    return replace(result, completed=frozenset(completed)) if completed else result


def take_sampled(step_id: int, rows: Sequence[Row], found: Sequence[Sampled], prompt_logprobs: PromptLogprobs) -> StepResult:
    """Append the token of each row, or note why it has none; grammars advance with the tokens."""
    result = StepResult(step_id, {}, {}, dict(prompt_logprobs), {})
    completed: list[SequenceId] = []
    for row, outcome in zip(rows, found, strict=True):
        sequence_id = row.start.sequence_id
        row.sampling.token_mask = None
        if row.sampling.grammar_error is not None or outcome.token_id is None:
            _note_error(result, row, row.sampling.grammar_error or outcome.error or "no token could be sampled")
            continue
        row.token_ids.append(outcome.token_id)
        row.sampling.append(outcome.token_id)
        result.sampled[sequence_id] = (outcome.token_id,)
        if row.sampling.is_grammar_complete:
            completed.append(sequence_id)
        if outcome.logprobs is not None:
            result.logprobs[sequence_id] = (outcome.logprobs,)
    return replace(result, completed=frozenset(completed)) if completed else result


def _note_error(result: StepResult, row: Row, error: str) -> None:
    """Note why a row has no token, and the field of its request if one is at fault."""
    sequence_id, param = row.start.sequence_id, row.sampling.param_at_fault
    result.errors[sequence_id] = error if param is None else f"{param}: {error}"
    if param is not None:
        result.error_params[sequence_id] = param


def take_matches(
    step_id: int,
    step: StepInput,
    best: Sequence[int],
    prompt_logprobs: PromptLogprobs,
    paths: dict[SequenceId, tuple[int, ...]],
) -> StepResult:
    """Verify drafts that are chains against the best tokens, and give the rows the accepted ones and one more each.

    The same as apply_verified, for rows that ask for nothing but the best token, where every row has one.

    best  [R] of the step's logit_rows
    """
    sampled: dict[SequenceId, tuple[int, ...]] = {}
    verified: dict[SequenceId, tuple[int, int]] = {}
    drafts, first = step.drafts, len(step.ready)
    for index, row in enumerate(step.ready):
        sequence_id = row.start.sequence_id
        draft = drafts.get(sequence_id, NO_DRAFT)
        num_drafts = len(draft.tokens)
        tokens = match_chain(best, index, first, row.sampling, draft)
        first += num_drafts
        num_accepted = len(tokens) - 1
        row.token_ids += tokens
        row.num_computed_tokens += num_accepted
        sampled[sequence_id] = tuple(tokens)
        paths[sequence_id] = tuple(range(num_accepted))
        if num_drafts > 0:
            verified[sequence_id] = (num_drafts, num_accepted)
    return StepResult(step_id, sampled, {}, dict(prompt_logprobs), {}, verified=verified)


def apply_verified(
    step_id: int,
    batch: InputBatch,
    step: StepInput,
    rows: Sequence[Row],
    verifications: Sequence[Verification],
    prompt_logprobs: PromptLogprobs,
    paths: dict[SequenceId, tuple[int, ...]],
) -> StepResult:
    """Append the accepted drafts and the sampled token of each row; put the accepted drafts into `paths`.

    To be followed by batch.take_moves.
    """
    result = StepResult(step_id, {}, {}, dict(prompt_logprobs), {})
    completed: list[SequenceId] = []
    for row, verification in zip(rows, verifications, strict=True):
        sequence_id = row.start.sequence_id
        if verification.error is not None:
            _note_error(result, row, verification.error)
            continue
        row.token_ids += verification.tokens
        batch.accept(row, verification.path)
        paths[sequence_id] = tuple(verification.path)
        if row.sampling.is_grammar_complete:
            completed.append(sequence_id)
        result.sampled[sequence_id] = tuple(verification.tokens)
        if verification.logprobs:
            result.logprobs[sequence_id] = tuple(verification.logprobs)
        if sequence_id in step.drafts:
            result.verified[sequence_id] = (len(step.drafts[sequence_id].tokens), len(verification.path))
    return replace(result, completed=frozenset(completed)) if completed else result
