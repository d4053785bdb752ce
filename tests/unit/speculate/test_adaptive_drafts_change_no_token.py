"""The controller changes no token, whenever it drafts, tries, sleeps and skipped steps, while requests start and end."""

import functools
import random

import pytest

pytest.importorskip("llguidance")

from bundled_runs import BUNDLED, PROMPTS, SCHEMA, said

from quire import LLMEngine, SamplingParams, StructuredOutputsParams
from quire.engine.scheduling import check_invariants
from quire.kernels.native import load_native
from tests.unit.engine.one_compiler import one_compiler

pytestmark = pytest.mark.skipif(load_native() is None, reason="needs the native kernels, whose sums have one order")

SAMPLERS = (
    {"temperature": 0.0},
    {"temperature": 1.0, "logprobs": 0},
    {"temperature": 1.2, "top_p": 0.9, "repetition_penalty": 1.1},
    {"temperature": 0.7, "min_p": 0.05, "logprobs": 1},
)
CHEAP, DEAR = 0.02, 2.0  # what a draft takes, in plain steps


class Clock:
    """Time that passes by steps, a draft of which is dear at first, and cheap from some step on."""

    def __init__(self, first_cheap):
        self.speculator, self.num_steps, self.now_s = None, 0, 0.0
        self.first_cheap, self.random = first_cheap, random.Random(5)

    def perf_counter(self):
        cost = CHEAP if self.num_steps >= self.first_cheap else DEAR
        self.now_s += 1e-3 * (self.random.uniform(1.0, 1.02) + cost * self.speculator.num_drafts)
        return self.now_s


def jobs(scale):
    """Return step, prompt and options of each request: one alone, then some that share two seats, then one alone again."""
    rng = random.Random(2)
    found = []
    for index, length in enumerate((70, 40, 25, 150, 33, 160, 20, 120, 30, 130, 110, 20)):
        options = {"max_tokens": scale * length, "seed": index, "ignore_eos": True, **SAMPLERS[index % len(SAMPLERS)]}
        if index in (2, 8):
            asked = StructuredOutputsParams(json=SCHEMA, fit_max_tokens=False)
            options |= {"structured_outputs": asked, "ignore_eos": False}
        found.append((0 if index == 0 else scale * (20 + 5 * index), rng.choice(PROMPTS), SamplingParams(**options)))
    return found


def run(scale, clock=None, **options):
    """Return what was said to every job, and what was seen behind each step: skips, sleep, drafts, trials."""
    engine = LLMEngine("demo", **{"num_threads": 1, "max_num_seqs": 2, "num_kv_blocks": 160, "max_model_len": 1024, **options})
    speculator = engine.speculator
    controller, seen, found, waiting = None, [], {}, list(enumerate(jobs(scale)))
    if clock is None:
        engine.draft_forced(False)
    else:
        clock.speculator, controller = speculator, speculator.controller
    num_steps, num_preemptions = 0, 0
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0][1][0] <= num_steps:
            index, (_, prompt, params) = waiting.pop(0)
            engine.add_request(str(index), prompt, params)
        if clock is not None:
            clock.num_steps = num_steps
        for output in engine.step():
            if output.finished:
                found[int(output.request_id)] = output.outputs[0]
                num_preemptions += output.metrics.num_preemptions
        if controller is not None:
            seen.append((speculator.num_skipped, controller.disabled_left, bool(speculator.drafted), controller.is_trial))
        num_steps += 1
    check_invariants(engine.scheduler)
    assert engine.scheduler.kv.pool.num_free == options.get("num_kv_blocks", 160)
    engine.close()
    return [found[index] for index in sorted(found)], seen, num_preemptions


@functools.cache
def plain_outputs(scale):
    return [said(choice) for choice in run(scale)[0]]


def expect_same(monkeypatch, kind, scale, **options):
    clock = Clock(80 * scale)
    with one_compiler():
        plain = plain_outputs(scale)
        monkeypatch.setattr("quire.speculate.speculator.time", clock)
        found, seen, num_preemptions = run(scale, clock, speculative_config=BUNDLED[kind], **options)
    assert [said(choice) for choice in found] == plain
    skipped, sleeps, drafted, trying = zip(*seen, strict=True)
    first_sleep = next(step for step, left in enumerate(sleeps) if left > 96)
    first_awake = next(step for step in range(first_sleep, len(sleeps)) if sleeps[step] == 0)
    assert max(skipped) >= 20  # steps in a row of which the controller was told nothing
    assert any(trying)
    # Nothing but what is forced meanwhile, and something again.
    assert sum(drafted[first_sleep + 1 : first_awake]) == 0 < sum(drafted[:first_sleep])
    assert sum(drafted[first_awake:]) >= 3
    return num_preemptions, sum(drafted[first_awake:])


@pytest.mark.slow
def test_same_outputs_while_drafts_are_tried_and_sleep_and_are_skipped(monkeypatch):
    monkeypatch.setattr("quire.speculate.draft_controller._LOSS_SHARE", 0.08)  # a quarter of the sleep
    _, num_drafting = expect_same(monkeypatch, "eagle3", 1)
    assert num_drafting >= 8  # fewer where masks come late, as they do on a busy machine


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mtp", "medusa tree", "draft_model", "ngram"])
def test_same_outputs_through_long_sleeps(monkeypatch, kind):
    options = {"num_kv_blocks": 64} if kind in ("mtp", "draft_model") else {}
    num_preemptions, _ = expect_same(monkeypatch, kind, 4, **options)
    assert (num_preemptions > 0) is bool(options)
