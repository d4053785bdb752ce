"""LLM.embed, AsyncLLM.embed and LLMEngine with PoolingParams: the same vector whatever else runs, and refusals."""

import asyncio
import math
import threading

import pytest
import torch

from quire import LLM, AsyncLLM, EmbeddingRequestOutput, LLMEngine, PoolingParams, RequestError, RequestOutput, SamplingParams
from quire.base.errors import WorkerError
from quire.kernels.native import load_native

NATIVE = load_native() is not None
PROMPTS = [[7, 8, 9], list(range(20, 90)), [5] * 17, [250], [*range(20, 84), 1, 2, 3], list(range(100, 132))]
PARAMS = [
    PoolingParams(),
    PoolingParams(pooling="mean"),
    PoolingParams(normalize=False),
    PoolingParams(pooling="mean", dimensions=5),
    PoolingParams(dimensions=9),
    PoolingParams(pooling="mean", normalize=False),
]
STRANGERS = [
    ([11, 12], {"temperature": 0.0}),
    (list(range(20, 70)), {"temperature": 1.0, "seed": 3, "prompt_logprobs": 2}),
    ([9] * 20, {"temperature": 0.5, "seed": 4, "n": 2}),
]
PRECISIONS = {
    "f32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}


def options(**changes):
    return {"max_num_seqs": 12, "num_kv_blocks": 80, "block_size": 16 if NATIVE else 4, "dtype": "float32", **changes}


def vectors(outputs):
    assert all(output.outputs.finish_reason == "stop" and output.finished and output.error is None for output in outputs)
    return [output.outputs.embedding for output in outputs]


def embed(llm, indices=range(6)):
    return llm.embed([PROMPTS[i] for i in indices], [PARAMS[i] for i in indices], use_tqdm=False)


def run_beside_strangers(engine):
    """Embed every prompt while other requests generate; return the vectors in order, and the others' tokens."""
    ends = {}
    for index, (prompt, params) in enumerate(STRANGERS):
        engine.add_request(f"g{index}", prompt, SamplingParams(max_tokens=30, ignore_eos=True, **params), "final")
    for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        ends.update((output.request_id, output) for output in engine.step())
        engine.add_request(f"e{index}", prompt, params)
    while engine.has_unfinished_requests():
        ends.update((output.request_id, output) for output in engine.step())
    tokens = [[c.token_ids for c in ends[f"g{index}"].outputs] for index in range(len(STRANGERS))]
    return [ends[f"e{index}"] for index in range(len(PROMPTS))], tokens


@pytest.fixture(scope="module", params=PRECISIONS)
def precision(request):
    return PRECISIONS[request.param]


@pytest.fixture(scope="module")
def alone(tiny_family, precision):
    """Each prompt by itself, whole, without a cache: the oracle."""
    llm = LLM(str(tiny_family), **options(**precision, enable_prefix_caching=False))
    found = [vectors(embed(llm, [index]))[0] for index in range(len(PROMPTS))]
    llm.close()
    return found


needs_native = pytest.mark.skipif(not NATIVE, reason="the native kernels are not built")


@pytest.mark.covering(strength=2, keep=False)
@needs_native
@pytest.mark.parametrize(
    "changes",
    [
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 13},
        {"long_prefill_token_threshold": 1},
        {"long_prefill_token_threshold": 7},
    ],
    ids=["batched", "budget", "token by token", "chunks"],
)
def test_same_bits_when_batched_with_strangers_or_chunked(tiny_family, precision, alone, changes):
    engine = LLMEngine(str(tiny_family), **options(**precision, **changes))
    outputs, tokens = run_beside_strangers(engine)
    assert vectors(outputs) == alone
    engine.close()
    plain = LLM(str(tiny_family), **options(**precision))
    for (prompt, params), expected in zip(STRANGERS, tokens, strict=True):
        request = SamplingParams(max_tokens=30, ignore_eos=True, **params)
        assert [c.token_ids for c in plain.generate([prompt], request, use_tqdm=False)[0].outputs] == expected
    plain.close()


@needs_native
def test_same_bits_when_prefixes_are_cached(tiny_family, precision, alone):
    llm = LLM(str(tiny_family), **options(**precision))
    embed(llm)
    outputs = embed(llm)
    assert vectors(outputs) == alone
    assert [output.metrics.num_cached_tokens for output in outputs] == [0, 0, 16, 0, 64, 0]  # whose mean is taken: none
    llm.close()


@pytest.mark.covering(strength=2, keep=False)
@needs_native
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "recomputed"])
def test_same_bits_when_preempted(tiny_family, precision, alone, caching):
    # The first stranger's output takes the blocks of the prompts that are computed token by token behind it.
    changes = {"num_kv_blocks": 11, "long_prefill_token_threshold": 1, "enable_prefix_caching": caching}
    engine = LLMEngine(str(tiny_family), **options(**precision, **changes))
    engine.add_request("g", [11, 12], SamplingParams(max_tokens=150, ignore_eos=True), "final")
    for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(f"e{index}", prompt, params)
    ends = {}
    while engine.has_unfinished_requests():
        ends.update((output.request_id, output) for output in engine.step())
    outputs = [ends[f"e{index}"] for index in range(len(PROMPTS))]
    assert vectors(outputs) == alone
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    engine.close()


@pytest.mark.one_in(2)
def test_torch_returns_the_same_vectors(tiny_family):
    found = []
    for block_size in (16, 4):  # native, where that is built, and torch
        engine = LLMEngine(str(tiny_family), **options(block_size=block_size, num_kv_blocks=400, max_num_batched_tokens=13))
        found.append(vectors(run_beside_strangers(engine)[0]))
        engine.close()
    for native, reference in zip(*found, strict=True):
        torch.testing.assert_close(torch.tensor(native), torch.tensor(reference), rtol=0, atol=2e-5)


@pytest.fixture(scope="module")
def llm(tiny_model):
    llm = LLM(str(tiny_model), **options(max_model_len=64))
    yield llm
    llm.close()


def test_output_has_the_fields_that_users_know(llm):
    outputs = llm.embed(["the quick fox", "the dog"], use_tqdm=False)
    assert [type(output) for output in outputs] == [EmbeddingRequestOutput] * 2
    output = outputs[0]
    assert output.prompt == "the quick fox"
    assert output.prompt_token_ids == llm.get_tokenizer().encode("the quick fox")
    assert len(output.outputs.embedding) == 32
    assert all(type(value) is float for value in output.outputs.embedding)
    assert math.hypot(*output.outputs.embedding) == pytest.approx(1.0, abs=1e-6)
    metrics = output.metrics
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.finished_time
    assert metrics.first_token_time is None


def test_dimensions_are_the_first_values_normalised_again(llm):
    whole, some, plain = (
        torch.tensor(llm.embed("the quick", params, use_tqdm=False)[0].outputs.embedding)
        for params in (
            PoolingParams(normalize=False),
            PoolingParams(dimensions=8),
            PoolingParams(dimensions=8, normalize=False),
        )
    )
    assert torch.equal(plain, whole[:8])
    torch.testing.assert_close(some, torch.nn.functional.normalize(whole[:8], dim=0))


def test_prompt_may_be_as_long_as_the_model(llm):
    assert len(vectors(llm.embed([[3] * 64], use_tqdm=False))[0]) == 32
    with pytest.raises(RequestError, match=r"65 tokens.*max_model_len is 64") as raised:
        llm.embed([[3] * 65], use_tqdm=False)
    assert raised.value.param == "prompt"


@pytest.mark.parametrize(
    "prompts, params, param, message",
    [
        ("", None, "prompt", "empty"),
        ([[]], None, "prompt_token_ids", "empty"),
        ([[1, 301]], None, "prompt_token_ids", "from 0 to 300"),
        ([[1]], PoolingParams(dimensions=33), "dimensions", "from 1 to 32, the hidden size of the model, got 33"),
        ([[1]], PoolingParams(priority=1), "priority", "fcfs"),
        ([[1]], SamplingParams(), "pooling_params", "got SamplingParams; generate takes SamplingParams"),
        ([[1], [2]], [PoolingParams(), SamplingParams()], "pooling_params", "got SamplingParams"),
        ([[1], [2]], [PoolingParams()], "pooling_params", "1 for 2 prompts"),
        ([[1]], "mean", "pooling_params", "got str"),
    ],
)
def test_request_is_refused_by_name_when_it_is_invalid(llm, prompts, params, param, message):
    with pytest.raises(RequestError, match=message) as raised:
        llm.embed(prompts, params, use_tqdm=False)
    assert raised.value.param == param
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize("params", [PoolingParams(), [SamplingParams(), PoolingParams()]])
def test_generate_refuses_pooling_params(llm, params):
    with pytest.raises(RequestError, match="got PoolingParams; generate takes SamplingParams and embed PoolingParams"):
        llm.generate([[1], [2]], params, use_tqdm=False)


def test_vector_that_is_not_finite_is_an_error_of_its_request_alone(tiny_model, monkeypatch):
    engine = LLMEngine(str(tiny_model), **options())
    real = engine.runner.executor.target.model.hidden_states
    monkeypatch.setattr(
        engine.runner.executor.target.model, "hidden_states", lambda a, b: real(a, b) * (math.nan if a == 0 else 1)
    )
    for name in ("bad", "good"):
        engine.add_request(name, [1, 2, 3], PoolingParams(pooling="mean"))
    ends = {output.request_id: output for output in engine.step()}
    assert (ends["bad"].outputs.finish_reason, ends["bad"].outputs.embedding) == ("error", [])
    assert "not finite" in ends["bad"].error
    assert ends["good"].outputs.finish_reason == "stop"
    assert engine.scheduler.kv_usage == 0
    engine.close()


def test_failing_step_ends_embeddings_with_an_error(tiny_model, monkeypatch):
    engine = LLMEngine(str(tiny_model), **options())
    engine.add_request("e", [1, 2, 3], PoolingParams())
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "execute", lambda plan: 1 / 0)
        (output,) = engine.step()
    assert (output.outputs.finish_reason, output.finished) == ("error", True)
    assert "ZeroDivisionError" in output.error
    engine.add_request("e", [1, 2, 3], PoolingParams())
    assert len(vectors(engine.step())) == 1
    engine.close()


def test_aborted_embedding_ends_with_abort(tiny_model):
    engine = LLMEngine(str(tiny_model), **options(max_num_batched_tokens=12))
    engine.add_request("e", [1] * 40, PoolingParams(pooling="mean"))
    assert engine.step() == []
    output = engine.abort_request("e")
    assert (output.outputs.finish_reason, output.outputs.embedding, output.finished) == ("abort", [], True)
    assert not engine.has_unfinished_requests()
    engine.close()


@pytest.fixture
def async_llm(tiny_model):
    llm = AsyncLLM(str(tiny_model), **options(max_model_len=250, max_num_batched_tokens=16))
    yield llm
    llm.close()


def test_async_embeddings_run_beside_streams_and_equal_those_of_llm(async_llm, llm):
    async def generate():
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        return [output async for output in async_llm.generate([4, 5], params)]

    async def run():
        embeddings = [async_llm.embed(prompt, params) for prompt, params in zip(PROMPTS[2:4], PARAMS[2:4], strict=True)]
        return await asyncio.gather(generate(), *embeddings, async_llm.embed("the quick"))

    stream, *outputs = asyncio.run(run())
    assert all(isinstance(output, RequestOutput) for output in stream)
    expected = vectors([*embed(llm, [2, 3]), *llm.embed("the quick", use_tqdm=False)])
    for found, wanted in zip(vectors(outputs), expected, strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted))


def test_async_embedding_says_that_it_was_aborted_before_it_started(async_llm):
    async def run():
        task = asyncio.create_task(async_llm.embed([1] * 200, request_id="e"))
        await asyncio.sleep(0)  # by now its id is taken, and its prompt is being read in another thread
        await async_llm.abort("e")
        return await task

    output = asyncio.run(run())
    assert (output.request_id, output.outputs.finish_reason, output.outputs.embedding) == ("e", "abort", [])


def test_async_embedding_says_that_it_was_aborted_while_it_ran(async_llm, monkeypatch):
    is_aborted, real = threading.Event(), async_llm.engine.step

    def step():
        is_aborted.wait(60)
        return real()

    async def run():
        task = asyncio.create_task(async_llm.embed([1] * 200, request_id="e"))
        while not async_llm.engine.has_unfinished_requests():
            await asyncio.sleep(0.001)
        await async_llm.abort("e")
        is_aborted.set()
        return await task

    monkeypatch.setattr(async_llm.engine, "step", step)
    assert asyncio.run(run()).outputs.finish_reason == "abort"


def test_async_refusals_and_ends_reach_their_caller(async_llm):
    async def run():
        with pytest.raises(RequestError, match="max_model_len is 250"):
            await async_llm.embed([1] * 251)
        with pytest.raises(RequestError, match="got SamplingParams"):
            await async_llm.embed([1], SamplingParams())
        with pytest.raises(RequestError, match="got PoolingParams"):
            await anext(async_llm.generate([1], PoolingParams()))
        task = asyncio.create_task(async_llm.embed([1] * 200, request_id="e"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await async_llm.embed([1], request_id="e")

    assert asyncio.run(run()).outputs.finish_reason == "stop"
    assert not async_llm.engine.has_unfinished_requests()
    async_llm.close()
    with pytest.raises(WorkerError, match="closed"):
        asyncio.run(async_llm.embed([1]))
