"""What a step driver gives to its executor: arrays and plain numbers, which could be sent to another process."""

import pickle
from collections import Counter
from dataclasses import is_dataclass

import numpy as np
import pytest

from quire import LLM, PoolingParams, SamplingParams, StructuredOutputsParams
from quire.model.token_runs import TreePlaces
from quire.worker.cpu_executor import CpuStepExecutor
from tests.unit.engine.one_compiler import one_compiler
from tests.unit.speculate.proposers import PROPOSERS, install

OPTIONS = {"block_size": 16, "num_kv_blocks": 24, "max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 24}
COMMANDS = ("set_sampling", "begin_step", "flush", "start_step", "keep_inputs", "move_tokens")
"""The calls that change what an executor has, or make it compute; the others only read results."""


@pytest.fixture(scope="module", autouse=True)
def compiled():
    with one_compiler():
        yield


def is_plain(value):
    if isinstance(value, (list, tuple, range)):
        return all(map(is_plain, value))
    if isinstance(value, TreePlaces):
        return is_dataclass(value) and all(is_plain(getattr(value, name)) for name in value.__slots__)
    return value is None or isinstance(value, (int, float, str, np.ndarray))


@pytest.fixture
def calls(monkeypatch):
    """Note the name and the arguments of each command, as they would arrive in another process."""
    noted = []

    def note(name):
        real = getattr(CpuStepExecutor, name)

        def noting(executor, *args):
            assert all(map(is_plain, args)), (name, args)
            arrived = pickle.loads(pickle.dumps(args))
            noted.append((name, arrived))
            return real(executor, *arrived)

        monkeypatch.setattr(CpuStepExecutor, name, noting)

    for name in COMMANDS:
        note(name)
    return noted


def run_everything(llm):
    """Run requests of all kinds, more than fit; return the results of each, and the tokens by prompt and choice."""
    common = {"max_tokens": 12, "ignore_eos": True, "detokenize": False}
    asked = [
        SamplingParams(temperature=0.0, **common),
        SamplingParams(temperature=0.9, top_k=7, seed=3, n=2, **common),
        SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1, **common),
        SamplingParams(temperature=1.0, seed=5, max_tokens=12, structured_outputs=StructuredOutputsParams(regex="[0-9]{6}x")),
    ]
    prompts = [[5 + index, *range(9, 9 + 7 * index)] for index in range(len(asked))]
    outputs = llm.generate(prompts, asked, use_tqdm=False)
    vectors = llm.embed(prompts[:2], PoolingParams(pooling="mean"), use_tqdm=False)
    tokens = [[choice.token_ids for choice in output.outputs] for output in outputs]
    by_prompt = {(tuple(prompt), i): ids for prompt, own in zip(prompts, tokens, strict=True) for i, ids in enumerate(own)}
    return (tokens, [vector.outputs.embedding for vector in vectors]), by_prompt


@pytest.mark.parametrize("drafts", ["none", "adversary", "oracle tree"])
def test_only_arrays_and_plain_numbers_reach_the_executor_when_requests_of_all_kinds_run(tiny_model, calls, drafts):
    plain = LLM(str(tiny_model), **OPTIONS)
    expected, outputs = run_everything(plain)
    plain.close()
    calls.clear()
    llm = LLM(str(tiny_model), **OPTIONS)
    if drafts != "none":
        install(llm, PROPOSERS[drafts](3, outputs), 3)
    assert run_everything(llm)[0] == expected
    llm.close()
    counts = Counter(name for name, _ in calls)
    assert counts["start_step"] > 5
    assert counts["begin_step"] > 4
    assert counts["set_sampling"] >= 7
    assert (counts["move_tokens"] > 0) == (drafts == "oracle tree")
    num_drafts = sum(len(args[0].logit_rows) - args[0].num_ready for name, args in calls if name == "start_step")
    assert num_drafts > 0
