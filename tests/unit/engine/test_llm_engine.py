"""LLMEngine: one terminal event per request, whatever happens to it or to a step."""

import random
import shutil
import signal

import pytest
import torch

from quire import LLM, EngineConfig, LLMEngine, ModelFormatError, RequestError, SamplingParams, StructuredOutputsParams
from quire.worker.step_driver import StepDriver
from tests.tiny_checkpoint import VOCAB_SIZE


def make_engine(model, **options):
    return LLMEngine(EngineConfig(model=str(model), **{"num_kv_blocks": 100, "block_size": 4, **options}))


def run_to_end(engine):
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def greedy(**options):
    return SamplingParams(temperature=0.0, ignore_eos=True, **options)


def test_step_hands_out_cumulative_outputs_by_default(tiny_model):
    engine = make_engine(tiny_model)
    engine.add_request("a", [1, 2, 3], greedy(max_tokens=4))
    outputs = run_to_end(engine)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 2, 3, 4]
    assert [o.finished for o in outputs] == [False, False, False, True]
    engine.close()


def test_deltas_join_to_the_final_output(tiny_model):
    engine = make_engine(tiny_model)
    params = SamplingParams(n=3, temperature=1.0, seed=2, max_tokens=12, ignore_eos=True, logprobs=1, stop=["e"])
    engine.add_request("delta", "the quick", params, output_kind="delta")
    engine.add_request("final", "the quick", params, output_kind="final")
    deltas, final = [], None
    for output in run_to_end(engine):
        if output.request_id == "delta":
            deltas.append(output)
        else:
            assert final is None
            final = output
    assert [d.finished for d in deltas] == [False] * (len(deltas) - 1) + [True]
    for choice in final.outputs:
        parts = [c for d in deltas for c in d.outputs if c.index == choice.index]
        assert "".join(p.text for p in parts) == choice.text
        assert [t for p in parts for t in p.token_ids] == choice.token_ids
        assert [e for p in parts for e in p.logprobs] == choice.logprobs
        assert [p.finish_reason for p in parts if p.finished] == [choice.finish_reason]
        assert parts[-1].stop_reason == choice.stop_reason
    engine.close()


def test_abort_gives_the_last_output_and_frees_everything(tiny_model):
    engine = make_engine(tiny_model)
    engine.add_request("a", [1, 2, 3], greedy(max_tokens=50))
    engine.add_request("b", [4, 5, 6], greedy(max_tokens=3))
    engine.step()
    output = engine.abort_request("a")
    assert output.finished
    assert output.outputs[0].finish_reason == "abort"
    assert len(output.outputs[0].token_ids) == 1
    assert engine.abort_request("a") is None
    assert engine.abort_request("unknown") is None
    assert [o.request_id for o in run_to_end(engine) if o.finished] == ["b"]
    assert engine.scheduler.kv_usage == 0
    engine.close()


def test_request_id_in_use_is_refused(tiny_model):
    engine = make_engine(tiny_model)
    engine.add_request("a", [1], greedy(max_tokens=2))
    with pytest.raises(RequestError, match="in use"):
        engine.add_request("a", [1], greedy(max_tokens=2))
    assert len([o for o in run_to_end(engine) if o.finished]) == 1
    engine.add_request("a", [1], greedy(max_tokens=2))
    engine.close()


def test_failing_step_ends_its_sequences_and_spares_the_others(tiny_model, monkeypatch):
    engine = make_engine(tiny_model, max_num_seqs=1)
    oracle = make_engine(tiny_model)
    oracle.add_request("b", [4, 5, 6], greedy(max_tokens=3))
    expected = run_to_end(oracle)[-1].outputs[0].token_ids
    engine.add_request("a", [1, 2, 3], greedy(max_tokens=5))
    engine.add_request("b", [4, 5, 6], greedy(max_tokens=3))
    engine.step()
    real = engine.runner.executor.target.model.forward
    monkeypatch.setattr(
        engine.runner.executor.target.model, "forward", lambda *args: (_ for _ in ()).throw(MemoryError("no room"))
    )
    (failed,) = engine.step()
    assert (failed.request_id, failed.finished, failed.outputs[0].finish_reason) == ("a", True, "error")
    assert "no room" in failed.error
    monkeypatch.setattr(engine.runner.executor.target.model, "forward", real)
    final = run_to_end(engine)[-1]
    assert (final.request_id, final.outputs[0].token_ids) == ("b", expected)
    assert engine.scheduler.kv_usage == 0
    engine.close()


def test_step_that_fails_while_its_plan_is_applied_leaves_the_engine_usable(tiny_model, monkeypatch):
    engine = make_engine(tiny_model, max_num_seqs=2)
    for name in ("a", "b"):
        engine.add_request(name, [1, 2, 3], greedy(max_tokens=5))
    batch = engine.runner.batch
    real = batch.append_blocks
    monkeypatch.setattr(batch, "append_blocks", lambda row, blocks: (_ for _ in ()).throw(MemoryError("no room")))
    assert [o.outputs[0].finish_reason for o in engine.step()] == ["error", "error"]
    monkeypatch.setattr(batch, "append_blocks", real)
    for name in ("c", "d"):
        engine.add_request(name, [1, 2, 3], greedy(max_tokens=5))
    ends = [o for o in run_to_end(engine) if o.finished]
    assert [o.outputs[0].finish_reason for o in ends] == ["length", "length"]
    engine.close()


@pytest.mark.parametrize("place", ["schedule", "execute", "commit"])
def test_interrupt_within_a_step_is_raised_after_it_and_loses_nothing(tiny_model, monkeypatch, place):
    engine = make_engine(tiny_model)
    engine.add_request("a", [1, 2, 3], greedy(max_tokens=3))
    owner = engine.runner if place == "execute" else engine.scheduler
    real = getattr(owner, place)

    def interrupt(*args):
        signal.raise_signal(signal.SIGINT)
        return real(*args)

    monkeypatch.setattr(owner, place, interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.setattr(owner, place, real)
    assert engine.has_unfinished_requests()
    outputs = run_to_end(engine)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 2, 3]
    assert outputs[-1].outputs[0].finish_reason == "length"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    engine.close()


def test_second_interrupt_ends_the_step_at_once_and_the_engine_goes_on(tiny_model, monkeypatch):
    engine = make_engine(tiny_model, max_num_seqs=1)
    engine.add_request("a", [1, 2, 3], greedy(max_tokens=3))
    engine.add_request("b", [1, 2, 3], greedy(max_tokens=3))
    real = engine.runner.execute

    def interrupt(plan):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not reached")

    monkeypatch.setattr(engine.runner, "execute", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.setattr(engine.runner, "execute", real)
    ends = {o.request_id: o.outputs[0].finish_reason for o in run_to_end(engine) if o.finished}
    assert ends == {"a": "error", "b": "length"}
    engine.close()


def test_interrupted_generate_leaves_nothing_running(tiny_model, monkeypatch):
    llm = LLM(str(tiny_model), num_kv_blocks=50, block_size=4)
    expected = llm.generate([[1, 2, 3]], greedy(max_tokens=8), use_tqdm=False)[0].outputs[0].token_ids
    real = llm.llm_engine.runner.execute
    steps = []

    def interrupt(plan):
        steps.append(plan)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return real(plan)

    monkeypatch.setattr(llm.llm_engine.runner, "execute", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3], [4]], greedy(max_tokens=8), use_tqdm=False)
    assert llm.llm_engine.num_unfinished_requests() == 0
    assert llm.generate([[1, 2, 3]], greedy(max_tokens=8), use_tqdm=False)[0].outputs[0].token_ids == expected
    llm.close()


def test_failing_text_of_one_request_is_its_own_affair(tiny_model, monkeypatch):
    engine = make_engine(tiny_model)
    engine.add_request("bad", "the", SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=5, ignore_eos=True))
    engine.add_request("good", "the", greedy(max_tokens=3))
    detokenizer = engine.streams["bad"].choices[1].detokenizer
    monkeypatch.setattr(detokenizer, "append", lambda ids: 1 / 0)
    ends = {o.request_id: o for o in run_to_end(engine) if o.finished}
    assert {c.finish_reason for c in ends["bad"].outputs} == {"error"}
    assert "ZeroDivisionError" in ends["bad"].error
    assert ends["good"].outputs[0].finish_reason == "length"
    assert engine.scheduler.kv_usage == 0
    engine.close()


def test_output_that_fails_to_start_leaves_no_sequence_behind(tiny_model, monkeypatch):
    engine = make_engine(tiny_model)
    monkeypatch.setattr("quire.engine.output.IncrementalDetokenizer", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.add_request("a", "the", greedy(max_tokens=3))
    assert not engine.has_unfinished_requests()
    engine.close()


def test_sequence_with_nan_logits_ends_with_an_error_alone(tiny_model, monkeypatch):
    engine = make_engine(tiny_model)
    engine.add_request("bad", [1, 2], greedy(max_tokens=5))
    engine.add_request("good", [4, 5, 6], greedy(max_tokens=3))
    real = engine.runner.executor.target.model.logits

    def poisoned(hidden):
        logits = real(hidden).clone()
        logits[0] = torch.nan
        return logits

    monkeypatch.setattr(engine.runner.executor.target.model, "logits", poisoned)
    outputs = engine.step()
    monkeypatch.setattr(engine.runner.executor.target.model, "logits", real)
    bad = next(o for o in outputs if o.request_id == "bad")
    assert (bad.finished, bad.outputs[0].finish_reason) == (True, "error")
    assert "NaN" in bad.error
    assert next(o for o in run_to_end(engine) if o.finished).outputs[0].finish_reason == "length"
    engine.close()


def test_nan_left_in_freed_blocks_does_not_reach_a_later_sequence(tiny_model):
    engine = make_engine(tiny_model, num_kv_blocks=6)
    engine.add_request("a", [1, 2, 3, 4, 5], greedy(max_tokens=6))
    expected = run_to_end(engine)[-1].outputs[0].token_ids
    for cache in (*engine.runner.executor.target.kv.k, *engine.runner.executor.target.kv.v):
        cache.fill_(torch.nan)
    engine.add_request("b", {"prompt_token_ids": [1, 2, 3, 4, 5], "cache_salt": "other"}, greedy(max_tokens=6))
    assert run_to_end(engine)[-1].outputs[0].token_ids == expected
    engine.close()


def test_cache_salt_keeps_prefixes_apart(tiny_model):
    engine = make_engine(tiny_model)
    prompt = list(range(20))
    cached = []
    for number, salt in enumerate(["", "", "x", "x", ""]):
        engine.add_request(str(number), {"prompt_token_ids": prompt, "cache_salt": salt}, greedy(max_tokens=1))
        cached.append(run_to_end(engine)[-1].metrics.num_cached_tokens)
    assert cached == [0, 16, 0, 16, 16]
    engine.close()


def test_priority_policy_runs_urgent_requests_first(tiny_model):
    engine = make_engine(tiny_model, max_num_seqs=1, scheduling_policy="priority")
    for name, priority in (("low", 5), ("high", 1), ("middle", 3)):
        engine.add_request(name, [1, 2, 3], greedy(max_tokens=2, priority=priority))
    assert [o.request_id for o in run_to_end(engine) if o.finished] == ["high", "middle", "low"]
    engine.close()


def test_decoding_goes_on_while_a_long_prompt_is_computed(tiny_model):
    engine = make_engine(tiny_model, max_num_seqs=2, max_num_batched_tokens=8)
    engine.add_request("short", [1, 2], greedy(max_tokens=20))
    engine.step()
    engine.add_request("long", [3] * 70, greedy(max_tokens=1))
    for _ in range(9):  # 70 prompt tokens in chunks of 7, beside one decoded token
        assert [o.request_id for o in engine.step()] == ["short"]
    assert {o.request_id for o in engine.step()} == {"short", "long"}
    engine.close()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(6))
def test_every_request_ends_exactly_once_in_a_random_run(tiny_model, seed):
    rng = random.Random(seed)
    engine = make_engine(
        tiny_model,
        num_kv_blocks=rng.choice([12, 40]),
        max_num_seqs=rng.choice([2, 6]),
        max_num_batched_tokens=rng.choice([6, 50]),
        enable_prefix_caching=rng.random() < 0.5,
    )
    ends: dict[str, int] = {}
    names = []

    def take(outputs):
        for output in outputs:
            ends[output.request_id] = ends.get(output.request_id, 0) + output.finished

    for number in range(60):
        if rng.random() < 0.5:
            name = f"r{number}"
            prompt = [rng.randrange(VOCAB_SIZE)] * rng.randrange(1, 20)
            n = rng.choice([1, 1, 3])
            params = SamplingParams(
                n=n,
                temperature=0.0 if n == 1 and rng.random() < 0.5 else 1.0,
                max_tokens=rng.randrange(1, 12),
                stop=rng.choice([None, ["e"]]),
                prompt_logprobs=rng.choice([None, 1]),
            )
            engine.add_request(name, prompt, params, rng.choice(["delta", "cumulative", "final"]))
            names.append(name)
        if names and rng.random() < 0.15:
            take(filter(None, [engine.abort_request(rng.choice(names))]))
        take(engine.step())
    take(run_to_end(engine))
    assert ends == dict.fromkeys(names, 1)
    assert engine.scheduler.kv_usage == 0
    assert engine.num_unfinished_requests() == 0
    engine.close()


def test_runner_is_closed_when_there_is_no_tokenizer(tiny_model, tmp_path, monkeypatch):
    # Its threads would go on beside the end of the process, which that ended with an abort.
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    closed = []
    monkeypatch.setattr(StepDriver, "close", lambda runner: closed.append(runner))
    with pytest.raises(ModelFormatError, match="has no tokenizer"):
        make_engine(tmp_path / "model")
    assert len(closed) == 1


def test_last_output_has_a_timeline_when_the_engine_records_it(tiny_model):
    engine = make_engine(tiny_model, max_num_batched_tokens=8, max_num_seqs=2)
    engine.records_timelines = True
    engine.add_request("a", list(range(1, 21)), greedy(max_tokens=4))
    engine.step()
    assert [event.kind for event in engine.timeline_of("a").events] == ["queue", "admit", "prefill"]
    *before, last = run_to_end(engine)
    assert all(output.metrics.timeline is None for output in before)
    metrics, events = last.metrics, last.metrics.timeline.events
    assert [event.kind for event in events] == ["queue", "admit", *["prefill"] * 3, "decode", "finish"]
    assert [event.num_tokens for event in events if event.kind == "prefill"] == [8, 8, 4]
    assert (events[-2].num_tokens, events[-1].reason) == (3, "length")
    assert metrics.arrival_time <= events[0].start_s <= metrics.first_scheduled_time <= metrics.first_token_time
    assert events[-2].start_s <= metrics.first_token_time <= metrics.finished_time
    assert engine.timeline_of("a") is None
    engine.close()


def test_no_timeline_is_made_when_the_engine_does_not_record_it(tiny_model):
    engine = make_engine(tiny_model)
    engine.add_request("a", [1, 2, 3], greedy(max_tokens=2))
    assert engine.timeline_of("a") is None
    assert run_to_end(engine)[-1].metrics.timeline is None
    engine.close()


def test_compilation_of_a_constraint_is_in_the_timeline(tiny_model):
    engine = make_engine(tiny_model)
    engine.records_timelines = True
    params = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(regex="[ab]{1,3}"))
    engine.add_request("a", [1, 2, 3], params)
    events = run_to_end(engine)[-1].metrics.timeline.events
    assert [event.kind for event in events][:3] == ["compile", "queue", "admit"]
    assert events[0].start_s <= events[0].end_s == events[1].start_s
    engine.close()
