"""Buckets, rates, the fair queue, and the decisions of admission, with a clock that the tests move."""

import random
from collections import Counter

import pytest

from quire.base.errors import ConfigError, InvariantError
from quire.contracts.pooling_params import PoolingParams
from quire.serving.admission import AdmissionControl, FairQueue, OwnerLimits, ServiceRates, Ticket, TokenBucket
from quire.serving.admission.limits import format_reset
from quire.serving.config import ApiKey, ServerConfig
from quire.serving.engine_client.messages import StepReport
from quire.serving.errors import ApiError
from tests.unit.serving.request_queue.virtual_engine import make_job


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def control(clock=None, jitter=0.0, max_num_seqs=4, **config):
    return AdmissionControl(
        ServerConfig(**config), clock=clock or Clock(), random=lambda: jitter, max_num_seqs=max_num_seqs
    )  # fmt: skip


def step(step_id, seconds, num_prefill, num_decode, started_s=None, num_waiting=1):
    started_s = step_id * seconds if started_s is None else started_s
    return StepReport(step_id, started_s, seconds, num_prefill, num_decode, [], 4, num_waiting, 0, 0, 0, 0, 0, [])


def measured(admission, prefill=1000, decode=100, num_steps=50):
    """Let the engine have shown these rates."""
    for i in range(num_steps):
        report = step(2 * i, 0.1, prefill // 10, 0) if i % 2 else step(2 * i, 0.1, 0, decode // 10)
        admission.rates.observe(report, is_saturated=True)


def refusal(call, *args):
    with pytest.raises(ApiError) as caught:
        call(*args)
    return caught.value


# Buckets and limits.


def test_bucket_lets_a_minutes_worth_through_when_it_is_full():
    bucket = TokenBucket(60, 0.0)
    for _ in range(60):
        assert bucket.seconds_until(1, 0.0) == 0
        bucket.take(1, 0.0)
    assert bucket.seconds_until(1, 0.0) == pytest.approx(1.0)
    assert bucket.seconds_until(1, 1.0) == pytest.approx(0.0)


def test_bucket_goes_into_debt_when_one_cost_exceeds_it():
    bucket = TokenBucket(60, 0.0)
    assert bucket.seconds_until(180, 0.0) == 0
    bucket.take(180, 0.0)
    assert bucket.seconds_until(1, 0.0) == pytest.approx(121)


@pytest.mark.parametrize("seed", range(3))
def test_bucket_keeps_the_mean_rate_when_requests_are_random(seed):
    rng, now, taken = random.Random(seed), 0.0, 0.0
    bucket = TokenBucket(600, 0.0)
    while now < 3600:
        cost = rng.uniform(1, 900)
        now += bucket.seconds_until(cost, now) + rng.expovariate(1)
        bucket.take(cost, now)
        taken += cost
    assert taken <= 600 + 900 + now * 10


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.0115, "12ms"), (1, "1s"), (1.5, "1s500ms"), (360, "6m0s"), (61.2, "1m1s")]
)
def test_reset_is_written_as_clients_read_it_when_formatted(seconds, text):
    assert format_reset(seconds) == text


def test_headers_tell_what_is_left_when_a_key_has_limits():
    clock = Clock()
    admission = control(clock, api_keys=(ApiKey("a", b"", requests_per_minute=60, tokens_per_minute=600), ApiKey("b", b"")))
    admission.admit(make_job("r", 100, 50, owner="a"))
    assert admission.ratelimit_headers("a") == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "450",
        "x-ratelimit-reset-tokens": "15s",
    }
    assert admission.ratelimit_headers("b") == {}


def test_expected_length_is_learnt_when_outputs_end():
    limits = OwnerLimits(None, 0.0)
    assert (limits.expected_output_tokens(None), limits.expected_output_tokens(10)) == (256, 10)
    for _ in range(100):
        limits.learn(30)
    assert (limits.expected_output_tokens(None), limits.expected_output_tokens(10)) == (30, 10)


@pytest.mark.parametrize("limit", ["weight", "max_concurrent", "requests_per_minute", "tokens_per_minute"])
def test_config_error_names_the_limit_when_a_key_could_send_nothing(limit):
    with pytest.raises(ConfigError, match=limit):
        control(api_keys=(ApiKey("a", b"", **{limit: 0}),))


def test_call_without_a_job_counts_against_its_key_once_when_it_is_held():
    admission = control(api_keys=(ApiKey("a", b"", max_concurrent=1),))
    with admission.holding("a", "call-1"):
        assert refusal(admission.admit, make_job("r", owner="a", call_id="call-2")).status == 429
        assert refusal(admission.holding("a", "call-2").__enter__).status == 429
        ticket = admission.admit(make_job("s", owner="a", call_id="call-1"))
        with admission.holding("b", "call-3"), admission.holding("b", "call-4"):
            pass
    assert refusal(admission.holding("a", "call-2").__enter__).status == 429
    admission.finish(ticket, 0, False)
    with admission.holding("a", "call-2"):
        pass
    assert admission.is_empty


# Rates.


def test_rates_are_those_of_the_steps_when_prefill_and_decode_alternate():
    rates = ServiceRates()
    assert rates.seconds_of(1000, 1000) == 0
    for i in range(100):
        rates.observe(step(2 * i, 0.1, 500, 0) if i % 2 else step(2 * i, 0.2, 0, 8), is_saturated=True)
    assert rates.prefill_tokens_per_s == pytest.approx(5000)
    assert rates.decode_tokens_per_s == pytest.approx(40)
    assert rates.seconds_of(10_000, 80) == pytest.approx(4)


def test_estimates_of_mixed_work_add_up_when_steps_are_mixed():
    rates = ServiceRates()
    for i in range(100):
        rates.observe(step(2 * i, 0.1, 200, 10), is_saturated=True)
    assert rates.seconds_of(2000, 100) == pytest.approx(1.0)


def test_time_between_steps_counts_when_they_follow_one_another():
    rates = ServiceRates()
    for i in range(100):
        rates.observe(step(i, 0.1, 0, 10, started_s=0.2 * i), is_saturated=True)
    assert rates.decode_tokens_per_s == pytest.approx(50, rel=0.05)


def test_rates_follow_within_a_minute_when_the_engine_slows_down():
    rates = ServiceRates()
    for i in range(1000):
        rates.observe(step(i, 0.1, 0, 10), is_saturated=True)
    for i in range(1000, 1600):
        rates.observe(step(i, 0.1, 0, 5), is_saturated=True)
    assert rates.decode_tokens_per_s == pytest.approx(50, rel=0.15)


def test_steps_do_not_count_when_the_engine_is_not_saturated():
    rates = ServiceRates()
    rates.observe(step(0, 0.1, 0, 1), is_saturated=False)
    assert rates.decode_tokens_per_s is None


# The fair queue.


def ticket(number, owner="a", priority="default", prompt=100, expected=25):
    job = make_job(f"r{number}", prompt, expected, owner=owner, priority=priority)
    return Ticket(
        job=job, number=number, num_sequences=1, num_prompt_tokens=prompt, num_expected_tokens=expected, enqueued_s=0.0
    )


def test_one_owner_is_served_in_order_when_alone():
    queue = FairQueue(lambda _: 1.0)
    for number in range(100):
        queue.push(ticket(number))
    assert [queue.pop().number for _ in range(100)] == list(range(100))
    assert queue.peek() is None
    with pytest.raises(InvariantError):
        queue.pop()


@pytest.mark.parametrize("weights", [{"a": 1.0, "b": 1.0}, {"a": 3.0, "b": 1.0}, {"a": 0.5, "b": 2.0}], ids=str)
def test_owners_get_service_by_weight_when_all_have_work(weights):
    rng, queue = random.Random(0), FairQueue(weights.__getitem__)
    for number in range(4000):
        owner = "ab"[number % 2]
        queue.push(ticket(number, owner, prompt=rng.randint(1, 1000), expected=rng.randint(1, 100 if owner == "a" else 400)))
    served = Counter()
    for _ in range(1000):
        taken = queue.pop()
        served[taken.job.owner.name] += taken.cost
    queue.check_invariants()
    assert served["a"] / served["b"] == pytest.approx(weights["a"] / weights["b"], rel=0.05)


def test_charges_are_corrected_when_outputs_are_longer_than_expected():
    queue = FairQueue(lambda _: 1.0)
    for number in range(2000):
        queue.push(ticket(number, "ab"[number % 2], prompt=10, expected=10))
    served = Counter()
    for _ in range(500):
        taken = queue.pop()
        real = 100 if taken.job.owner.name == "a" else 10
        queue.settle(taken, real)
        served[taken.job.owner.name] += 10 + 4 * real
    assert served["a"] / served["b"] == pytest.approx(1.0, rel=0.05)


def test_classes_share_16_to_4_and_batch_comes_last_when_all_wait():
    queue, served, number = FairQueue(lambda _: 1.0), Counter(), 0
    for _ in range(1000):
        for priority in ("interactive", "default", "batch"):
            queue.push(ticket(number, priority=priority))
            number += 1
    for _ in range(1000):
        served[queue.pop().job.priority] += 1
    assert served["interactive"] / served["default"] == pytest.approx(4, rel=0.02)
    rest = [queue.pop().job.priority for _ in range(2000)]
    assert rest[-1000:] == ["batch"] * 1000


def test_nobody_saves_up_service_when_idle():
    queue = FairQueue(lambda _: 1.0)
    for number in range(1000):
        queue.push(ticket(number))
    for _ in range(500):
        queue.pop()
    for number in range(1000, 1100):
        queue.push(ticket(number, "late"))
    order = [queue.pop().job.owner.name for _ in range(100)]
    assert 45 <= order.count("late") <= 55
    assert order.index("late") <= 1


@pytest.mark.parametrize("seed", range(5))
def test_counts_stay_true_when_pushes_pops_and_removals_are_random(seed):
    rng, queue, waiting, number = random.Random(seed), FairQueue(lambda _: 1.0), {}, 0
    for _ in range(3000):
        dice = rng.random()
        if dice < 0.5:
            made = ticket(number, rng.choice("abcde"), rng.choice(["interactive", "default", "batch"]), rng.randint(1, 99))
            queue.push(made)
            waiting[number] = made
            number += 1
        elif dice < 0.75 and waiting:
            del waiting[queue.pop().number]
        elif waiting:
            gone = waiting.pop(rng.choice(list(waiting)))
            assert queue.remove(gone)
            assert not queue.remove(gone)
        if rng.random() < 0.05:
            queue.check_invariants()
            assert {one.number for one in queue} == waiting.keys()
            assert len(queue) == len(waiting)


# Decisions.


def test_refusal_is_429_when_a_key_is_over_its_limits():
    clock = Clock()
    keys = (
        ApiKey("few", b"", max_concurrent=2),
        ApiKey("slow", b"", requests_per_minute=2),
        ApiKey("small", b"", tokens_per_minute=100),
    )
    admission = control(clock, api_keys=keys)
    first = admission.admit(make_job("a", owner="few"))
    admission.admit(make_job("b", owner="few"))
    assert (refusal(admission.admit, make_job("c", owner="few")).status, admission.queue.__len__()) == (429, 2)
    admission.finish(first, 0, is_complete=False)
    admission.admit(make_job("c", owner="few"))
    for name in "de":
        admission.admit(make_job(name, owner="slow"))
    error = refusal(admission.admit, make_job("f", owner="slow"))
    assert (error.status, error.retry_after_s) == (429, 30)
    clock.now = 30
    admission.admit(make_job("f", owner="slow"))
    admission.admit(make_job("g", 500, owner="small"))
    assert "tokens per minute" in refusal(admission.admit, make_job("h", 1, owner="small")).message


def test_tokens_are_given_back_when_fewer_were_used():
    admission = control(api_keys=(ApiKey("a", b"", tokens_per_minute=1000),))
    ticket = admission.admit(make_job("x", 100, 200, owner="a"))
    assert admission.ratelimit_headers("a")["x-ratelimit-remaining-tokens"] == "700"
    assert admission.take(4) is ticket
    admission.finish(ticket, 50, is_complete=True)
    assert admission.ratelimit_headers("a")["x-ratelimit-remaining-tokens"] == "850"
    queued = admission.admit(make_job("y", 100, 200, owner="a"))
    admission.finish(queued, 0, is_complete=False)
    assert admission.ratelimit_headers("a")["x-ratelimit-remaining-tokens"] == "850"
    assert admission.is_empty


def test_refusal_is_503_when_the_queue_is_full_of_requests_or_tokens():
    admission = control(max_queued_requests=10, max_queued_tokens=1000)
    for i in range(3):
        admission.admit(make_job(f"a{i}", n=3))
    assert refusal(admission.admit, make_job("b", n=2)).code == "overloaded"
    admission.admit(make_job("c"))
    assert refusal(admission.admit, make_job("d")).code == "overloaded"
    admission = control(max_queued_tokens=1000)
    admission.admit(make_job("a", 900))
    assert "prompt tokens" in refusal(admission.admit, make_job("b", 200)).message


def test_embedding_is_charged_for_its_prompt_alone_when_admitted():
    admission = control()
    ticket = admission.admit(make_job("a", 100, pooling=PoolingParams()))
    assert ticket.cost == 100
    admission.take(4)
    admission.finish(ticket, 0, is_complete=True)
    assert admission.admit(make_job("b", 100, 16)).num_expected_tokens == 16  # nothing was learnt of outputs


def test_large_request_is_admitted_when_nothing_else_is_held():
    admission = control(max_queued_requests=2, max_queued_tokens=100, max_queue_wait_s=1)
    measured(admission, prefill=100)
    admission.admit(make_job("a", 5000, n=4))


def test_newcomer_finds_room_when_another_owner_floods():
    admission = control(api_keys=(ApiKey("a", b""), ApiKey("b", b"")), max_queued_requests=100)
    codes = Counter()
    admission.admit(make_job("b0", owner="b"))
    for i in range(200):
        try:
            admission.admit(make_job(f"a{i}", owner="a"))
        except ApiError as error:
            codes[error.status] += 1
    assert codes.keys() == {429}
    assert admission.queue.backlog("default", "a").num_requests == pytest.approx(80, abs=2)
    for i in range(10):
        admission.admit(make_job(f"b{i + 1}", owner="b"))


def test_wait_is_estimated_from_what_is_ahead_when_the_engine_is_full():
    clock = Clock()
    admission = control(clock, max_num_seqs=1)
    measured(admission, prefill=1000, decode=100)
    assert admission.estimated_wait_s("default", "x") == 0
    for i in range(11):
        admission.admit(make_job(f"a{i}", 100, 20))
    admission.take(1)
    # Ten wait, each 0.1 s of prompt and 0.2 s of output; the running one has 0.2 s at most.
    assert admission.estimated_wait_s("default", "anonymous") == pytest.approx(3.2)
    assert admission.estimated_wait_s("default", "other") == pytest.approx(0.2)  # would be next
    assert admission.estimated_wait_s("interactive", "other") == pytest.approx(0.2)
    assert admission.estimated_wait_s("batch", "other") == pytest.approx(3.2)


@pytest.mark.parametrize("jitter", [0.0, 0.5, 0.999])
def test_retry_after_is_the_excess_and_spread_when_the_wait_is_too_long(jitter):
    admission = control(jitter=jitter, max_queue_wait_s=2.0, max_num_seqs=1)
    measured(admission)
    admission.admit(make_job("a", 100, 20))
    admission.take(1)
    admission.admit(make_job("b", 11_000, 20))
    error = refusal(admission.admit, make_job("c", 100, 20))
    assert (error.status, error.code) == (503, "overloaded")
    assert error.retry_after_s == pytest.approx(10 * (1 + 0.25 * jitter))  # 11.2 and 0.2 wait, 2 may be waited


def test_job_is_refused_when_its_deadline_is_sooner_than_its_turn():
    clock = Clock()
    admission = control(clock, max_num_seqs=1)
    measured(admission)
    for i in range(5):
        admission.admit(make_job(f"a{i}", 1000, 20))
    admission.take(1)
    assert refusal(admission.admit, make_job("b", 1000, 20, deadline_s=3.0)).code == "overloaded"
    admission.admit(make_job("c", 1000, 20, deadline_s=20.0))
    clock.now = 20.0
    assert refusal(admission.admit, make_job("d", deadline_s=20.0)).status == 408


def flex(name, owner="a"):
    return make_job(name, owner=owner, priority="batch", call_id=f"call_{name}")


def test_key_is_held_to_its_limit_when_it_asks_for_flex():
    admission = control(api_keys=(ApiKey("a", b"", max_concurrent=2),))
    held = [admission.admit(flex(name)) for name in "xy"]
    assert refusal(admission.admit, flex("z")).status == 429
    admission.admit(make_job("line", owner="a", priority="batch"))
    admission.finish(held[0], 1, is_complete=True)
    admission.admit(flex("z"))


def test_batches_and_others_find_room_when_one_key_floods_with_flex():
    admission = control(max_num_seqs=4)
    refused = []
    for number in range(20):
        try:
            admission.admit(flex(str(number)))
        except ApiError as error:
            refused.append(error.status)
    assert set(refused) == {429}
    tickets = [admission.admit(flex("other", "b")), admission.admit(make_job("line", owner="c", priority="batch"))]
    assert [ticket.job.owner.name for ticket in tickets] == ["b", "c"]


def test_batch_has_a_window_and_takes_no_room_when_others_come():
    admission = control(max_num_seqs=4, max_queued_requests=5)
    for i in range(8):
        admission.admit(make_job(f"b{i}", priority="batch"))
    assert "window" in refusal(admission.admit, make_job("c", priority="batch")).message
    for i in range(5):
        admission.admit(make_job(f"o{i}"))


def test_others_are_taken_and_wait_for_nothing_when_batches_fill_the_engine():
    admission = control(max_num_seqs=4, max_queue_wait_s=1)
    measured(admission, prefill=1000, decode=10)
    lines = [admission.admit(make_job(f"b{i}", max_tokens=900, priority="batch")) for i in range(8)]
    assert [admission.take(5) for _ in range(6)] == [*lines[:5], None]
    assert admission.estimated_wait_s("default", "a") == 0
    online = [admission.admit(make_job(f"o{i}", max_tokens=1)) for i in range(4)]
    assert [admission.take(5) for _ in range(5)] == [*online, None]
    assert admission.estimated_wait_s("default", "a") > 0
    assert admission.estimated_wait_s("batch", "a") > 10
    for ticket in (*online, *lines):
        admission.finish(ticket, 16, is_complete=True)
    assert admission.is_empty


def test_request_of_many_sequences_waits_for_an_empty_engine_when_it_exceeds_it():
    admission = control(max_num_seqs=2)
    small, big, after = (admission.admit(make_job(name, n=n)) for name, n in (("a", 1), ("b", 8), ("c", 1)))
    assert admission.take(3) is small
    assert admission.take(3) is None
    admission.finish(small, 16, is_complete=True)
    assert admission.take(3) is big
    assert admission.take(3) is None
    admission.finish(big, 16, is_complete=True)
    assert admission.take(3) is after


def test_jobs_of_one_call_count_as_one_request_when_a_key_has_limits():
    admission = control(api_keys=(ApiKey("a", b"", max_concurrent=1, requests_per_minute=2),))
    tickets = [admission.admit(make_job(f"r{i}", owner="a", call_id="call-1")) for i in range(5)]
    assert admission.ratelimit_headers("a")["x-ratelimit-remaining-requests"] == "1"
    assert refusal(admission.admit, make_job("s", owner="a", call_id="call-2")).status == 429
    for ticket in tickets[:4]:
        admission.finish(ticket, 0, False)
    assert refusal(admission.admit, make_job("s", owner="a", call_id="call-2")).status == 429
    admission.finish(tickets[4], 0, False)
    admission.finish(admission.admit(make_job("s", owner="a", call_id="call-2")), 0, False)
    assert "2 requests per minute" in refusal(admission.admit, make_job("t", owner="a", call_id="call-3")).message
    assert admission.is_empty
