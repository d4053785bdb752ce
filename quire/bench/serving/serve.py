"""One run of `quire bench serve`: find the server, create the requests, warm up, run the load, report."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

import quire
from quire.base.errors import ConfigError
from quire.bench.machine import find_commit, machine_name
from quire.bench.serving.arrivals import Arrivals
from quire.bench.serving.beside import InProcessRecord
from quire.bench.serving.client_cost import LagMeter, read_cpu_times
from quire.bench.serving.http_client import HttpClient, Target
from quire.bench.serving.http_sender import Api, HttpSender
from quire.bench.serving.metrics import Goals
from quire.bench.serving.openai_stream import JSON_PARSER
from quire.bench.serving.prompts import Alphabet, TokenAlphabet, find_words, vocab_size_of
from quire.bench.serving.readiness import find_model
from quire.bench.serving.records import RequestRecord
from quire.bench.serving.report import Report
from quire.bench.serving.runner import LoadResult, Sender, run_load
from quire.bench.serving.server_lag import LagCounts, read_server_lag, read_server_steps
from quire.bench.serving.setup import Cost, Setup
from quire.bench.serving.utilization import Peaks
from quire.bench.serving.workload import Dataset, Request, make_requests, random_requests
from quire.contracts.config import EngineConfig
from quire.model.resolve import BUNDLED_MODELS, resolve_model
from quire.text.tokenizer import Tokenizer, load_tokenizer

Backend = Literal["openai", "openai-chat"]
CLOCK = time.perf_counter


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of a run. Raises ConfigError.

    engine        run the workload through an engine of this process instead of a server
    model         the server's name of it; None: ask the server
    prompt_form   "ids": token ids; "text": words that are one token each; "auto": ids for completions, text for chat
    vocab_size    ids are drawn below this; None: the tokenizer's model, else 1000
    server_pids   processes whose CPU time is read, with their descendants
    beside        a record of the same run with `engine`, to measure what HTTP adds
    server_lag    read the lag of the server's event loop from its /metrics
    """

    base_url: str = "http://127.0.0.1:8000"
    endpoint: str | None = None
    backend: Backend = "openai"
    model: str | None = None
    tokenizer: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    extra_body: dict[str, Any] = field(default_factory=dict)
    temperature: float = 0.0
    ignore_eos: bool = False
    prompt_form: Literal["auto", "ids", "text"] = "auto"
    vocab_size: int | None = None
    num_retries: int = 0
    timeout_s: float = math.inf
    ready_timeout_s: float = 30.0
    num_warmups: int = 0
    server_pids: tuple[int, ...] = ()
    server_lag: bool = False
    beside: Path | None = None
    dataset: Dataset = field(default_factory=Dataset)
    arrivals: Arrivals = field(default_factory=Arrivals)
    goals: Goals = field(default_factory=lambda: Goals({}))
    percentile_metrics: tuple[str, ...] = ("ttft", "tpot", "itl", "e2el")
    percentiles: tuple[float, ...] = (50.0, 90.0, 95.0, 99.0)
    peaks: Peaks | None = None
    has_progress: bool = False
    engine: EngineConfig | None = None

    def __post_init__(self) -> None:
        for option, value in (("--retry", self.num_retries), ("--num-warmups", self.num_warmups)):
            if value < 0:
                raise ConfigError(f"{option} must be at least 0, got {value}")
        for option, number in (
            ("--request-timeout-sec", self.timeout_s),
            ("--ready-check-timeout-sec", self.ready_timeout_s),
            ("--temperature", self.temperature),
        ):
            if not number >= 0:
                raise ConfigError(f"{option} must be at least 0, got {number}")
        if self.backend == "openai-chat" and self.prompt_form == "ids":
            raise ConfigError("--prompt-form ids is for --backend openai: chat messages are text")
        if self.beside is not None and not self.server_pids:
            raise ConfigError("--beside needs --server-pid: the server's CPU time is compared")
        if self.engine is not None and (
            self.backend != "openai" or self.extra_body or self.headers or self.server_pids or self.server_lag
        ):
            raise ConfigError(
                "--in-process takes no --backend, --extra-body, --header, --server-pid or --server-lag: there is no server"
            )

    @property
    def path(self) -> str:
        """The endpoint's path below the base URL."""
        usual = "/v1/chat/completions" if self.backend == "openai-chat" else "/v1/completions"
        return usual if self.endpoint is None else self.endpoint

    @property
    def is_text(self) -> bool:
        """Whether synthetic prompts are text."""
        return self.backend == "openai-chat" or self.prompt_form == "text"


def run_serve(options: ServeOptions) -> Report:
    """Return the report of one run; after Ctrl-C that of the completed part. Raises ConfigError."""
    read_cpu_times(options.server_pids)  # to report a wrong process before the run
    beside = None if options.beside is None else InProcessRecord.read(options.beside)
    loop_name, loop_factory = find_event_loop()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        if options.engine is None:
            return replace(runner.run(_run_http(options, loop_name)), beside=beside)
        from quire.engine.async_llm import AsyncLLM

        engine = AsyncLLM(options.engine)
        try:
            return runner.run(_run_in_process(options, options.engine, engine, loop_name))
        finally:
            engine.close()


def find_event_loop() -> tuple[str, Callable[[], asyncio.AbstractEventLoop] | None]:
    """Return the name and factory of the event loop: uvloop's if it is installed, which costs less per read."""
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError:
        return "asyncio", None
    return f"uvloop {uvloop.__version__}", uvloop.new_event_loop


async def _run_http(options: ServeOptions, loop_name: str) -> Report:
    client = HttpClient(Target.parse(options.base_url), options.headers, CLOCK)
    try:
        model = await find_model(client, options.model, options.ready_timeout_s)
        folder, tokenizer = find_tokenizer(options, model)
        alphabet = make_alphabet(options, folder, tokenizer)
        requests = _make_requests(options, alphabet, tokenizer)
        body = {
            "temperature": options.temperature,
            **({"ignore_eos": True} if options.ignore_eos else {}),
            **options.extra_body,
        }
        api = Api(options.path, model, options.backend == "openai-chat", body)
        sender = HttpSender(client, api, CLOCK, options.num_retries, options.timeout_s, options.dataset.seed)
        await _warm_up(options, alphabet, sender)
        sender.keeps_text = tokenizer is not None
        sender.prepare(requests)
        lag_before = await _read_lag(client) if options.server_lag else None
        steps_before = await read_server_steps(client) if options.beside is not None else None
        result, cost = await _measure(options, requests, sender)
        if steps_before is not None:
            steps = await read_server_steps(client)
            cost = replace(cost, engine_steps=None if steps is None else steps - steps_before)
        if lag_before is not None:
            cost = replace(cost, server_lag=(await _read_lag(client)).since(lag_before))
        count_text(result, sender.texts, tokenizer)
        setup = make_setup(replace(options, model=model), requests, options.backend, loop_name)
        return _report(options, setup, result, replace(cost, num_connections=client.num_connections))
    finally:
        client.close()


async def _read_lag(client: HttpClient) -> LagCounts:
    found = await read_server_lag(client)
    if found is None:
        raise ConfigError("--server-lag: the server's /metrics do not report quire:event_loop_lag_seconds")
    return found


async def _run_in_process(options: ServeOptions, config: EngineConfig, engine: Any, loop_name: str) -> Report:
    from quire.bench.serving.in_process import EngineSender

    tokenizer = engine.engine.tokenizer
    vocab_size = options.vocab_size or engine.engine.report.spec.vocab_size
    alphabet = find_words(tokenizer, vocab_size) if options.is_text else TokenAlphabet(vocab_size)
    requests = _make_requests(options, alphabet, tokenizer)
    if any(isinstance(request.prompt, list) and isinstance(request.prompt[0], dict) for request in requests):
        raise ConfigError("--in-process takes prompts of text or token ids, not messages")
    sender = EngineSender(engine, CLOCK, {"temperature": options.temperature, "ignore_eos": options.ignore_eos})
    await _warm_up(options, alphabet, sender)
    steps_before = engine.engine.stats.num_steps
    result, cost = await _measure(options, requests, sender)
    cost = replace(cost, engine_steps=engine.engine.stats.num_steps - steps_before)
    named = replace(options, model=config.model, base_url="", endpoint="")
    return _report(options, make_setup(named, requests, "in-process", loop_name), result, cost)


def find_tokenizer(options: ServeOptions, model: str) -> tuple[Path | None, Tokenizer | None]:
    """Return the tokenizer's folder and the tokenizer: the given one, or the model's if that is bundled or local."""
    name = options.tokenizer
    if name is None and (model in BUNDLED_MODELS or Path(model).is_dir()):
        name = model
    if name is None:
        return None, None
    folder = resolve_model(name)
    return folder, load_tokenizer(folder)


def make_alphabet(options: ServeOptions, folder: Path | None, tokenizer: Tokenizer | None) -> Alphabet:
    """Return the alphabet of synthetic prompts. Raises ConfigError if text is required and there is no tokenizer."""
    vocab_size = options.vocab_size or vocab_size_of(folder)
    if not options.is_text or options.dataset.name == "custom":
        return TokenAlphabet(vocab_size)
    if tokenizer is None:
        raise ConfigError("prompts of text with a given number of tokens need --tokenizer: a folder, bundled model or hub id")
    return find_words(tokenizer, vocab_size)


def _make_requests(options: ServeOptions, alphabet: Alphabet, tokenizer: Tokenizer | None) -> list[Request]:
    requests = make_requests(options.dataset, alphabet)
    if not requests:
        raise ConfigError("the workload has no request: --trace-duration ends before the first one")
    is_chat = options.backend == "openai-chat"
    for request in requests:
        is_messages = isinstance(request.prompt, list) and isinstance(request.prompt[0], dict)
        if isinstance(request.prompt, list) and is_messages != is_chat:
            right = "openai" if is_chat else "openai-chat"
            raise ConfigError(f"--dataset-path has prompts for --backend {right}, not for {options.backend}")
    if tokenizer is None:
        return requests
    return [_counted(request, tokenizer) for request in requests]


def _counted(request: Request, tokenizer: Tokenizer) -> Request:
    if not isinstance(request.prompt, str):
        return request
    return replace(request, num_prompt_tokens=len(tokenizer.encode(request.prompt, False)))


async def _warm_up(options: ServeOptions, alphabet: Alphabet, sender: Sender) -> None:
    """Send other requests of the same shape first. Raises ConfigError if none of them succeeds."""
    if not options.num_warmups:
        return
    if options.dataset.name == "random":
        dataset = replace(options.dataset, num_prompts=options.num_warmups)
        requests = random_requests(dataset, alphabet, first=1)
    else:
        requests = make_requests(replace(options.dataset, num_prompts=options.num_warmups), alphabet)
    result = await run_load(requests, [0.0] * len(requests), sender, CLOCK, options.arrivals.max_concurrency)
    if result.is_interrupted:
        raise KeyboardInterrupt
    if not any(record.outcome == "ok" for record in result.records):
        record = result.records[0]
        raise ConfigError(f"--num-warmups: no request succeeded; the first: {record.error_kind}: {record.message}")


async def _measure(options: ServeOptions, requests: list[Request], sender: Sender) -> tuple[LoadResult, Cost]:
    recorded = [request.time_s for request in requests if request.time_s is not None]
    times = options.arrivals.times(len(requests), recorded if len(recorded) == len(requests) else None, options.dataset.seed)
    meter = LagMeter(CLOCK)
    gc.collect()
    gc.freeze()  # excludes the prompts from collections while the clock runs
    with tqdm(total=len(requests), disable=not options.has_progress, unit="request", miniters=1) as bar:

        def count(_: RequestRecord) -> None:
            bar.update()

        before = read_cpu_times(options.server_pids)
        lag_task = asyncio.create_task(meter.run())
        try:
            result = await run_load(requests, times, sender, CLOCK, options.arrivals.max_concurrency, count)
        finally:
            lag_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await lag_task
        used = read_cpu_times(options.server_pids).since(before)
    return result, Cost(used, tuple(meter.lags_s))


def count_text(result: LoadResult, texts: dict[int, str], tokenizer: Tokenizer | None) -> None:
    """Count the output tokens of streams without usage with the tokenizer."""
    if tokenizer is None:
        return
    for record in result.records:
        if record.outcome == "ok" and record.usage_output_tokens is None:
            record.num_text_tokens = len(tokenizer.encode(texts.get(record.index, ""), False))


def make_setup(options: ServeOptions, requests: list[Request], backend: str, loop_name: str) -> Setup:
    """Return the description of a run for its report."""
    has_times = all(request.time_s is not None for request in requests)
    dataset = options.dataset
    return Setup(
        backend=backend,
        base_url=options.base_url,
        endpoint=options.path,
        model=options.model or "",
        tokenizer=options.tokenizer,
        dataset=dataset.name if dataset.path is None else f"{dataset.name} {dataset.path.name}",
        arrival=options.arrivals.describe(has_times),
        num_prompts=len(requests),
        request_rate=options.arrivals.request_rate,
        burstiness=options.arrivals.burstiness,
        max_concurrency=options.arrivals.max_concurrency,
        ignore_eos=options.ignore_eos,
        seed=dataset.seed,
        event_loop=loop_name,
        json_parser=JSON_PARSER,
        quire_version=quire.__version__,
        platform=f"{platform.platform()}, Python {platform.python_version()}",
        machine=machine_name(),
        commit=find_commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _report(options: ServeOptions, setup: Setup, result: LoadResult, cost: Cost) -> Report:
    return Report(setup, result, cost, options.goals, options.percentile_metrics, options.percentiles, peaks=options.peaks)
