"""LLM over two replicas, as processes: the outputs of one engine in the order of the prompts, errors, and the death of one."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from unittest import mock

import pytest

from quire import LLM, AsyncLLM, ConfigError, LoRARequest, RequestError, SamplingParams, StructuredOutputsParams
from quire.contracts.sampling_params import BeamSearchParams
from quire.engine.replica_messages import AdapterCommand
from tests.lora_adapter import write_adapter

pytestmark = pytest.mark.slow

OPTIONS = {"max_num_seqs": 4, "num_kv_blocks": 256, "num_threads": 1}
PROMPTS = [
    f"{start} {word}" for start in ("It was a cold morning when", "The detective") for word in ("the", "a", "my", "one")
] * 2


@pytest.fixture(scope="module")
def one():
    llm = LLM("demo", **OPTIONS)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def two():
    llm = LLM("demo", data_parallel_size=2, **OPTIONS)
    yield llm
    llm.close()


def _shown(outputs):
    return [
        [(choice.token_ids, choice.text, choice.logprobs, choice.finish_reason) for choice in one.outputs] for one in outputs
    ]


def test_outputs_are_those_of_one_engine_in_order(one, two):
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, n=2, logprobs=2)
    assert _shown(two.generate(PROMPTS, params)) == _shown(one.generate(PROMPTS, params, use_tqdm=False))
    given = [SamplingParams(max_tokens=length, temperature=0.0) for length in range(1, 1 + len(PROMPTS))]
    found = two.generate(PROMPTS, given, use_tqdm=False)
    assert _shown(found) == _shown(one.generate(PROMPTS, given, use_tqdm=False))
    assert [output.prompt for output in found] == PROMPTS


def test_seeds_follow_the_order_of_requests(one, two):
    ours, theirs = LLM("demo", **OPTIONS), LLM("demo", data_parallel_size=2, **OPTIONS)
    params = SamplingParams(temperature=1.0, max_tokens=8)
    expected = [_shown(ours.generate(PROMPTS, params, use_tqdm=False)) for _ in range(2)]
    assert [_shown(theirs.generate(PROMPTS, params, use_tqdm=False)) for _ in range(2)] == expected
    ours.close()
    theirs.close()


def test_embeddings_constraints_and_beams_are_those_of_one_engine(one, two):
    ours, theirs = one.embed(PROMPTS, use_tqdm=False), two.embed(PROMPTS, use_tqdm=False)
    assert [output.outputs.embedding for output in ours] == [output.outputs.embedding for output in theirs]
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]), temperature=0.0)
    assert _shown(two.generate(PROMPTS, params, use_tqdm=False)) == _shown(one.generate(PROMPTS, params, use_tqdm=False))
    beams = BeamSearchParams(beam_width=2, max_tokens=5)
    texts = [[beam.text for beam in output.sequences] for output in one.beam_search(PROMPTS[:2], beams)]
    assert [[beam.text for beam in output.sequences] for output in two.beam_search(PROMPTS[:2], beams)] == texts


def test_adapters_are_loaded_and_unloaded_in_every_replica(tmp_path):
    shapes = {f"model.layers.{layer}.self_attn.q_proj": (256, 256) for layer in range(8)}
    loras = [LoRARequest(name, number, str(tmp_path / name)) for number, name in ((1, "one"), (2, "two"))]
    for lora in loras:
        write_adapter(tmp_path / lora.lora_name, shapes, seed=lora.lora_int_id)
    asked = [*loras, None, loras[0]] * 4
    params = SamplingParams(temperature=0.0, max_tokens=8)
    ours, theirs = LLM("demo", enable_lora=True, **OPTIONS), LLM("demo", enable_lora=True, data_parallel_size=2, **OPTIONS)
    engine = theirs.llm_engine
    assert [engine.add_lora(loras[0]), engine.add_lora(loras[0])] == [True, False]
    assert {len(answer.loaded) for answer in engine.ask(AdapterCommand("list"))} == {1}
    with pytest.raises(RequestError, match="is no folder of this machine"):
        engine.add_lora(LoRARequest("none", 3, str(tmp_path / "none")))
    assert engine.list_loras() == {1}
    expected = _shown(ours.generate(PROMPTS, params, use_tqdm=False, lora_request=asked))
    assert _shown(theirs.generate(PROMPTS, params, use_tqdm=False, lora_request=asked)) == expected
    assert engine.list_loras() == {1, 2}
    assert [engine.remove_lora(1), engine.remove_lora(1)] == [True, False]
    assert engine.list_loras() == {2}
    theirs.sleep()
    with pytest.raises(ConfigError, match="asleep"):
        engine.add_lora(loras[0])
    theirs.wake_up()
    assert _shown(theirs.generate(PROMPTS, params, use_tqdm=False, lora_request=asked)) == expected
    ours.close()
    theirs.close()


def test_bad_requests_raise_before_anything_runs(two):
    with pytest.raises(RequestError, match="max_model_len 1024"):
        two.generate([PROMPTS[0], [1] * 3000], use_tqdm=False)
    with pytest.raises(RequestError, match="regex"):
        two.generate("a", SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")), use_tqdm=False)
    limited = BeamSearchParams(beam_width=2, max_tokens=5, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    with pytest.raises(RequestError, match="data_parallel_size 1"):
        two.beam_search("a", limited)


def test_a_killed_replica_costs_its_own_requests_and_is_started_again(two):
    params = SamplingParams(temperature=0.0, max_tokens=600, ignore_eos=True)
    victim = two.llm_engine.pids[1]
    threading.Timer(0.4, lambda: os.kill(victim, signal.SIGKILL)).start()
    outputs = two.generate(PROMPTS, params, use_tqdm=False)
    lost = [output for output in outputs if output.error is not None]
    assert 1 <= len(lost) <= 8  # what it ran, and what was next there
    assert all("replica 1 ended" in output.error for output in lost)
    assert all(output.outputs[0].finish_reason == "error" for output in lost)
    assert all(len(output.outputs[0].token_ids) == 600 for output in outputs if output.error is None)
    assert two.llm_engine.pids[1] != victim
    short = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    assert all(output.error is None for output in two.generate(PROMPTS, short, use_tqdm=False))


def test_the_others_go_on_when_a_killed_replica_cannot_be_started_again(two, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", mock.Mock(side_effect=BlockingIOError("no more processes")))
    os.kill(two.llm_engine.pids[1], signal.SIGKILL)
    short = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for _ in range(2):
        outputs = two.generate(PROMPTS, short, use_tqdm=False)
        assert all("replica 1 ended" in output.error for output in outputs if output.error is not None)
    assert all(output.error is None for output in outputs)


def test_what_cannot_start_says_which_replica_and_the_numbers():
    with pytest.raises(ConfigError, match=r"replica 0 of 2: the model does not fit: 9\.5 MiB are available"):
        LLM("demo", data_parallel_size=2, host_memory_bytes=20_000_000, **OPTIONS)


def test_async_llm_refuses_replicas():
    with pytest.raises(ConfigError, match="data_parallel_size is 2"):
        AsyncLLM("demo", data_parallel_size=2)
