"""Several requests as one stream of events: what is opened is left, whatever happens."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import aclosing

import pytest

from quire.serving.core.caller import Caller
from quire.serving.core.events import ChoiceEnd, PromptPositions, TextDelta, TokensDelta, UsageEnd
from quire.serving.core.plan import GenerationOptions
from quire.serving.core.prepare import prepare_prompts
from quire.serving.core.streams import generation_events
from quire.serving.engine_client.messages import ChoiceDelta, RequestDelta
from quire.serving.errors import ApiError, overloaded
from tests.unit.serving.fakes import OWNER, FakeGateway, make_served, text_script

SERVED = make_served()
CALLER = Caller(owner=OWNER, route="/x")


def jobs_for(*prompts, wants_tokens=False, **sampling):
    options = GenerationOptions(sampling=sampling, wants_tokens=wants_tokens)
    ids = [f"r{index}" for index in range(len(prompts))]
    plans = prepare_prompts(SERVED, ids, list(prompts), options, OWNER)
    return [(CALLER.job(plan.request, is_streaming=True), plan) for plan in plans]


def collect(gateway, jobs, limit=None):
    async def run():
        found = []
        async with aclosing(generation_events(gateway, jobs)) as lists:
            async for events in lists:
                found += events
                if limit is not None and len(found) >= limit:
                    break
        return found

    return asyncio.run(run())


def test_events_of_one_request_come_in_order():
    events = collect(FakeGateway(text_script(SERVED.tokenizer, "Hi"), num_cached_tokens=1), jobs_for("Once", wants_tokens=True))
    ids = SERVED.tokenizer.encode("Hi")
    assert events == [
        TokensDelta(0, ids[:1]),
        TextDelta(0, "H"),
        TokensDelta(0, ids[1:]),
        TextDelta(0, "i"),
        TokensDelta(0, [0]),
        ChoiceEnd(0, "stop"),
        UsageEnd(2, 3, 1, 0),
    ]


class Opening:
    """An outlet that is open now and then; the events that it takes stand in `found` like those that are yielded."""

    def __init__(self, found, openings):
        self.found, self.openings = found, openings

    @property
    def is_open(self):
        return next(self.openings)

    def put(self, events):
        assert not any(isinstance(event, ChoiceEnd | UsageEnd) for event in events)
        self.found += events

    def put_text(self, choice, text):
        self.found.append(TextDelta(choice, text))


@pytest.mark.parametrize("openings", [[True], [False], [True, False], [False, False, True]])
@pytest.mark.parametrize("options", [{}, {"wants_tokens": True}, {"n": 2}, {"logprobs": 1}], ids=str)
def test_events_are_the_same_when_an_outlet_takes_some(openings, options):
    jobs = jobs_for("Once", **options)
    script = text_script(SERVED.tokenizer, "One two three")
    found = []

    async def run():
        outlet = Opening(found, itertools.cycle(openings))
        async with aclosing(generation_events(FakeGateway(script), jobs, outlet)) as lists:
            async for events in lists:
                found.extend(events)

    asyncio.run(run())
    assert found == collect(FakeGateway(script), jobs)


def test_stream_fails_when_its_outlet_raises():
    class Broken(Opening):
        def put_text(self, choice, text):
            raise ValueError("broken")

    async def run():
        outlet = Broken([], itertools.repeat(True))
        gateway = FakeGateway(text_script(SERVED.tokenizer, "One two three"))
        async with aclosing(generation_events(gateway, jobs_for("Once"), outlet)) as lists:
            async for _ in lists:
                pass

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(run())


def test_usage_of_all_requests_comes_once_and_last():
    gateway = FakeGateway(text_script(SERVED.tokenizer, "Hi"), num_cached_tokens=2)
    events = collect(gateway, jobs_for("Once", "Upon", "Hi"))
    assert events[-1] == UsageEnd(6, 9, 6, 0)
    assert sum(isinstance(event, UsageEnd) for event in events) == 1
    assert sorted(event.choice for event in events if isinstance(event, ChoiceEnd)) == [0, 1, 2]
    assert all(stream.is_left and not stream.aborts for stream in gateway.streams)


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_everything_is_aborted_when_the_reader_stops(num_prompts):
    gateway = FakeGateway(text_script(SERVED.tokenizer, "One two three four five"))
    collect(gateway, jobs_for(*["Once"] * num_prompts), limit=1)
    assert [stream.aborts for stream in gateway.streams] == [["cancelled"]] * num_prompts


def test_what_was_opened_is_left_when_a_later_one_is_refused():
    class Refusing(FakeGateway):
        def open(self, job):
            if len(self.streams) == 2:
                raise overloaded("full", 1.0)
            return super().open(job)

    gateway = Refusing(text_script(SERVED.tokenizer, "Hi"))
    with pytest.raises(ApiError, match="full"):
        collect(gateway, jobs_for("a", "b", "c"))
    assert [stream.aborts for stream in gateway.streams] == [["cancelled"]] * 2


@pytest.mark.parametrize(
    ("step", "status"),
    [
        (RequestDelta("r0", [], True, error="the prompt has 9 tokens", error_param="prompt", is_refused=True), 400),
        (RequestDelta("r0", [ChoiceDelta(0, "", [], finish_reason="error")], True, error="KeyError: 'secret' in 7"), 500),
        (RequestDelta("r0", [ChoiceDelta(0, "", [], finish_reason="abort")], True), 503),
        (RequestDelta("r0", [], True), 503),
    ],
    ids=["refused", "failed", "aborted", "nothing"],
)
def test_request_that_does_not_end_well_raises(step, status):
    with pytest.raises(ApiError) as caught:
        collect(FakeGateway(lambda job: [[ChoiceDelta(0, "a", [5])], step]), jobs_for("Once"))
    assert caught.value.status == status
    assert "secret" not in caught.value.message
    assert ("KeyError: '...' in 7" in caught.value.message) == (status == 500)


def test_stream_that_ends_too_early_raises():
    class Cut(FakeGateway):
        def open(self, job):
            stream = super().open(job)
            stream.steps = [RequestDelta("r0", [ChoiceDelta(0, "a", [5])], False)]
            return stream

    with pytest.raises(ApiError, match="before it was complete"):
        collect(Cut(lambda job: []), jobs_for("Once"))


def test_prompt_positions_carry_the_number_of_the_prompt():
    gateway = FakeGateway(text_script(SERVED.tokenizer, "Hi"))
    events = collect(gateway, jobs_for("Once", "Upon", prompt_logprobs=1))
    found = {event.prompt: event.token_ids for event in events if isinstance(event, PromptPositions)}
    assert found == {index: tuple(SERVED.tokenizer.encode(text)) for index, text in enumerate(("Once", "Upon"))}
