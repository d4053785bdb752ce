"""Watchdog and RestartPolicy, with a clock of the test's own."""

from quire.serving.engine_client.messages import Heartbeat, StepOutputs, StepReport
from quire.serving.engine_client.watchdog import RestartPolicy, Watchdog


def beat(num_steps=0, num_unfinished=0):
    return Heartbeat(0.0, num_steps, num_unfinished, 0)


def step():
    return StepOutputs([], StepReport(1, 0.0, 0.0, 0, 0, [], 0, 0, 0, 0, 0, 0, 0, []))


def test_idle_engine_that_beats_is_well():
    watchdog = Watchdog(10.0, 0.0)
    for now in range(1, 100):
        watchdog.note(beat(), float(now))
        assert watchdog.problem(now + 0.9) is None
    assert watchdog.silence_s(100.0) == 1.0


def ask_until(watchdog, start, end):
    """Ask every second of [start, end) and return the first problem."""
    return next(filter(None, (watchdog.problem(float(now)) for now in range(start, end))), None)


def test_silence_is_a_problem_only_after_the_timeout():
    watchdog = Watchdog(10.0, 0.0)
    watchdog.note(beat(0, 1), 5.0)  # then a step that lasts
    assert ask_until(watchdog, 5, 15) is None
    assert "not answered" in ask_until(watchdog, 15, 17)


def test_time_in_which_the_server_itself_stood_still_does_not_count():
    watchdog = Watchdog(10.0, 0.0)
    watchdog.note(beat(0, 1), 5.0)
    assert ask_until(watchdog, 5, 8) is None
    assert watchdog.problem(500.0) is None  # nobody asked for that long
    assert ask_until(watchdog, 501, 507) is None
    assert "not answered for" in ask_until(watchdog, 508, 512)


def test_beats_without_steps_are_a_problem_while_requests_wait():
    watchdog = Watchdog(10.0, 0.0)
    watchdog.note(beat(7, 0), 1.0)
    watchdog.note(beat(7, 2), 2.0)
    assert watchdog.problem(2.0) is None
    for now in range(3, 12):
        assert watchdog.problem(float(now)) is None
        watchdog.note(beat(7, 2), float(now))
    assert "no step" in watchdog.problem(12.2)
    watchdog.note(beat(8, 2), 12.3)
    assert watchdog.problem(12.4) is None


def test_outputs_count_as_progress_only_with_a_step():
    for message, is_well in ((step(), True), (StepOutputs([]), False)):
        watchdog = Watchdog(10.0, 0.0)
        watchdog.note(beat(0, 1), 1.0)
        watchdog.note(message, 9.0)
        watchdog.note(beat(0, 1), 10.5)
        assert (ask_until(watchdog, 1, 13) is None) == is_well


def test_delays_double_up_to_the_limit_and_end():
    policy = RestartPolicy(6, 100.0, 0.5, 4.0)
    assert [policy.next_delay_s(10.0) for _ in range(7)] == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0, None]
    assert policy.next_delay_s(110.0) is None
    assert policy.next_delay_s(110.1) == 0.5


def test_restarts_far_apart_never_end():
    policy = RestartPolicy(2, 100.0, 0.5, 4.0)
    assert [policy.next_delay_s(60.0 * n) for n in range(10)] == [0.5] + [1.0] * 9


def test_no_restarts_are_made_when_none_are_allowed():
    assert RestartPolicy(0, 100.0).next_delay_s(0.0) is None
