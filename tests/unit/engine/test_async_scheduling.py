"""The engine a step ahead of its runner: the outputs are those of steps one by one, and every request ends once."""

import random
import signal
from itertools import pairwise

import pytest
import torch

from quire import LLM, ConfigError, EngineConfig, LLMEngine, PoolingParams, SamplingParams, StructuredOutputsParams
from quire.serving.engine_client.engine_loop import EngineLoop
from quire.serving.engine_client.messages import Abort, StepOutputs, Stop, Submit
from quire.worker.grammar_masks import MaskWaitPolicy
from tests.unit.engine.one_compiler import one_compiler

OPTIONS = {"block_size": 16, "num_kv_blocks": 40, "max_model_len": 96}


@pytest.fixture(scope="module", autouse=True)
def compiled():
    with one_compiler():
        yield


def make_engine(model, **options):
    return LLMEngine(EngineConfig(model=str(model), **{**OPTIONS, **options}))


def run_to_end(engine):
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def greedy(max_tokens, **options):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


def random_params(rng):
    kind = rng.randrange(8)
    if kind == 0:
        return greedy(rng.randint(1, 20))
    if kind == 1:
        return PoolingParams(pooling=rng.choice(["last", "mean"]))
    if kind == 2:
        return SamplingParams(max_tokens=12, seed=kind, structured_outputs=StructuredOutputsParams(regex="[0-9]{3}x"))
    common = {"temperature": 1.0, "seed": rng.randrange(99), "max_tokens": rng.randint(1, 24)}
    extras = [
        {"stop": ["e", " t"]},
        {"n": 3},
        {"logprobs": 2, "prompt_logprobs": 1},
        {"repetition_penalty": 1.2, "min_tokens": 1},
        {"top_k": 9, "stop_token_ids": list(range(0, 200, 3))},
    ]
    return SamplingParams(**common, **extras[kind - 3])


def describe(output):
    """Return the results of a request."""
    if hasattr(output.outputs, "embedding"):
        return output.outputs.embedding
    logprobs = [choice.logprobs and [list(entry) for entry in choice.logprobs] for choice in output.outputs]
    choices = [(choice.text, choice.token_ids, choice.finish_reason, choice.stop_reason) for choice in output.outputs]
    return choices, logprobs, output.prompt_logprobs and len(output.prompt_logprobs)


def outputs_of(engine, seed):
    """Run random requests that arrive a few at a time; return the results of each."""
    rng = random.Random(seed)
    shared = [rng.randrange(200) for _ in range(40)]
    left = [
        ([*shared[: rng.randrange(40)], *(rng.randrange(200) for _ in range(rng.randint(1, 30)))], random_params(rng))
        for _ in range(16)
    ]
    found, number = {}, 0
    while left or engine.has_unfinished_requests():
        for _ in range(rng.randint(0, 2)):
            if left:
                prompt, params = left.pop()
                engine.add_request(str(number), prompt, params, output_kind="final")
                number += 1
        for output in engine.step():
            assert output.request_id not in found
            found[output.request_id] = describe(output)
    assert engine.scheduler.kv_usage == 0
    assert engine.num_unfinished_requests() == 0
    return found


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("patience", [None, MaskWaitPolicy(0.0, 0.0, 0.0, 0.0)], ids=["waiting", "masks late"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_kv_blocks", [40, 8], ids=["room", "preempted"])
def test_outputs_are_those_of_steps_one_by_one(tiny_model, late_runners, seed, num_kv_blocks, patience):
    options = {"max_num_seqs": 6, "max_num_batched_tokens": 32, "num_kv_blocks": num_kv_blocks}
    found = []
    for is_ahead in (False, True):
        engine = make_engine(tiny_model, async_scheduling=None if is_ahead else False, **options)
        late_runners[-1].inner.grammar_masks.wait_policy = patience
        found.append(outputs_of(engine, seed))
        engine.close()
    assert found[0] == found[1]
    calls = [name for name, _ in late_runners[1].log]
    assert ("launch", "launch") in pairwise(calls)


def test_the_option_decides_whether_steps_are_launched_ahead(tiny_model, late_runners):
    for wish, is_ahead in ((None, True), (False, False)):
        engine = make_engine(tiny_model, async_scheduling=wish)
        engine.add_request("a", [1, 2], greedy(3))
        run_to_end(engine)
        engine.close()
        assert (late_runners[-1].log[1] == ("launch", 1)) == is_ahead


def test_the_cpu_steps_one_by_one_and_refuses_the_option(tiny_model):
    engine = make_engine(tiny_model)
    assert not engine.step_loop.is_ahead
    engine.close()
    with pytest.raises(ConfigError, match="async_scheduling needs a GPU"):
        make_engine(tiny_model, async_scheduling=True)


def test_a_stop_string_ends_a_request_whose_next_token_is_on_its_way(tiny_model, late_runners):
    plain = LLM(str(tiny_model), async_scheduling=False, **OPTIONS)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True)
    text = plain.generate("the quick", params, use_tqdm=False)[0].outputs[0].text
    plain.close()
    engine = make_engine(tiny_model)
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    engine.add_request("a", "the quick", SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True, stop=[stop]))
    outputs = run_to_end(engine)
    assert (outputs[-1].outputs[0].text, outputs[-1].outputs[0].stop_reason) == (text[: text.index(stop)], stop)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert engine.scheduler.kv_usage == 0
    engine.close()


def test_an_aborted_request_ends_at_once_and_its_step_is_waited_for_by_the_next_call(tiny_model, late_runners):
    engine = make_engine(tiny_model)
    engine.add_request("a", [1, 2, 3], greedy(50))
    engine.step()
    assert engine.abort_request("a").outputs[0].finish_reason == "abort"
    assert engine.num_unfinished_requests() == 0
    assert engine.has_unfinished_requests()
    assert engine.step() == []
    assert not engine.has_unfinished_requests()
    assert engine.scheduler.kv_usage == 0
    engine.close()


def test_close_waits_for_the_step_in_flight(tiny_model, late_runners):
    engine = make_engine(tiny_model)
    engine.add_request("a", [1, 2, 3], greedy(50))
    engine.step()
    engine.close()
    assert late_runners[0].log[-1] == ("collect", 1)
    assert engine.scheduler.kv_usage == 0


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(tiny_model, late_runners, monkeypatch):
    engine = make_engine(tiny_model, max_num_seqs=1)
    engine.add_request("a", [1, 2, 3], greedy(5))
    engine.add_request("b", [4, 5, 6], greedy(3))
    engine.step()
    inner = late_runners[0].inner
    real = inner.execute
    monkeypatch.setattr(inner, "execute", lambda plan: (_ for _ in ()).throw(MemoryError("no room")))
    (failed,) = engine.step()
    assert (failed.request_id, failed.outputs[0].finish_reason) == ("a", "error")
    assert "no room" in failed.error
    monkeypatch.setattr(inner, "execute", real)
    assert run_to_end(engine)[-1].outputs[0].finish_reason == "length"
    assert engine.scheduler.kv_usage == 0
    engine.close()


def test_logits_that_are_not_finite_end_one_request_alone(tiny_model, late_runners, monkeypatch):
    engine = make_engine(tiny_model, block_size=4)  # torch's decoder
    engine.add_request("bad", [1, 2], greedy(5))
    engine.add_request("good", [4, 5, 6], greedy(3))
    decoder = late_runners[0].inner.executor.target.model
    real = decoder.logits

    def poisoned(hidden):
        logits = real(hidden).clone()
        logits[0] = torch.nan
        return logits

    monkeypatch.setattr(decoder, "logits", poisoned)
    (bad, _) = engine.step()
    monkeypatch.setattr(decoder, "logits", real)
    assert (bad.request_id, bad.outputs[0].finish_reason) == ("bad", "error")
    last = run_to_end(engine)[-1]
    assert (last.request_id, last.outputs[0].finish_reason, len(last.outputs[0].token_ids)) == ("good", "length", 3)
    engine.close()


def test_an_interrupted_generate_leaves_nothing_running(tiny_model, late_runners, monkeypatch):
    llm = LLM(str(tiny_model), **OPTIONS)
    expected = llm.generate([[1, 2, 3]], greedy(8), use_tqdm=False)[0].outputs[0].token_ids
    runner = late_runners[0]
    real, steps = runner.launch, []

    def interrupt(plan):
        steps.append(plan)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return real(plan)

    monkeypatch.setattr(runner, "launch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3], [4]], greedy(8), use_tqdm=False)
    assert llm.llm_engine.num_unfinished_requests() == 0
    monkeypatch.setattr(runner, "launch", real)
    assert llm.generate([[1, 2, 3]], greedy(8), use_tqdm=False)[0].outputs[0].token_ids == expected
    assert llm.llm_engine.scheduler.kv_usage == 0
    llm.close()


class Port:
    """Gives the commands of one list per call, and Stop when the loop would sleep; keeps what is sent."""

    last_empty_s = 0.0
    num_commands = 0

    def __init__(self, script):
        self.script, self.sent = list(script), []

    def receive(self, timeout_s):
        if self.script:
            return self.script.pop(0)
        return [Stop()] if timeout_s > 0 else []

    def send(self, message):
        self.sent.append(message)

    def check_peer(self):
        pass


def test_the_servers_loop_sleeps_only_when_no_step_is_in_flight(tiny_model, late_runners):
    engine = make_engine(tiny_model)
    submits = [Submit.of(engine.make_request(name, [1, 2, 3], greedy(6))) for name in "ab"]
    port = Port([[submits[0]], [submits[1]], [], [Abort(["a"])]])
    EngineLoop(engine, port).run()
    assert late_runners[0].launched == []
    assert engine.scheduler.kv_usage == 0
    deltas = [delta for message in port.sent if isinstance(message, StepOutputs) for delta in message.deltas]
    ends = [(delta.request_id, delta.choices[0].finish_reason) for delta in deltas if delta.finished]
    assert ends == [("a", "abort"), ("b", "length")]
    reports = [message.report for message in port.sent if isinstance(message, StepOutputs) and message.report is not None]
    assert [report.step_id for report in reports] == list(range(len(reports)))
    engine.close()
