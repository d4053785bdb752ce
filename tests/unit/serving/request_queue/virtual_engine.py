"""An event loop whose clock jumps, and an engine that computes nothing, for simulations."""

import asyncio
import selectors

from quire.base.ids import RequestId
from quire.contracts.outputs import RequestMetrics
from quire.contracts.request import Request
from quire.contracts.sampling_params import SamplingParams
from quire.serving.engine_client.messages import (
    AttentionKind,
    ChoiceDelta,
    EngineInfo,
    RequestDelta,
    StepOutputs,
    StepPart,
    StepReport,
)
from quire.serving.engine_client.subscription import Subscription
from quire.serving.errors import ApiError, engine_unavailable
from quire.serving.interfaces import Job, Tenant


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self):
        super().__init__()
        self.now = 0.0

    def select(self, timeout=None):
        events = super().select(0)
        if events:
            return events
        if timeout is None:
            raise RuntimeError("every task waits and no timer is set: the simulation is stuck")
        self.now += max(timeout, 0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Sleeping takes no time: the clock jumps to the next timer."""

    def __init__(self):
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self):
        return self._jumping.now

    def advance(self, seconds):
        self._jumping.now += seconds


def run_virtual(main):
    """Run a coroutine function, which gets the loop, to its end; what the loop was told of as unhandled fails the test."""
    loop = VirtualLoop()
    unhandled = []
    loop.set_exception_handler(lambda _, context: unhandled.append(context))
    try:
        result = loop.run_until_complete(main(loop))
        loop.run_until_complete(asyncio.sleep(0))
    finally:
        loop.close()
    assert not unhandled, unhandled
    return result


def make_job(
    name, num_prompt_tokens=10, max_tokens=16, owner="anonymous", priority="default", n=1, arrival_s=0.0, pooling=None,
    best_of=None, **rest,
):  # fmt: skip
    params = SamplingParams(max_tokens=max_tokens, n=n, best_of=best_of, temperature=1.0)
    request = Request(
        request_id=RequestId(name),
        prompt_token_ids=(1,) * num_prompt_tokens,
        params=params,
        seed=0,
        pooling=pooling,
        arrival_time_s=arrival_s,
    )
    return Job(
        request=request,
        owner=Tenant(name=owner, cache_salt=owner),
        route="/v1/completions",
        is_streaming=True,
        priority=priority,
        **rest,
    )


def make_info(max_num_seqs=8, **changes):
    fields = {
        "model": "demo", "architecture": "Demo", "dtype": "bfloat16", "quantization": None, "device": "cpu",
        "vocab_size": 100, "hidden_size": 64, "max_model_len": 4096, "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": 512, "block_size": 16, "num_kv_blocks": 100, "eos_token_ids": [0],
        "generation_defaults": {}, "model_folder": "/nowhere",
        "tokenizer_folder": None, "max_logprobs": 20, "scheduling_policy": "fcfs",
        "enable_prefix_caching": True, "seed": 0, "num_parameters": 1000, "num_active_parameters": 1000,
        "weight_bytes": 2000, "kv_bytes_per_token": 64, "kv_cache_dtype": "bfloat16",
        "attention": [AttentionKind(None, 64, 16)], "load_time_s": 1.0, "pid": 1,
    } | changes  # fmt: skip
    return EngineInfo(**fields)


class _Running:
    def __init__(self, request, subscription, now):
        self.request, self.subscription = request, subscription
        self.prompt_left = len(request.prompt_token_ids)
        self.outputs_left = request.params.max_tokens
        self.metrics = RequestMetrics(request.arrival_time_s or now)
        self.num_sequences = request.params.num_sequences


class FakeEngine:
    """Runs at most max_num_seqs sequences, the background last. A step takes step_s and a time for each token, one a sequence.

    most_*   sequences that were here at once, in the background and else
    aborts   ids in the order of abort calls; errors  calls that the contract forbids
    """

    def __init__(self, loop, max_num_seqs=8, step_s=0.01, prompt_token_s=0.0001, output_token_s=0.001, budget=512):
        self.loop, self.info = loop, make_info(max_num_seqs)
        self.state = "ready"
        self.replicas, self.tiers = (self,), []
        self.last_error = None
        self.on_step, self.on_state = [], []
        self.aborts, self.errors, self.submitted = [], [], []
        self.most_sequences = self.most_background = self.num_delivered = self.num_steps = 0
        self.busy_s = 0.0
        self.num_prompt_tokens = self.num_output_tokens = 0
        self._costs, self._budget = (step_s, prompt_token_s, output_token_s), budget
        self.waiting, self._running, self._abort_next = [], [], []
        self._task = loop.create_task(self._run())
        self._kick = asyncio.Event()

    def submit(self, request):
        if self.state != "ready":
            raise engine_unavailable(f"the engine is {self.state}")
        if any(one.request.request_id == request.request_id for one in self._all()):
            self.errors.append(f"{request.request_id} submitted twice")
        subscription = Subscription(request.request_id, len(self.submitted), 1 << 20, 1e9)
        self.waiting.append(_Running(request, subscription, self.loop.time()))
        self.submitted.append(request.request_id)
        held = [sum(one.num_sequences for one in self._all() if one.request.is_background is kind) for kind in (False, True)]
        self.most_sequences = max(self.most_sequences, held[0])
        self.most_background = max(self.most_background, held[1])
        self._kick.set()
        return subscription

    def abort(self, request_id):
        self.aborts.append(request_id)
        if not any(one.request.request_id == request_id for one in self._all()):
            self.errors.append(f"abort of {request_id}, which is not there")
        self._abort_next.append(request_id)
        self._kick.set()

    def set_state(self, state):
        gone = self._all() if state != "ready" else []
        if gone or state != "ready":
            self.waiting, self._running, self._abort_next = [], [], []
        self.state = state
        for listener in self.on_state:
            listener(state)
        for one in gone:
            one.subscription.fail(ApiError(503, "the engine stopped", code="engine_error", retry_after_s=5))
        self._kick.set()

    async def stop(self):
        self._task.cancel()
        await asyncio.wait([self._task])

    def _all(self):
        return [*self._running, *self.waiting]

    async def _run(self):
        while True:
            if not self._all() or self.state != "ready":
                self._kick.clear()
                await self._kick.wait()
                continue
            self._take_aborts()
            if self._all():
                await self._step()

    def _take_aborts(self):
        ids, self._abort_next = self._abort_next, []
        for one in self._all():
            if one.request.request_id in ids:
                self.end(one)
                choices = [ChoiceDelta(i, "", [], finish_reason="abort") for i in range(one.request.params.n)]
                self._send([(one, RequestDelta(one.request.request_id, choices, True, one.metrics))], None)

    def _admit(self):
        everybody = sorted(self._all(), key=lambda one: one.request.is_background)
        self._running, self.waiting, used = [], [], 0
        for one in everybody:
            if not self.waiting and (not used or used + one.num_sequences <= self.info.max_num_seqs):
                used += one.num_sequences
                self._running.append(one)
            else:
                self.waiting.append(one)

    async def _step(self):
        self._admit()
        began, budget, parts, decoding = self.loop.time(), self._budget, [], []
        for one in self._running:
            if one.metrics.first_scheduled_time is None:
                one.metrics.first_scheduled_time = began
            if one.prompt_left:
                took = min(one.prompt_left, budget)
                budget -= took
                one.prompt_left -= took
                parts.append(StepPart(one.request.request_id, 0, took, True))
            if not one.prompt_left:
                decoding.append(one)
        num_prompt = sum(part.num_tokens for part in parts)
        num_output = sum(one.num_sequences for one in decoding)
        step_s, prompt_s, output_s = self._costs
        seconds = step_s + num_prompt * prompt_s + num_output * output_s
        await asyncio.sleep(seconds)
        if self.state != "ready":
            return
        self.busy_s += seconds
        self.num_prompt_tokens += num_prompt
        self.num_output_tokens += num_output
        report = self._report(began, seconds, num_prompt, num_output, parts)
        self._send([(one, self._token(one)) for one in decoding if one in self._running], report)

    def _report(self, began, seconds, num_prompt, num_output, parts):
        self.num_steps += 1
        return StepReport(
            self.num_steps, began, seconds, num_prompt, num_output, [(num_output * 20,) * 2],
            sum(one.num_sequences for one in self._running), len(self.waiting), 50, 10, 0, num_prompt, 0, parts,
        )  # fmt: skip

    def _token(self, one):
        one.outputs_left -= 1
        finished = one.outputs_left <= 0
        has_metrics = finished
        now = self.loop.time()
        if one.metrics.first_token_time is None:
            one.metrics.first_token_time, has_metrics = now, True
        if finished:
            one.metrics.finished_time = now
            params = one.request.params
            one.metrics.num_unreturned_tokens = (params.num_sequences - params.n) * params.max_tokens
            self.end(one)
        reason = "length" if finished else None
        choices = [ChoiceDelta(i, "x", [7], finish_reason=reason) for i in range(one.request.params.n)]
        return RequestDelta(one.request.request_id, choices, finished, one.metrics if has_metrics else None)

    def end(self, one):
        (self._running if one in self._running else self.waiting).remove(one)

    def _send(self, pairs, report):
        for one, delta in pairs:
            self.num_delivered += 1
            one.subscription.deliver(delta, self.loop.time())
        for listener in self.on_step:
            listener(StepOutputs([delta for _, delta in pairs], report))
