"""A gateway that plays scripts, and a model without weights: what the tests of every API are written against.

    gateway = FakeGateway(text_script(tokenizer, "Hello", finish_reason="stop"))

A script is a function from the Job to the ChoiceDelta lists of its deltas; FakeGateway makes RequestDeltas of them, the last
one finished, and keeps every job that was opened. A script may also hold an ApiError, which is raised there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import quire
from quire.contracts.outputs import RequestMetrics
from quire.serving.config import ServerConfig
from quire.serving.context import ServerContext, ServerState
from quire.serving.core.served_model import ServedModel, make_served_model
from quire.serving.engine_client.messages import AttentionKind, ChoiceDelta, EngineInfo, RequestDelta, TokenLogprob
from quire.serving.errors import ApiError
from quire.serving.interfaces import AbortReason, Gateway, Job, Sink, Tenant
from quire.serving.request_queue.stream import error_of
from quire.text.tokenizer import Tokenizer, load_tokenizer

# Turns in ChatML, tools and calls in the Hermes format, reasoning in <think>: as real models have them.
TOOL_TEMPLATE = """{%- if tools %}<|im_start|>system
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
<tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{%- endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if message.reasoning_content %}
<think>{{ message.reasoning_content }}</think>
{%- endif %}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
DEMO = Path(quire.__file__).parent / "demo_models" / "demo"
OWNER = Tenant(name="tester", cache_salt="")
Step = list[ChoiceDelta] | ApiError | RequestDelta
Script = Callable[[Job], Iterable[Step]]


def engine_info(**changes: object) -> EngineInfo:
    """Return what an engine with the demo model says of itself."""
    fields: dict[str, object] = {
        "model": "demo",
        "architecture": "LlamaForCausalLM",
        "dtype": "float32",
        "quantization": None,
        "device": "cpu",
        "vocab_size": 4096,
        "hidden_size": 64,
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "block_size": 16,
        "num_kv_blocks": 256,
        "eos_token_ids": [0],
        "generation_defaults": {},
        "model_folder": str(DEMO),
        "tokenizer_folder": str(DEMO),
        "max_logprobs": 20,
        "scheduling_policy": "fcfs",
        "enable_prefix_caching": True,
        "seed": 0,
        "num_parameters": 1000,
        "num_active_parameters": 1000,
        "weight_bytes": 4000,
        "kv_bytes_per_token": 64,
        "kv_cache_dtype": "float32",
        "attention": [AttentionKind(None, 64, 8)],
        "load_time_s": 0.1,
        "pid": 1,
    }
    return EngineInfo(**{**fields, **changes})  # type: ignore[arg-type]


def load_demo_tokenizer() -> Tokenizer:
    """Return the tokenizer of the bundled demo model."""
    return load_tokenizer(DEMO)


def make_served(template: str | None = None, config: ServerConfig | None = None, **info: object) -> ServedModel:
    """Return the demo model as the APIs see it, perhaps with another chat template; info changes its EngineInfo."""
    tokenizer = load_demo_tokenizer()
    if template is not None:
        tokenizer = Tokenizer(tokenizer.backend, tokenizer.named_tokens, template)
    return make_served_model(engine_info(**info), config or ServerConfig(), tokenizer)


def make_context(gateway: Gateway, served: ServedModel | None = None, config: ServerConfig | None = None) -> ServerContext:
    """Return a server without an engine or metrics."""
    config = config or ServerConfig()
    return ServerContext(
        config=config,
        gateway=gateway,
        served=served or make_served(config=config),
        state=ServerState("serving"),
    )


def pieces(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """Return the text that each token makes certain; the last one has what is left."""
    stream = tokenizer.new_stream()
    texts = [stream.push(token_id) for token_id in token_ids]
    if texts:
        texts[-1] += stream.finish()
    return texts


def fake_logprobs(token_id: int, num_top: int, vocab_size: int = 4096) -> list[TokenLogprob]:
    """Return made-up entries of one position: the token that is there, then the most likely ones, itself among them."""
    found = [TokenLogprob(token_id, -0.5, 1)]
    found += [TokenLogprob((token_id + rank) % vocab_size, -0.5 - rank, rank + 1) for rank in range(1, max(num_top, 1))]
    return found if num_top else found[:1]


def text_script(
    tokenizer: Tokenizer,
    *texts: str,
    tokens_per_delta: int = 1,
    finish_reason: str = "stop",
    stop_reason: int | str | None = None,
    ends_with_eos: bool = True,
) -> Script:
    """Return a script in which choice i says texts[i % len(texts)], a few tokens a delta, with what the job asked for."""

    def play(job: Job) -> Iterable[Step]:
        params = job.request.params
        plans: list[list[ChoiceDelta]] = []
        for index in range(params.n):
            token_ids = tokenizer.encode(texts[index % len(texts)], add_special_tokens=False)
            texts_of = pieces(tokenizer, token_ids)
            if finish_reason == "stop" and stop_reason is None and ends_with_eos:
                token_ids, texts_of = [*token_ids, 0], [*texts_of, ""]
            deltas = []
            for start in range(0, len(token_ids), tokens_per_delta):
                ids = token_ids[start : start + tokens_per_delta]
                logprobs = None
                if params.logprobs is not None:
                    logprobs = [fake_logprobs(token_id, params.logprobs) for token_id in ids]
                deltas.append(ChoiceDelta(index, "".join(texts_of[start : start + tokens_per_delta]), ids, logprobs))
            deltas = deltas or [ChoiceDelta(index, "", [])]
            deltas[-1].finish_reason = finish_reason  # type: ignore[assignment]
            deltas[-1].stop_reason = stop_reason
            plans.append(deltas)
        for step in range(max(map(len, plans))):
            yield [deltas[step] for deltas in plans if step < len(deltas)]

    return play


@dataclass(eq=False)
class FakeStream:
    """A GenerationStream that plays the steps of a script."""

    job: Job
    steps: Iterable[Step]
    num_cached_tokens: int = 0
    aborts: list[AbortReason] = field(default_factory=list)
    is_entered: bool = False
    is_left: bool = False
    is_finished: bool = False
    blocks_after: int | None = None
    _deltas: AsyncIterator[RequestDelta] | None = None
    _take: Sink | None = None

    @property
    def request_id(self) -> str:
        return self.job.request.request_id

    def abort(self, reason: AbortReason) -> None:
        if not self.is_finished and not self.aborts:
            self.aborts.append(reason)

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> RequestDelta:
        if not self.is_entered or self.is_left:
            raise RuntimeError("a GenerationStream is used inside `async with`")
        if self._deltas is None:
            self._deltas = self.play()
        while True:
            delta = await anext(self._deltas)
            if self._take is None or delta.finished or delta.error is not None or not self._take(delta):
                return delta

    def attach_sink(self, take: Sink) -> None:
        self._take = take

    async def play(self) -> AsyncIterator[RequestDelta]:
        steps = list(self.steps)
        for position, step in enumerate(steps):
            if self.blocks_after is not None and position >= self.blocks_after:
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            if isinstance(step, ApiError):
                raise step
            if self.aborts:
                self.is_finished = True
                yield RequestDelta(self.request_id, [ChoiceDelta(0, "", [], finish_reason="abort")], True)
                return
            if isinstance(step, RequestDelta):
                self.is_finished = step.finished
                if (error := error_of(step)) is not None:
                    raise error
                yield step
                continue
            is_last = position == len(steps) - 1
            self.is_finished = is_last
            delta = RequestDelta(self.request_id, step, is_last)
            if position == 0 or is_last:
                now = time.monotonic()
                delta.metrics = RequestMetrics(now, now, now, now, self.num_cached_tokens, 0)
            params = self.job.request.params
            if position == 0 and params.prompt_logprobs is not None:
                ids = self.job.request.prompt_token_ids
                delta.prompt_logprobs = [None, *(fake_logprobs(token_id, params.prompt_logprobs) for token_id in ids[1:])]
            yield delta

    async def __aenter__(self) -> FakeStream:
        if self.is_entered:
            raise RuntimeError("a GenerationStream is used once")
        self.is_entered = True
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        self.is_left = True
        self.abort("cancelled")


@dataclass
class FakeGateway:
    """A Gateway; `streams` are all that were opened.

    refuses       raised by open, where given
    blocks_after  a stream says nothing more after so many deltas
    """

    script: Script
    num_cached_tokens: int = 0
    refuses: ApiError | None = None
    blocks_after: int | None = None
    streams: list[FakeStream] = field(default_factory=list)

    def holding(self, owner: str, call_id: str | None) -> AbstractContextManager[None]:
        return nullcontext()

    def open(self, job: Job) -> FakeStream:
        if self.refuses is not None:
            raise self.refuses
        stream = FakeStream(job, self.script(job), self.num_cached_tokens, blocks_after=self.blocks_after)
        self.streams.append(stream)
        return stream

    @property
    def jobs(self) -> list[Job]:
        """The jobs in the order in which they were opened."""
        return [stream.job for stream in self.streams]
