"""Timelines: what is recorded of requests, with a clock that the test sets."""

import random
from itertools import pairwise

import pytest
from random_lives import random_config, random_request, seeds
from reference_model import STOP_STRING, make_config, make_request
from scheduling_fakes import Driver

from quire.base.errors import RequestError
from quire.base.ids import RequestId
from quire.engine.scheduling.timeline import MAX_EVENTS, LongestSteps, TimelineRecorder


class TimedDriver(Driver):
    """A driver with a recorder, whose steps take one second of its clock."""

    def __init__(self, config, **options):
        super().__init__(config, **options)
        host = self.scheduler.kv.host_tier
        self.timelines = TimelineRecorder(None if host is None else host.stats, clock=lambda: self.now)
        self.scheduler.timelines = self.timelines

    def step(self):
        plan = self.schedule()
        if plan is not None:
            result = self.worker.execute(plan)
            self.timelines.note_step(plan, result, self.now, self.now + 1.0)
            self.commit(plan, result)  # a second passes
        return plan

    def events(self, name):
        return self.timelines.take(RequestId(name)).events


def kinds(events):
    return [event.kind for event in events]


def test_prompt_chunks_and_one_run_of_decode_steps_are_recorded():
    driver = TimedDriver(make_config(max_num_batched_tokens=8))
    driver.now = 10.0
    driver.add(make_request("r", 20, max_tokens=5))
    driver.now = 12.0
    driver.run()
    queue, admit, *chunks, decode, finish = driver.events("r")
    assert (queue.kind, queue.start_s, queue.end_s) == ("queue", 10.0, 12.0)
    assert (admit.kind, admit.start_s, admit.num_tokens, admit.num_cached_tokens) == ("admit", 12.0, 20, 0)
    assert [(c.kind, c.step_id, c.num_tokens, c.start_s, c.end_s) for c in chunks] == [
        ("prefill", 0, 8, 12.0, 13.0), ("prefill", 1, 8, 13.0, 14.0), ("prefill", 2, 4, 14.0, 15.0),
    ]  # fmt: skip
    assert (decode.kind, decode.step_id, decode.num_steps, decode.num_tokens) == ("decode", 3, 4, 4)
    assert (decode.start_s, decode.end_s, decode.prefill_step_s) == (15.0, 19.0, 0.0)
    assert (finish.kind, finish.num_tokens, finish.reason) == ("finish", 5, "length")


def test_decode_run_counts_the_seconds_of_steps_with_prompts_of_others():
    driver = TimedDriver(make_config(max_num_batched_tokens=9))
    driver.add(make_request("r", 4, max_tokens=8))
    driver.step()
    driver.step()
    driver.add(make_request("other", range(200, 216), max_tokens=1))  # two steps next to "r"
    driver.run()
    decode = next(event for event in driver.events("r") if event.kind == "decode")
    assert (decode.num_steps, decode.prefill_step_s) == (7, 2.0)
    first, second = [event for event in driver.events("other") if event.kind == "prefill"]
    assert (first.num_tokens, first.num_step_tokens, second.num_tokens) == (8, 9, 8)


def test_preemption_ends_the_run_and_the_tokens_are_computed_again():
    driver = TimedDriver(make_config(block_size=2, num_kv_blocks=6, enable_prefix_caching=False))
    driver.add(make_request("old", range(100, 104), max_tokens=6))
    driver.add(make_request("young", range(200, 204), max_tokens=4))
    driver.run()
    events = driver.events("young")
    assert kinds(events) == ["queue", "admit", "prefill", "decode", "preempt", "admit", "prefill", "finish"]
    decode, preempt, again, chunk, finish = events[3:]
    assert (decode.num_tokens, decode.num_steps) == (2, 2)
    assert (preempt.start_s, preempt.reason) == (3.0, "kv_blocks")
    assert preempt.end_s == again.start_s > preempt.start_s
    assert (again.num_tokens, chunk.num_tokens, finish.num_tokens) == (7, 7, 4)


def test_background_request_is_preempted_for_a_request_with_priority():
    driver = TimedDriver(make_config(max_num_seqs=1))
    driver.add(make_request("batch", 4, max_tokens=20, background=True))
    driver.step()
    driver.add(make_request("online", 4, max_tokens=2))
    driver.run()
    assert [event.reason for event in driver.events("batch") if event.kind == "preempt"] == ["priority"]


def test_cached_tokens_are_in_the_admission():
    driver = TimedDriver(make_config())
    driver.add(make_request("first", 12, max_tokens=1))
    driver.run()
    driver.add(make_request("second", 12, max_tokens=1))
    driver.run()
    admit = next(event for event in driver.events("second") if event.kind == "admit")
    assert (admit.num_cached_tokens, admit.num_tokens) == (8, 4)


def test_pages_of_the_host_tier_are_in_the_admission():
    driver = TimedDriver(make_config(num_kv_blocks=8, num_host_pages=16, max_page_saves=8, kv_save="all"))
    for name, first in (("a", 100), ("b", 200), ("again", 100)):
        driver.add(make_request(name, range(first, first + 28), max_tokens=1))
        driver.run()
    admit = next(event for event in driver.events("again") if event.kind == "admit")
    assert admit.num_host_pages == driver.scheduler.kv.host_tier.stats.num_host_hits > 0
    assert admit.num_disk_pages == 0


def test_drafts_are_counted_in_the_run():
    driver = TimedDriver(make_config(), max_drafts=3, seed=3)
    driver.add(make_request("r", 4, max_tokens=30))
    driver.run()
    decode = next(event for event in driver.events("r") if event.kind == "decode")
    assert decode.num_drafts >= decode.num_accepted > 0
    assert decode.num_steps == decode.num_tokens - decode.num_accepted


def test_every_choice_has_its_own_events():
    driver = TimedDriver(make_config())
    driver.add(make_request("r", 6, max_tokens=3, n=3))
    driver.run()
    events = driver.events("r")
    for choice in range(3):
        own = [event for event in events if event.choice == choice]
        assert kinds(own) == ["queue", "admit", "prefill", "decode", "finish"]
        assert [event.num_tokens for event in own if event.kind == "decode"] == [2]
    assert [event.num_cached_tokens for event in events if event.kind == "admit"] == [0, 5, 5]


def test_waits_before_the_scheduler_are_recorded_and_end_with_the_next():
    driver = TimedDriver(make_config())
    request = make_request("r", 4, max_tokens=1)
    driver.timelines.hold(request.request_id, "compile")
    driver.now = 2.0
    driver.timelines.hold(request.request_id, "disk_read")
    driver.now = 5.0
    driver.add(request)
    driver.run()
    first, second, third, *_ = driver.events("r")
    assert [(e.kind, e.start_s, e.end_s) for e in (first, second, third)] == [
        ("compile", 0.0, 2.0), ("disk_read", 2.0, 5.0), ("queue", 5.0, 5.0),
    ]  # fmt: skip


def test_abort_in_the_queue_ends_the_wait():
    driver = TimedDriver(make_config(max_num_seqs=1))
    driver.add(make_request("a", 4, max_tokens=4))
    driver.add(make_request("b", 4, max_tokens=4))
    driver.step()
    driver.abort("b")
    queue, finish = driver.events("b")
    assert (queue.kind, queue.end_s, finish.kind, finish.reason) == ("queue", 1.0, "finish", "abort")


def test_peek_ends_what_goes_on_without_changing_it():
    driver = TimedDriver(make_config())
    driver.add(make_request("r", 4, max_tokens=6))
    assert kinds(driver.timelines.peek(RequestId("r")).events) == ["queue"]
    driver.step()
    driver.step()
    now = driver.timelines.peek(RequestId("r")).events
    assert kinds(now) == ["queue", "admit", "prefill", "decode"]
    assert (now[-1].num_tokens, now[-1].end_s) == (1, 2.0)
    driver.run()
    assert kinds(driver.events("r")) == ["queue", "admit", "prefill", "decode", "finish"]
    assert driver.timelines.peek(RequestId("r")) is None


@pytest.mark.slow
def test_events_of_one_request_are_bounded_and_chunks_are_merged():
    driver = TimedDriver(make_config(max_num_seqs=1, max_num_batched_tokens=1, max_model_len=700, num_kv_blocks=200))
    driver.add(make_request("r", 650, max_tokens=3))
    driver.run()
    timeline = driver.timelines.take(RequestId("r"))
    chunks = [event for event in timeline.events if event.kind == "prefill"]
    assert len(timeline.events) == MAX_EVENTS + 1
    assert (sum(c.num_tokens for c in chunks), sum(c.num_steps for c in chunks)) == (650, 650)
    assert timeline.events[-1].kind == "finish"
    assert timeline.num_dropped == 1  # the run of decode steps


def test_longest_step_since_a_number_is_found():
    rng, steps, kept = random.Random(5), [], LongestSteps()
    for number in range(300):
        steps.append(rng.random())
        kept.add(number, steps[-1], 1000 + number)
        since = rng.randrange(number + 1)
        longest = max(range(since, number + 1), key=lambda index: (steps[index], index))
        assert kept.since(since) == (steps[longest], 1000 + longest)
    assert kept.since(300) == (0.0, -1)


def test_longest_steps_stay_few_when_each_is_shorter_than_the_last():
    kept = LongestSteps()
    for number in range(5000):
        kept.add(number, 1.0 / (1 + number), number)
    assert kept.since(0)[1] == 5000 - 1024


@pytest.mark.one_in(3, keep=False)
@pytest.mark.parametrize("seed", seeds(90, 60, 15))
def test_timelines_are_whole_whatever_happens(seed):
    rng = random.Random(seed)
    config = random_config(rng)
    driver = TimedDriver(config, seed=seed)
    prefixes = [[rng.randrange(3) for _ in range(rng.randint(0, 24))] for _ in range(3)]
    names = []
    for _ in range(120):
        if rng.random() < 0.3 and len(names) < 25:
            request = random_request(rng, len(names), prefixes)
            names.append(str(request.request_id))
            try:
                driver.add(request)
            except RequestError:
                names[-1] = names[-1] + "-refused"
        if names and rng.random() < 0.05:
            driver.abort(rng.choice(names))
        driver.step()
    driver.run()
    for request_id, request in driver.requests.items():
        timeline = driver.timelines.take(request_id)
        for choice in range(request.params.num_sequences):
            own = [event for event in timeline.events if event.choice == choice]
            output = driver.outputs[request_id, choice]
            assert [event.kind for event in own].count("finish") == 1
            assert own[-1].kind == "finish"
            # The text layer may find a stop string in the last token that max_tokens allows.
            assert own[-1].reason == output.reason or output.stop_reason == STOP_STRING
            spans = [event for event in own if event.kind in ("queue", "prefill", "decode", "preempt")]
            assert all(one.end_s <= two.start_s for one, two in pairwise(spans))
            num_admitted = sum(event.kind == "admit" for event in own)
            num_preempted = sum(event.kind == "preempt" for event in own)
            assert num_admitted <= num_preempted + 1
            if output.reason in ("stop", "length") and request.pooling is None:
                computed = sum(event.num_tokens for event in own if event.kind == "prefill")
                admitted = sum(event.num_tokens for event in own if event.kind == "admit")
                assert computed <= admitted or config.rope_switch_len is not None
                assert sum(event.num_tokens for event in own if event.kind == "decode") < max(1, len(output.tokens))
    assert driver.timelines.num_held == 0
