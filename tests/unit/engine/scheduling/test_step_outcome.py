import pytest
from reference_model import make_config, make_request

from quire.contracts.step import StepPlan, StepResult, TokenLogprobs
from quire.engine.scheduling import Scheduler, check_invariants


def end_of(tokens, **options):
    """Return (output, finish reason, stop reason) of a request whose worker samples `tokens`, all of them at once."""
    scheduler = Scheduler(make_config())
    scheduler.add(make_request("r", 3, **options))
    plan = scheduler.schedule()
    assert isinstance(plan, StepPlan)
    (update,) = scheduler.commit(plan, StepResult(plan.step_id, {next(iter(plan.num_scheduled_tokens)): tokens}, {}, {}, {}))
    check_invariants(scheduler)
    assert scheduler.has_unfinished == (update.finish_reason is None)
    return update.new_token_ids, update.finish_reason, update.stop_reason


@pytest.mark.parametrize(
    "tokens, options, expected",
    [
        ((5, 6), {}, ((5, 6), None, None)),
        ((5, 0, 6), {"eos": {0}}, ((5, 0), "stop", None)),
        ((5, 0, 6), {"eos": {0}, "ignore_eos": True}, ((5, 0, 6), None, None)),
        ((5, 7, 6), {"stop_token_ids": [7]}, ((5, 7), "stop", 7)),
        ((5, 7, 6), {"stop_token_ids": [7], "eos": {7}}, ((5, 7), "stop", None)),
        ((5, 7, 6), {"stop_token_ids": [7], "eos": {7}, "ignore_eos": True}, ((5, 7), "stop", 7)),
        ((0, 5, 0, 6), {"eos": {0}, "min_tokens": 2}, ((0, 5, 0), "stop", None)),
        ((5, 0, 6), {"eos": {0}, "min_tokens": 2}, ((5, 0), "stop", None)),
        ((5, 6, 7), {"max_tokens": 2}, ((5, 6), "length", None)),
        ((5, 0), {"eos": {0}, "max_tokens": 2}, ((5, 0), "stop", None)),
    ],
    ids=[
        "goes on",
        "eos",
        "eos ignored",
        "stop token",
        "eos before stop token",
        "stop token that is an ignored eos",
        "eos before min_tokens",
        "eos at min_tokens",
        "max_tokens",
        "stop before length",
    ],
)
def test_output_ends(tokens, options, expected):
    assert end_of(tokens, **options) == expected


def test_log_probabilities_are_cut_with_the_tokens():
    scheduler = Scheduler(make_config())
    (sequence_id,) = scheduler.add(make_request("r", 3, max_tokens=1, logprobs=1))
    plan = scheduler.schedule()
    assert plan is not None
    logprobs = {sequence_id: tuple(TokenLogprobs(token, -1.0, 1) for token in (5, 6))}
    (update,) = scheduler.commit(plan, StepResult(plan.step_id, {sequence_id: (5, 6)}, logprobs, {}, {}))
    assert [entry.token_id for entry in update.logprobs] == [5]
