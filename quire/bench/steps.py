"""Steps: a designed set of steps on the real engine, whose times `quire plan` and `quire simulate` fit."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from quire.base.errors import ConfigError
from quire.bench.provenance import find_provenance
from quire.contracts.config import EngineConfig
from quire.contracts.sampling_params import SamplingParams
from quire.engine.inspect import skipped_layers, weight_bytes_by_precision
from quire.engine.llm_engine import LLMEngine
from quire.planner.model_shape import ModelShape
from quire.planner.record import StepsRecord
from quire.planner.step_time import MachineRates, MeasuredStep, StepWork

_NUM_SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
_CONTEXTS = (16, 64, 256, 1024, 4096, 16384)
_CHUNKS = (1, 4, 16, 48, 128, 512, 1024, 2048, 4096, 8192)
_MAX_CASE_TOKENS = 32768


@dataclass(frozen=True, slots=True)
class StepsTrial:
    """What to run. Raises ConfigError.

    seconds           no case is begun after so long; the first round is always completed where it can be in three times that
    num_decode_steps  decode steps of each case; the first few are slower, as the CPU caches hold data of the prompt
    """

    seconds: float = 60.0
    num_decode_steps: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise ConfigError(f"--seconds must be a number above 0, got {self.seconds}")
        if self.num_decode_steps < 2:
            raise ConfigError(f"--decode-steps must be at least 2, got {self.num_decode_steps}")


@dataclass(frozen=True, slots=True)
class StepCase:
    """num_sequences prompts of num_prompt_tokens each that start together, and then decode."""

    num_sequences: int
    num_prompt_tokens: int


def design_cases(max_num_seqs: int, max_model_len: int, num_kv_tokens: int, num_decode_steps: int) -> list[StepCase]:
    """Return the cases that fit: batches of decoding sequences at several contexts, and single prompts of several lengths."""
    longest = min(max_model_len, num_kv_tokens) - num_decode_steps
    if longest < 1:
        raise ConfigError(
            f"--decode-steps must be below the {longest + num_decode_steps} tokens of a sequence, got {num_decode_steps}"
        )
    grid = itertools.product(_NUM_SEQUENCES, _CONTEXTS)
    wanted = [*grid, *((1, chunk) for chunk in _CHUNKS), (1, longest)]
    most = min(_MAX_CASE_TOKENS, num_kv_tokens)
    found = [
        StepCase(number, length)
        for number, length in wanted
        if number <= max_num_seqs and length <= longest and number * (length + num_decode_steps) <= most
    ]
    return list(dict.fromkeys(found))


def measure_steps(config: EngineConfig, trial: StepsTrial, show_progress: bool = False) -> StepsRecord:
    """Run the cases in random order, round after round, until the time is over. Raises ConfigError.

    The prefix cache is off, so that every prompt is computed; drafts are refused, as their steps are of another kind.
    """
    if config.speculative_config is not None:
        raise ConfigError("--speculative-config must be left out: the step-time model knows no drafts")
    if config.data_parallel_size != 1:
        raise ConfigError(f"--data-parallel-size must be 1, as one replica is measured, got {config.data_parallel_size}")
    config = replace(config, skip_tokenizer_init=True, enable_prefix_caching=False)
    engine = LLMEngine(config)
    try:
        return _measure(config, engine, trial, show_progress)
    finally:
        engine.close()


def _measure(config: EngineConfig, engine: LLMEngine, trial: StepsTrial, show_progress: bool) -> StepsRecord:
    report, limits = engine.report, engine.scheduler.config
    cases = design_cases(
        limits.max_num_seqs, limits.max_model_len, limits.num_kv_blocks * limits.block_size, trial.num_decode_steps
    )
    bytes_per_s, flops_per_s = engine.measure_peaks()
    engine.is_recording = True
    session = _Session(engine, random.Random(trial.seed))
    session.run(StepCase(1, min(8, max(case.num_prompt_tokens for case in cases))), trial.num_decode_steps)  # warm-up
    session.clear()
    started_s = time.perf_counter()
    for number, case in _progress(cases, session.rng, show_progress):
        elapsed = time.perf_counter() - started_s
        if elapsed > (trial.seconds if number >= len(cases) else 3 * trial.seconds):
            break
        session.run(case, trial.num_decode_steps)
    precision = config.quantization or report.spec.dtype
    weight_bytes = weight_bytes_by_precision(report) | {precision: report.packed_weight_bytes or report.memory.weight_bytes}
    kept = skipped_layers(config.kv_cache_dtype_skip_layers or (), report.spec)
    return StepsRecord(
        shape=_in_order(ModelShape.of(config.model, report, weight_bytes, kept_layers=kept), engine),
        precision=precision,
        kv_format=report.memory.kv.dtype,
        device=report.device,
        rates=MachineRates(bytes_per_s, flops_per_s),
        memory_bytes=report.memory.available_bytes,
        request_s=statistics.median(session.delays_s) if session.delays_s else 0.0,
        scheduler={
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "max_model_len": limits.max_model_len,
            "block_size": limits.block_size,
            "num_kv_blocks": limits.num_kv_blocks,
            "num_window_blocks": limits.num_window_blocks,
        },
        steps=tuple(session.steps),
        provenance=asdict(find_provenance()),
    )


def _in_order(shape: ModelShape, engine: LLMEngine) -> ModelShape:
    """Return the shape with its attention in the order of the windows of the engine's records."""
    by_window = {group.window: group for group in shape.attention}
    return replace(shape, attention=tuple(by_window[window] for window in engine.windows if window in by_window))


def _progress(cases: list[StepCase], rng: random.Random, is_shown: bool) -> Iterator[tuple[int, StepCase]]:
    from tqdm import tqdm

    def endless() -> Iterator[tuple[int, StepCase]]:
        number = 0
        while True:
            for case in rng.sample(cases, len(cases)):
                yield number, case
                number += 1

    yield from tqdm(endless(), desc="Cases", unit="case", disable=not is_shown, dynamic_ncols=True)


class _Session:
    """Runs cases through one engine, and keeps their steps: from the end of the one before to where its outputs are there."""

    def __init__(self, engine: LLMEngine, rng: random.Random) -> None:
        self.rng = rng
        self.steps: list[MeasuredStep] = []
        self.delays_s: list[float] = []
        self._engine = engine
        self._vocab_size = engine.report.spec.vocab_size
        self._num_requests = 0
        self._places = [
            place
            for place, window in enumerate(engine.windows)
            if any(one.attention.num_kv_heads and one.attention.window == window for one in engine.report.spec.layers)
        ]

    def clear(self) -> None:
        """Forget what was measured."""
        self.steps.clear()
        self.delays_s.clear()

    def run(self, case: StepCase, num_decode_steps: int) -> None:
        """Run one case to its end."""
        params = SamplingParams(temperature=0.0, max_tokens=num_decode_steps, ignore_eos=True, detokenize=False)
        added_s = time.monotonic()
        for _ in range(case.num_sequences):
            prompt = [self.rng.randrange(self._vocab_size) for _ in range(case.num_prompt_tokens)]
            request_id = f"steps-{self._num_requests}"
            self._num_requests += 1
            added_s = time.monotonic()
            self._engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        before = self._engine.last_step
        is_first, begun_s = True, time.perf_counter()
        left = {f"steps-{self._num_requests - 1 - place}": case.num_prompt_tokens for place in range(case.num_sequences)}
        while self._engine.has_unfinished_requests():
            self._engine.step()
            record = self._engine.last_step
            if record is None or record is before:
                continue
            before, ended_s = record, time.perf_counter()
            if is_first:
                self.delays_s.append(max(record.started_s - added_s, 0.0))
                is_first = False
            num_sampled = 0
            for share in record.shares:
                left[share.request_id] -= share.num_tokens
                num_sampled += left[share.request_id] <= 0
            attended = tuple(tuple(record.attended[place]) for place in self._places)
            num_tokens = sum(share.num_tokens for share in record.shares)
            work = StepWork(num_tokens, len(record.shares), num_sampled, attended)
            self.steps.append(MeasuredStep(work, ended_s - begun_s))
            begun_s = time.perf_counter()
