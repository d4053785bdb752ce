"""Overhead of the server relative to LLM.generate: the same prompts through both, alternately, on the same machine."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

from quire.base.errors import ConfigError, WorkerError
from quire.bench.provenance import Provenance, find_provenance
from quire.bench.serving.http_client import HttpClient, Target
from quire.bench.serving.http_sender import Api, HttpSender
from quire.bench.serving.readiness import find_model
from quire.bench.serving.runner import run_load
from quire.bench.serving.serve import find_event_loop
from quire.bench.serving.workload import Request
from quire.bench.workload import Workload
from quire.contracts.config import EngineConfig
from quire.engine.llm import LLM

_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 30.0
_POLL_S = 1.0
_CLOCK = time.perf_counter

Prompts = list[dict[str, list[int]]]


@dataclass(frozen=True, slots=True)
class Round:
    """Output tokens per second of one round; direct: the mean of the direct runs before and after the served one."""

    served: float
    direct: float

    @property
    def ratio(self) -> float:
        """Throughput of the server relative to LLM.generate."""
        return self.served / self.direct


@dataclass(frozen=True, slots=True)
class Overhead:
    """The rounds of one measurement. ratio: the median of theirs, with the minimum and the maximum."""

    model: str
    workload: Workload
    max_num_seqs: int
    server: tuple[str, ...]
    rounds: tuple[Round, ...]
    ratio: float
    least_ratio: float
    greatest_ratio: float
    provenance: Provenance

    def describe(self) -> str:
        """Return the results as readable lines."""
        rows = [
            f"round {number}: served {one.served:.1f}, direct {one.direct:.1f} output tokens/s, ratio {one.ratio:.3f}"
            for number, one in enumerate(self.rounds, start=1)
        ]
        spread = f"{self.least_ratio:.3f} to {self.greatest_ratio:.3f}"
        return "\n".join((*rows, f"Server against LLM.generate: median ratio {self.ratio:.3f} ({spread})"))

    def to_json(self) -> str:
        """Return the results as JSON."""
        return json.dumps(asdict(self), indent=2)


def measure_overhead(
    config: EngineConfig, workload: Workload, server: Sequence[str], port: int, num_rounds: int = 5
) -> Overhead:
    """Return the throughput of the server relative to LLM.generate, in `num_rounds` rounds of the same prompts through both.

    server  the command that serves the same model with the same options at `port` of 127.0.0.1; started and stopped here.

    Both engines are loaded all the time, and the unused one sleeps. Rounds have different prompts, so that none is cached. A
    round is compared with the direct runs before and after it, as the machine may drift.

    Raises ConfigError and WorkerError.
    """
    if num_rounds < 1:
        raise ConfigError(f"num_iters must be at least 1, got {num_rounds}")
    loop_factory = find_event_loop()[1]
    with _running(server) as process, asyncio.Runner(loop_factory=loop_factory) as runner:
        client = HttpClient(Target("127.0.0.1", port), {}, _CLOCK)
        name = runner.run(_wait_for(process, client))
        llm = LLM(config)
        try:
            workload.check(llm.llm_engine.report)
            spec = llm.llm_engine.report.spec
            prompts = [workload.prompts(spec, first=number) for number in range(num_rounds + 2)]
            _run_direct(llm, workload, prompts[-1])  # warm-up of both: memory of a step is allocated at the first one
            runner.run(_run_served(client, name, workload, prompts[-1]))
            before, rounds = _run_direct(llm, workload, prompts[-2]), []
            for number in range(num_rounds):
                served = runner.run(_run_served(client, name, workload, prompts[number]))
                after = _run_direct(llm, workload, prompts[number])
                rounds.append(Round(served, (before + after) / 2))
                before = after
        finally:
            llm.close()
            client.close()
    ratios = [one.ratio for one in rounds]
    return Overhead(
        model=config.model,
        workload=workload,
        max_num_seqs=config.max_num_seqs,
        server=tuple(server),
        rounds=tuple(rounds),
        ratio=statistics.median(ratios),
        least_ratio=min(ratios),
        greatest_ratio=max(ratios),
        provenance=find_provenance(),
    )


@dataclass(frozen=True, slots=True)
class TimelineOverhead:
    """What recording the timelines of requests costs: output tokens per second with them, over those without, by round.

    cost, least_cost, greatest_cost  share of the throughput that is lost: the median of the rounds, and their range
    """

    model: str
    workload: Workload
    max_num_seqs: int
    ratios: tuple[float, ...]
    cost: float
    least_cost: float
    greatest_cost: float
    provenance: Provenance

    def describe(self) -> str:
        """Return the results as readable lines."""
        rows = [f"round {number}: with timelines {ratio:.4f} of without" for number, ratio in enumerate(self.ratios, start=1)]
        spread = f"{self.least_cost:.2%} to {self.greatest_cost:.2%}"
        return "\n".join(
            (*rows, f"Timelines cost {self.cost:.2%} of the throughput, the median of {len(self.ratios)} ({spread})")
        )

    def to_json(self) -> str:
        """Return the results as JSON."""
        return json.dumps(asdict(self), indent=2)


def measure_timelines(config: EngineConfig, workload: Workload, num_rounds: int = 5) -> TimelineOverhead:
    """Return what timelines cost one engine, whose prefix cache is off. Raises ConfigError.

    A run with timelines is compared with the runs without before and after it, as the machine may drift.
    """
    if num_rounds < 1:
        raise ConfigError(f"num_iters must be at least 1, got {num_rounds}")
    llm = LLM(replace(config, enable_prefix_caching=False))
    engine = llm.llm_engine
    try:
        workload.check(engine.report)
        prompts = workload.prompts(engine.report.spec, first=0)

        def run(has_timelines: bool) -> float:
            engine.records_timelines = has_timelines
            return _run_direct(llm, workload, prompts)

        run(True)  # warm-up
        before, ratios = run(False), []
        for _ in range(num_rounds):
            recorded, after = run(True), run(False)
            ratios.append(recorded / ((before + after) / 2))
            before = after
    finally:
        llm.close()
    costs = [1.0 - ratio for ratio in ratios]
    return TimelineOverhead(
        model=config.model,
        workload=workload,
        max_num_seqs=config.max_num_seqs,
        ratios=tuple(ratios),
        cost=statistics.median(costs),
        least_cost=min(costs),
        greatest_cost=max(costs),
        provenance=find_provenance(),
    )


@contextmanager
def _running(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _wait_for(process: subprocess.Popen[bytes], client: HttpClient) -> str:
    """Return the name of the server's model, as soon as it is ready."""
    deadline_s = _CLOCK() + _START_TIMEOUT_S
    while True:
        try:
            return await find_model(client, None, _POLL_S)
        except ConfigError as error:
            status = process.poll()
            if status is not None:
                raise WorkerError(f"the server ended with status {status}; it has said why") from error
            if _CLOCK() > deadline_s:
                raise


def _run_direct(llm: LLM, workload: Workload, prompts: Prompts) -> float:
    params = replace(workload.sampling_params(), detokenize=True)  # as a server does
    begin = _CLOCK()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs) / (_CLOCK() - begin)


async def _run_served(client: HttpClient, name: str, workload: Workload, prompts: Prompts) -> float:
    """Return the output tokens per second of streams for all prompts at once."""
    requests = [Request(prompt["prompt_token_ids"], workload.input_len, workload.output_len) for prompt in prompts]
    options = {"temperature": workload.temperature, "ignore_eos": workload.ignore_eos}
    sender = HttpSender(client, Api("/v1/completions", name, False, options), _CLOCK, timeout_s=math.inf)
    sender.prepare(requests)
    result = await run_load(requests, [0.0] * len(requests), sender, _CLOCK)
    bad = next((record for record in result.records if record.outcome != "ok"), None)
    if bad is not None:
        raise WorkerError(f"a request to the server ended as {bad.outcome}: {bad.error_kind} {bad.message}")
    return sum(record.num_output_tokens for record in result.records) / result.duration_s
