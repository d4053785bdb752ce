"""AsyncLLM: deltas, concurrency, cancellation, and what callers hear when the engine stops."""

import asyncio
import subprocess
import sys
import threading

import pytest

from quire import LLM, AsyncLLM, RequestError, SamplingParams
from quire.base.errors import WorkerError
from tests.steps import hold_after


@pytest.fixture
def llm(tiny_model):
    llm = AsyncLLM(str(tiny_model), num_kv_blocks=200, block_size=4, max_num_seqs=4)
    yield llm
    llm.close()


def params(**options):
    return SamplingParams(**{"temperature": 1.0, "seed": 4, "max_tokens": 10, "ignore_eos": True, **options})


async def read(stream, has_begun):
    """Read a stream to its end; `has_begun` is set when the first output has come."""
    async for _ in stream:
        has_begun.set()


async def collect(llm, prompt, request):
    return [output async for output in llm.generate(prompt, request)]


def test_deltas_join_to_what_llm_generates(llm, tiny_model):
    outputs = asyncio.run(collect(llm, "the quick", params()))
    plain = LLM(str(tiny_model), num_kv_blocks=20)
    expected = plain.generate("the quick", params(), use_tqdm=False)[0].outputs[0]
    plain.close()
    assert [t for o in outputs for t in o.outputs[0].token_ids] == expected.token_ids
    assert "".join(o.outputs[0].text for o in outputs) == expected.text
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "length"


def test_many_requests_run_at_once_and_each_gets_its_own(llm):
    async def run():
        return await asyncio.gather(*(collect(llm, [n + 1, 2, 3], params(seed=n)) for n in range(12)))

    everything = asyncio.run(run())
    alone = [asyncio.run(collect(llm, [n + 1, 2, 3], params(seed=n))) for n in range(12)]
    tokens = [[[t for o in outputs for t in o.outputs[0].token_ids] for outputs in runs] for runs in (everything, alone)]
    assert tokens[0] == tokens[1]


def test_leaving_the_iteration_aborts_the_request(llm):
    is_left = threading.Event()
    hold_after(llm, 5, is_left)

    async def run():
        stream = llm.generate([1, 2, 3], params(max_tokens=200))
        await anext(stream)
        await stream.aclose()
        is_left.set()
        await collect(llm, [5], params(max_tokens=1))  # the abort was sent before: by now it is done

    asyncio.run(run())
    assert not llm.engine.has_unfinished_requests()


def test_cancelled_task_aborts_the_request(llm):
    is_cancelled = threading.Event()
    hold_after(llm, 5, is_cancelled)

    async def run():
        has_begun = asyncio.Event()
        task = asyncio.create_task(read(llm.generate([1, 2, 3], params(max_tokens=250)), has_begun))
        await has_begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        is_cancelled.set()
        await collect(llm, [5], params(max_tokens=1))

    asyncio.run(run())
    assert not llm.engine.has_unfinished_requests()


def test_abort_ends_the_iterator_with_a_last_output(llm):
    is_aborted = threading.Event()

    async def run():
        outputs = []
        async for output in llm.generate([1, 2, 3], params(max_tokens=250), request_id="mine"):
            outputs.append(output)
            await llm.abort("mine")
            is_aborted.set()
        return outputs

    hold_after(llm, 5, is_aborted)

    outputs = asyncio.run(run())
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "abort"


def test_invalid_request_raises_and_harms_nobody(llm):
    async def run():
        good = asyncio.create_task(collect(llm, [1, 2, 3], params()))
        with pytest.raises(RequestError):
            await collect(llm, [1] * 400, params())
        with pytest.raises(RequestError):
            await collect(llm, "", params())
        return await good

    assert asyncio.run(run())[-1].finished


def test_request_id_in_use_raises_and_the_first_goes_on(llm):
    is_refused = threading.Event()
    hold_after(llm, 5, is_refused)

    async def run():
        stream = llm.generate([1], params(), request_id="x")
        await anext(stream)
        with pytest.raises(RequestError, match="in use"):
            await anext(llm.generate([1], params(), request_id="x"))
        is_refused.set()
        return [output async for output in stream]

    assert asyncio.run(run())[-1].finished


def test_cancelled_duplicate_does_not_abort_the_first(llm):
    async def run():
        first = asyncio.create_task(collect_named(llm, [1, 2], params(max_tokens=40), "x"))
        await asyncio.sleep(0)
        for _ in range(10):
            second = asyncio.create_task(collect_named(llm, [1, 2], params(max_tokens=40), "x"))
            await asyncio.sleep(0)
            second.cancel()
            with pytest.raises((asyncio.CancelledError, RequestError)):
                await second
        return await first

    assert asyncio.run(run())[-1].outputs[0].finish_reason == "length"


async def collect_named(llm, prompt, request, name):
    return [output async for output in llm.generate(prompt, request, request_id=name)]


@pytest.mark.parametrize("name", [["a"], 7, ""])
def test_request_id_of_a_wrong_type_is_refused_and_harms_nobody(llm, name):
    async def run():
        with pytest.raises(RequestError) as caught:
            await collect_named(llm, [1], params(), name)
        assert caught.value.param == "request_id"
        await llm.abort(name)
        return await collect(llm, [1], params())

    assert asyncio.run(run())[-1].finished


def test_abort_before_the_engine_has_seen_the_request_is_not_lost(llm, monkeypatch):
    import threading

    gate = threading.Event()
    real = llm.engine.make_request

    def slow(*args):
        gate.wait(30)
        return real(*args)

    async def run():
        monkeypatch.setattr(llm.engine, "make_request", slow)
        task = asyncio.create_task(collect_named(llm, [1], params(max_tokens=200, n=2), "early"))
        await asyncio.sleep(0)
        await llm.abort("early")
        gate.set()
        return await task

    (output,) = asyncio.run(run())
    assert output.finished
    assert [c.finish_reason for c in output.outputs] == ["abort", "abort"]


def test_request_that_cannot_be_submitted_hears_why(llm, monkeypatch):
    async def run():
        real = llm.engine.submit
        monkeypatch.setattr(llm.engine, "submit", lambda *args: 1 / 0)
        with pytest.raises(WorkerError, match="ZeroDivisionError"):
            await collect(llm, [1], params())
        monkeypatch.setattr(llm.engine, "submit", real)
        return await collect(llm, [1], params())

    assert asyncio.run(run())[-1].finished


def test_request_of_a_closed_event_loop_is_aborted_and_its_id_is_free(llm):
    loop = asyncio.new_event_loop()
    stream = llm.generate([1, 2], params(max_tokens=250), request_id="zombie")
    loop.run_until_complete(anext(stream))
    loop.close()  # the generator is never finalised

    async def run():
        while llm.engine.has_unfinished_requests():
            await asyncio.sleep(0.005)
        return await collect_named(llm, [1, 2], params(), "zombie")

    assert asyncio.run(run())[-1].finished


@pytest.mark.slow
def test_program_that_does_not_close_ends_cleanly(tiny_model):
    code = f"""
import asyncio
import subprocess
import sys
from quire import AsyncLLM, SamplingParams
llm = AsyncLLM({str(tiny_model)!r}, num_kv_blocks=100)
async def main():
    asyncio.create_task(read())
    await asyncio.sleep(0.2)
async def read():
    async for _ in llm.generate([1], SamplingParams(max_tokens=250, ignore_eos=True)):
        pass
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_deltas_hand_out_prompt_logprobs_once_and_whole(llm):
    outputs = asyncio.run(collect(llm, list(range(30)), params(prompt_logprobs=1)))
    found = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    assert len(found) == 1
    assert len(found[0]) == 30
    assert None not in found[0][1:]


def test_closing_ends_what_runs_and_refuses_what_comes(llm):
    is_closing = threading.Event()
    hold_after(llm, 5, is_closing)

    def close():
        threading.Timer(0.5, is_closing.set).start()  # the engine is told to close meanwhile, and steps on after that
        llm.close()

    async def run():
        stream = llm.generate([1], params(max_tokens=250))
        await anext(stream)
        await asyncio.to_thread(close)
        with pytest.raises(WorkerError, match="closed"):
            async for _ in stream:
                pass
        with pytest.raises(WorkerError, match="closed"):
            await collect(llm, [1], params())

    asyncio.run(run())


def test_stopped_engine_tells_every_caller_why(llm, monkeypatch):
    def explode(*args):
        raise RuntimeError("scheduler broke")

    is_broken = threading.Event()
    hold_after(llm, 5, is_broken)

    async def run():
        has_begun = asyncio.Event()
        first = asyncio.create_task(read(llm.generate([1], params(max_tokens=250)), has_begun))
        await has_begun.wait()
        monkeypatch.setattr(llm.engine.scheduler, "schedule", explode)
        is_broken.set()
        with pytest.raises(WorkerError, match="scheduler broke"):
            await first
        with pytest.raises(WorkerError, match="scheduler broke"):
            await collect(llm, [1], params())

    asyncio.run(run())
