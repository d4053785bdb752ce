"""Interference: the time between tokens of running outputs before, during and after the prefill of a long prompt.

Several sequences decode. Then a long prompt arrives: in the same engine, in chunks of some size, or with a prefill engine in
another process that computes it. The same requests run in each case.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import select
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from quire.base.errors import ConfigError
from quire.bench.provenance import Provenance, find_provenance
from quire.contracts.config import EngineConfig
from quire.contracts.sampling_params import SamplingParams
from quire.engine.llm_engine import LLMEngine

PHASES = ("before", "during", "after")
_START_S = 120.0
"""How long a prefill engine may take to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceOptions:
    """What is measured. Raises ConfigError.

    num_decodes      sequences that decode, each from a prompt of decode_tokens
    prompt_tokens    of the long prompt, whose output is one token
    num_steps        steps that are measured before the long prompt arrives, and after its end
    num_rounds       long prompts, one after the other, each with new sequences that decode
    chunks           values of long_prefill_token_threshold that are measured in one engine; 0: as many as the step has room for
    prefill_threads  of the prefill engine, the decode engine has the others; 0: no separate engines; None: half. The decode
                     engine computes prompts itself where it expects to be faster, in the smallest chunks
    """

    num_decodes: int = 8
    decode_tokens: int = 32
    prompt_tokens: int = 900
    num_steps: int = 20
    num_rounds: int = 4
    chunks: tuple[int, ...] = (0, 128, 32)
    prefill_threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_decodes", "decode_tokens", "prompt_tokens", "num_steps", "num_rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.prefill_threads is not None and self.prefill_threads < 0:
            raise ConfigError(f"prefill_threads must be at least 0, got {self.prefill_threads}")
        if min(self.chunks, default=0) < 0:
            raise ConfigError(f"chunks must be at least 0, got {min(self.chunks)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """Times between tokens of one sequence, of one phase, in seconds."""

    num_gaps: int
    p50_s: float
    p99_s: float
    max_s: float

    @classmethod
    def of(cls, gaps: list[float]) -> Gaps:
        """Return the figures of some gaps, of which there must be one at least."""
        ordered = sorted(gaps)
        p99 = ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
        return cls(num_gaps=len(ordered), p50_s=statistics.median(ordered), p99_s=p99, max_s=ordered[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceCase:
    """The figures of one way to compute the long prompt.

    num_threads    of the engine that decodes, and of the prefill engine
    phases         "before", "during" and "after" the prefill: from the arrival of the long prompt to its first token
    first_token_s  the median time to the first token of the long prompts
    num_remote     long prompts that the prefill engine has computed
    is_same        the tokens are those of the first case
    """

    name: str
    num_threads: tuple[int, int]
    phases: dict[str, Gaps]
    first_token_s: float
    num_remote: int
    is_same: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """The results of all cases."""

    model: str
    options: InterferenceOptions
    cases: list[InterferenceCase]
    provenance: Provenance

    def describe(self) -> str:
        """Return a table in milliseconds."""
        options = self.options
        lines = [
            f"{self.model}: {options.num_decodes} sequences decode, {options.num_rounds} prompts of {options.prompt_tokens} "
            "tokens arrive one after the other. Time between tokens in ms, p50 / p99:",
            f"{'prefill':<20}{'threads':>8}" + "".join(f"{phase:>18}" for phase in PHASES) + f"{'longest':>10}{'TTFT':>9}",
        ]
        for case in self.cases:
            cells = [f"{case.phases[phase].p50_s * 1e3:.1f} / {case.phases[phase].p99_s * 1e3:.1f}" for phase in PHASES]
            threads = "+".join(str(count) for count in case.num_threads if count > 0)
            lines.append(
                f"{case.name:<20}{threads:>8}"
                + "".join(f"{cell:>18}" for cell in cells)
                + f"{case.phases['during'].max_s * 1e3:>10.1f}{case.first_token_s * 1e3:>9.1f}"
                + ("" if case.is_same else "  OTHER TOKENS")
                + (f"  {case.num_remote} of {options.num_rounds} by the prefill engine" if case.num_threads[1] else "")
            )
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the results as JSON."""
        return json.dumps(asdict(self), indent=2)


def measure_interference(config: EngineConfig, options: InterferenceOptions) -> Interference:
    """Measure all cases, each in fresh engines. Raises ConfigError."""
    if config.role != "both" or config.data_parallel_size > 1:
        raise ConfigError("quire bench interference starts its own engines: leave role and data_parallel_size out")
    if config.long_prefill_token_threshold:
        raise ConfigError("long_prefill_token_threshold has no effect here: give chunks (--chunks)")
    config = replace(config, skip_tokenizer_init=True)
    num_threads = config.num_threads or torch.get_num_threads()
    cases: list[InterferenceCase] = []
    expected: list[list[int]] = []
    for chunk in options.chunks:
        engine = LLMEngine(replace(config, long_prefill_token_threshold=chunk))
        name = "one engine" if chunk == 0 else f"chunks of {chunk}"
        cases.append(_measure(engine, options, name, (num_threads, 0), expected))
    wanted = num_threads // 2 if options.prefill_threads is None else options.prefill_threads
    if wanted > 0:
        own = max(1, num_threads - wanted)
        with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
            address = f"unix:{Path(folder) / 'pages'}"
            prefill = replace(config, role="prefill", prefill_listen=address, num_threads=wanted)
            with _prefill_process(prefill):
                least = min(config.prefill_min_tokens, max(1, options.prompt_tokens // 2))  # it counts whole blocks
                decode = replace(
                    config,
                    role="decode",
                    prefill_urls=(address,),
                    num_threads=own,
                    prefill_min_tokens=least,
                    # of prompts that it computes itself, as it expects to be faster
                    long_prefill_token_threshold=min((chunk for chunk in options.chunks if chunk > 0), default=0),
                )
                cases.append(_measure(LLMEngine(decode), options, "separate engine", (own, wanted), expected))
    torch.set_num_threads(num_threads)
    return Interference(model=config.model, options=options, cases=cases, provenance=find_provenance())


def _measure(
    engine: LLMEngine,
    options: InterferenceOptions,
    name: str,
    num_threads: tuple[int, int],
    expected: list[list[int]],
) -> InterferenceCase:
    """Return the figures of an engine, and close it. expected: the tokens of all rounds; filled if it is empty."""
    try:
        _check_lengths(engine, options)
        _run_round(engine, options, -1)  # to warm up
        num_before = _num_transfers(engine)
        rounds = [_run_round(engine, options, index) for index in range(options.num_rounds)]
        num_remote = _num_transfers(engine) - num_before
    finally:
        engine.close()
    tokens = [sequence for one in rounds for sequence in one.tokens]
    is_same = not expected or tokens == expected
    expected += [] if expected else tokens
    return InterferenceCase(
        name=name,
        num_threads=num_threads,
        phases={phase: Gaps.of([gap for one in rounds for gap in one.gaps[phase]]) for phase in PHASES},
        first_token_s=statistics.median(one.first_token_s for one in rounds),
        num_remote=num_remote,
        is_same=is_same,
    )


def _num_transfers(engine: LLMEngine) -> int:
    """Return how many prompts a prefill engine has computed as a whole."""
    return sum(stats.outcomes.get("complete", 0) for stats in engine.stats.tiers if stats.tier == "peer")


def _check_lengths(engine: LLMEngine, options: InterferenceOptions) -> None:
    limit = engine.report.memory.max_model_len
    if options.prompt_tokens >= limit:
        raise ConfigError(f"prompt_tokens must be less than max_model_len ({limit}), got {options.prompt_tokens}")
    if options.num_decodes >= engine.config.max_num_seqs:
        raise ConfigError(
            f"num_decodes must be less than max_num_seqs ({engine.config.max_num_seqs}), got {options.num_decodes}"
        )
    if options.decode_tokens + 2 * options.num_steps >= limit:
        raise ConfigError(
            f"decode_tokens and twice num_steps must be less than max_model_len ({limit}), got "
            f"{options.decode_tokens + 2 * options.num_steps}"
        )


@dataclass(slots=True)
class _Round:
    """The gaps of each phase, the tokens that each sequence had at least in every round of these lengths, and the time to the
    first token of the long prompt."""

    gaps: dict[str, list[float]]
    tokens: list[list[int]]
    first_token_s: float


def _run_round(engine: LLMEngine, options: InterferenceOptions, index: int) -> _Round:
    draw, vocab_size = random.Random(f"{options.seed} {index}"), engine.report.spec.vocab_size
    ids = [f"decode {index} {number}" for number in range(options.num_decodes)]
    fields = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    for request_id in ids:
        prompt = [draw.randrange(vocab_size) for _ in range(options.decode_tokens)]
        engine.add_request(request_id, {"prompt_token_ids": prompt}, SamplingParams(max_tokens=None, **fields))
    last: dict[str, float] = {}
    tokens: dict[str, list[int]] = {request_id: [] for request_id in ids}
    gaps: dict[str, list[float]] = {phase: [] for phase in PHASES}

    def step(phase: str) -> bool:
        """Run a step; return whether the long prompt has got its token."""
        has_ended = False
        for output in engine.step():
            now = time.perf_counter()
            if output.request_id not in tokens:
                has_ended = True
                continue
            if output.request_id in last:
                gaps[phase].append(now - last[output.request_id])
            last[output.request_id] = now
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        return has_ended

    while len(last) < options.num_decodes:
        step("before")
    gaps["before"].clear()
    for _ in range(options.num_steps):
        step("before")
    prompt = [draw.randrange(vocab_size) for _ in range(options.prompt_tokens)]
    begin = time.perf_counter()
    engine.add_request(f"long {index}", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=1, **fields))
    while not step("during"):
        _check_running(engine, ids, options)
    first_token_s = time.perf_counter() - begin
    for _ in range(options.num_steps):
        step("after")
    for request_id in ids:
        engine.abort_request(request_id)
    while engine.has_unfinished_requests():
        engine.step()
    return _Round(gaps, [found[: options.num_steps] for found in tokens.values()], first_token_s)


def _check_running(engine: LLMEngine, ids: list[str], options: InterferenceOptions) -> None:
    """Raise ConfigError if a sequence has ended by its length before the long prompt was computed."""
    if engine.num_unfinished_requests() <= len(ids):
        raise ConfigError(
            f"a sequence of {options.decode_tokens} tokens reached max_model_len before the long prompt was computed: raise "
            "max_model_len, or lower prompt_tokens, decode_tokens or num_steps"
        )


@contextmanager
def _prefill_process(config: EngineConfig) -> Iterator[None]:
    """Run a prefill engine in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run_prefill, args=(config, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        try:
            if not ours.poll(_START_S):
                raise ConfigError(f"the prefill engine did not start within {_START_S:g} s")
            ours.recv()
        except EOFError:
            raise ConfigError("the prefill engine ended while it started: its error stands above") from None
        yield
    finally:
        ours.close()  # ends it
        process.join()


def _run_prefill(config: EngineConfig, connection: Connection) -> None:
    """Compute what the decode engine asks for, until the connection is closed."""
    engine = LLMEngine(config)
    try:
        service = engine.prefill
        assert service is not None
        connection.send("ready")
        while not connection.poll():
            select.select([service.wake_fd, connection], [], [], 0.05)
            while engine.has_unfinished_requests() and not connection.poll():
                engine.step()
    finally:
        engine.close()
