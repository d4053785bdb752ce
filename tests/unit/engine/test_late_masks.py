"""Slow grammars: a sequence that waits for a mask delays no other, and gets the same tokens."""

import random
import threading

import pytest

pytest.importorskip("llguidance")

from quire import LLMEngine, SamplingParams, StructuredOutputsParams
from quire.engine.scheduling import check_invariants
from quire.kernels.native import load_native
from quire.worker.grammar_masks import MaskWaitPolicy
from tests.unit.engine.held_masks import Gate, run, said, submit
from tests.unit.engine.one_compiler import one_compiler
from tests.unit.speculate.proposers import PROPOSERS, install


@pytest.fixture(scope="module", autouse=True)
def compiled():
    with one_compiler():
        yield


OPTIONS = {"max_num_seqs": 8, "block_size": 4, "num_kv_blocks": 200}
SCHEMA = {
    "type": "object",
    "properties": {"identifier": {"type": "integer", "minimum": 0, "maximum": 999}, "label": {"enum": ["short", "longer"]}},
    "required": ["identifier", "label"],
    "additionalProperties": False,
}
HASTY = MaskWaitPolicy(share=0.0, least_s=0.0, most_s=0.0, alone_s=0.0)


def params(asked=None, **fields):
    wanted = None if asked is None else StructuredOutputsParams(**asked)
    return SamplingParams(structured_outputs=wanted, **{"max_tokens": 30, "seed": 3, **fields})


SLOW = params({"regex": "(ab|cd){3,9}"})
QUICK = params({"regex": "[xyz]{24}"}, seed=4)
FREE = params(ignore_eos=True, max_tokens=24)


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def engine(tiny_model, gate):
    engine = LLMEngine(str(tiny_model), **OPTIONS)
    yield engine
    gate.open()
    engine.close()
    assert gate.violations == []


def alone(model, prompt, wanted, **options):
    """Return what a request says by itself, in steps that wait for every mask."""
    engine = LLMEngine(str(model), **{**OPTIONS, **options})
    engine.runner.grammar_masks.wait_policy = None
    try:
        submit(engine, "alone", prompt, wanted)
        return said(run(engine)["alone"])
    finally:
        engine.close()


def test_others_go_on_to_their_end_while_a_mask_is_missing(tiny_model, engine, gate):
    submit(engine, "slow", [7, 8, 9], SLOW, gate)
    submit(engine, "free", [5] * 6, FREE)
    submit(engine, "quick", [1, 2], QUICK)
    outputs = run(engine, until=lambda outputs: sum(output.finished for output in outputs.values()) == 2)
    assert {name for name, output in outputs.items() if output.finished} == {"free", "quick"}
    gate.wait_until_held()
    assert "slow" not in outputs
    gate.open()
    outputs |= run(engine)
    assert said(outputs["slow"]) == alone(tiny_model, [7, 8, 9], SLOW)
    assert said(outputs["free"]) == alone(tiny_model, [5] * 6, FREE)
    assert said(outputs["quick"]) == alone(tiny_model, [1, 2], QUICK)


def test_late_sequence_is_in_no_step_until_its_mask_is_there(engine, gate):
    """It computes nothing meanwhile, and its last token once more when it comes back."""
    submit(engine, "slow", [7, 8, 9], SLOW, gate)
    submit(engine, "free", [5] * 6, FREE)
    plans = []
    execute = engine.runner.execute
    engine.runner.execute = lambda plan: plans.append(plan) or execute(plan)
    num_free_tokens = iter(range(9))
    run(engine, until=lambda outputs: next(num_free_tokens, None) is None)
    assert dict(plans[0].num_scheduled_tokens) == {0: 3, 1: 6}
    assert [dict(plan.num_scheduled_tokens) for plan in plans[1:]] == [{1: 1}] * (len(plans) - 1)
    (slow, _) = engine.scheduler.running
    assert (slow.is_mask_pending, slow.num_computed_tokens, slow.num_tokens) == (True, 2, 3)
    check_invariants(engine.scheduler)
    gate.open()
    plans.clear()
    run(engine, until=lambda outputs: "slow" in outputs)
    assert plans[-1].num_scheduled_tokens[0] == 1


def test_steps_wait_and_compute_nothing_when_only_late_sequences_are_left(engine, gate):
    waits = []
    filler = engine.runner.grammar_masks.filler
    wait = filler.wait_for_any

    def counted(fills, timeout_s):
        waits.append(timeout_s)
        if len(waits) == 6:
            gate.open()
        return wait(fills, timeout_s)

    filler.wait_for_any = counted
    submit(engine, "slow", [7, 8, 9], SLOW, gate)
    run(engine, until=lambda outputs: len(waits) >= 6)
    # The step that sampled nothing, and then steps of nobody, each of which has waited.
    assert engine.stats.num_batched_tokens <= 4
    assert len(waits) >= engine.stats.num_steps
    assert all(timeout_s > 0 for timeout_s in waits)
    assert run(engine)["slow"].finished


def test_newcomers_are_served_while_only_late_sequences_are_left(engine, gate):
    submit(engine, "slow", [7, 8, 9], SLOW, gate)
    for _ in range(3):
        engine.step()
    submit(engine, "free", [5] * 6, FREE)
    outputs = run(engine, until=lambda outputs: "free" in outputs and outputs["free"].finished)
    assert "slow" not in outputs
    gate.open()
    assert run(engine)["slow"].finished


def test_aborted_request_is_gone_while_its_mask_is_still_filled(tiny_model, engine, gate):
    submit(engine, "slow", [7, 8, 9], SLOW, gate)
    submit(engine, "free", [5] * 6, FREE)
    run(engine, until=lambda outputs: bool(outputs))
    gate.wait_until_held()
    assert engine.abort_request("slow").finished
    submit(engine, "again", [7, 8, 9], SLOW)
    outputs = run(engine)
    assert gate.num_held == 1
    assert said(outputs["again"]) == alone(tiny_model, [7, 8, 9], SLOW)
    check_invariants(engine.scheduler)
    assert engine.runner.grammar_masks.take_ready() == ()


@pytest.mark.parametrize("is_caching", [True, False])
def test_preempted_sequence_gets_its_tokens_when_its_mask_was_being_filled(tiny_model, gate, is_caching):
    engine = LLMEngine(str(tiny_model), **{**OPTIONS, "num_kv_blocks": 11, "enable_prefix_caching": is_caching})
    submit(engine, "free", [5] * 6, params(ignore_eos=True, max_tokens=36))
    submit(engine, "slow", [7, 8, 9], SLOW, gate)
    outputs = run(engine, lambda: gate.let(engine.stats.num_steps == 4), lambda _: engine.scheduler.num_preemptions == 1)
    assert "slow" not in outputs or not outputs["slow"].finished
    (slow,) = engine.scheduler.waiting
    assert not slow.is_mask_pending
    outputs |= run(engine, lambda: check_invariants(engine.scheduler) or gate.open())
    engine.close()
    assert said(outputs["slow"]) == alone(tiny_model, [7, 8, 9], SLOW)
    assert gate.violations == []


def test_engine_closes_when_a_mask_is_being_filled(tiny_model, gate):
    before = set(threading.enumerate())
    engine = LLMEngine(str(tiny_model), **OPTIONS)
    for name in ("slow", "other"):
        submit(engine, name, [7, 8, 9], SLOW, gate)
    submit(engine, "free", [5] * 6, FREE)
    run(engine, until=lambda outputs: "free" in outputs)
    gate.wait_until_held(2)
    closing = threading.Thread(target=engine.close)
    closing.start()
    gate.open()
    closing.join(60)
    assert not closing.is_alive()
    assert not any(thread.name.startswith("quire-masks") for thread in set(threading.enumerate()) - before)


def test_request_ends_with_its_error_when_a_late_mask_fails(engine, gate, monkeypatch):
    submit(engine, "slow", [7, 8, 9], SLOW, gate)
    submit(engine, "free", [5] * 6, FREE)
    run(engine, until=lambda outputs: "free" in outputs)
    gate.wait_until_held()
    (fill,) = engine.runner.grammar_masks.pending.values()

    def fail(matcher, words):
        raise ValueError("it is too much")

    monkeypatch.setattr(fill.matcher.inner.source, "fill", fail)  # other tests have it, too
    gate.open()
    outputs = run(engine)
    assert outputs["slow"].outputs[0].finish_reason == "error"
    assert "it is too much" in outputs["slow"].error
    assert outputs["free"].outputs[0].finish_reason == "length"


NATIVE = {"max_num_seqs": 8, "block_size": 16, "num_kv_blocks": 60}  # the kernels whose sums have one order
ASKED = [
    ([7, 8, 9], params({"json": SCHEMA}, logprobs=2, temperature=0.0)),
    (list(range(20, 60)), params({"regex": "(ab|cd){2,5}-end of it"}, n=3, best_of=3)),
    ([5] * 17, params({"choice": ["a rather long choice", "a rather short one", "b"]}, seed=8, repetition_penalty=1.2)),
    ([*range(20, 52), 1], params({"regex": "[a-c]{8,20}"}, prompt_logprobs=1, seed=9)),
    ([250, 3], params(ignore_eos=True, max_tokens=20)),
]


@pytest.fixture(scope="module")
def expected(tiny_model):
    if load_native() is None:
        pytest.skip("needs the native kernels, whose sums have one order")
    options = {**NATIVE, "enable_prefix_caching": False}
    return [alone(tiny_model, prompt, wanted, **options) for prompt, wanted in ASKED]


class Clock:
    """Makes some masks dear at random; none so cheap that a step fills it by itself, which would wait at the gate."""

    def __init__(self, rng):
        self._rng, self._now = rng, 0.0

    def __call__(self):
        self._now += self._rng.choice([1e-3, 1e-3, 1.0])
        return self._now


def live(model, expected, seed, install_in=lambda engine: None, **options):
    """Run all requests, masks coming at random, some after many steps; return how many sequences were late."""
    gate, rng = Gate(), random.Random(seed)
    engine = LLMEngine(str(model), **{**NATIVE, **options})
    engine.runner.grammar_masks.wait_policy = HASTY
    engine.runner.grammar_masks.filler.clock = Clock(random.Random(seed))
    install_in(engine)
    num_late = 0
    commit = engine.scheduler.commit

    def counted(plan, result, now):
        nonlocal num_late
        num_late += len(result.mask_pending)
        return commit(plan, result, now)

    engine.scheduler.commit = counted

    def between():
        check_invariants(engine.scheduler)
        if rng.random() < 0.5 or not any(not sequence.is_mask_pending for sequence in engine.scheduler.running):
            gate.let(rng.randint(1, 6))

    try:
        for index, (prompt, wanted) in enumerate(ASKED):
            submit(engine, str(index), prompt, wanted, gate if wanted.structured_outputs is not None else None)
        outputs = run(engine, between)
    finally:
        gate.open()
        engine.close()
    assert gate.violations == []
    assert [said(outputs[str(index)]) for index in range(len(ASKED))] == expected
    return num_late


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"long_prefill_token_threshold": 7, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 9},
        {"num_kv_blocks": 14},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": False}},
    ],
    ids=["batched", "chunked", "small-steps", "preempted", "ngram"],
)
def test_same_outputs_when_masks_come_at_any_time(tiny_model, expected, options):
    assert live(tiny_model, expected, 1, **options) > 2  # how many it is depends on how busy the machine is


@pytest.mark.parametrize("kind", ["oracle", "fickle"])
@pytest.mark.parametrize("num_kv_blocks", [14, 60])
def test_same_outputs_when_masks_behind_drafts_come_at_any_time(tiny_model, expected, kind, num_kv_blocks):
    by_prompt = {
        (tuple(prompt), choice): found[choice][0]
        for (prompt, _), found in zip(ASKED, expected, strict=True)
        for choice in range(len(found))
    }

    class Holder:
        def __init__(self, engine):
            self.llm_engine = engine

    def install_in(engine):
        install(Holder(engine), PROPOSERS[kind](4, by_prompt), 4)

    assert live(tiny_model, expected, 2, install_in, num_kv_blocks=num_kv_blocks) > 4
