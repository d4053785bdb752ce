"""Constrained decoding: time per token and per character of an output under a constraint, compared with free decoding.

Three ways alternate on the same prompts: free; constrained, with a pass for every token; constrained, with forced tokens
drafted. The outputs of the last two must be equal, which is checked.

The cost of constraints is measured on steps in which every sequence gets one token: the medians of each way per round, and
their ratios to free decoding in the same round, because drift is slower than a round. CPU time excludes other programs.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

from quire.base.errors import ConfigError, InvariantError
from quire.bench.progress import progress_bar
from quire.bench.provenance import Provenance, find_provenance
from quire.contracts.config import EngineConfig
from quire.contracts.constraint import StructuredOutputsParams
from quire.contracts.sampling_params import SamplingParams
from quire.engine.llm import LLM

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "order_number": {"type": "integer", "minimum": 1, "maximum": 99999},
        "customer": {
            "type": "object",
            "properties": {
                "first_name": {"type": "string", "maxLength": 12},
                "last_name": {"type": "string", "maxLength": 12},
                "is_returning_customer": {"type": "boolean"},
            },
            "required": ["first_name", "last_name", "is_returning_customer"],
            "additionalProperties": False,
        },
        "items": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "product_name": {"type": "string", "maxLength": 16},
                    "quantity": {"type": "integer", "minimum": 1, "maximum": 20},
                    "unit_price_in_cents": {"type": "integer", "minimum": 1, "maximum": 99999},
                },
                "required": ["product_name", "quantity", "unit_price_in_cents"],
                "additionalProperties": False,
            },
            "minItems": 2,
            "maxItems": 3,
        },
        "delivery_status": {"enum": ["ordered", "dispatched", "delivered", "returned"]},
    },
    "required": ["order_number", "customer", "items", "delivery_status"],
    "additionalProperties": False,
}
"""Default schema: an order in a shop."""


_WAYS = ("free", "constrained", "constrained, forced drafted")


@dataclass(frozen=True, slots=True)
class ConstrainedTrial:
    """What is measured, at every batch size.

    schema      JSON schema of every output
    max_tokens  maximum length of an output
    num_rounds  measured runs of each way, after a warm-up run
    """

    schema: dict[str, Any]
    batch_sizes: tuple[int, ...]
    prompts: tuple[str, ...]
    max_tokens: int
    temperature: float
    num_rounds: int
    is_compact: bool

    def __post_init__(self) -> None:
        if min(*self.batch_sizes, self.max_tokens, self.num_rounds) < 1:
            raise ConfigError("batch sizes, max_tokens and num_iters must be at least 1")
        if max(self.batch_sizes) > len(self.prompts):
            raise ConfigError(f"there are {len(self.prompts)} prompts, too few for a batch of {max(self.batch_sizes)}")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Medians over steps, in seconds: wall-clock, CPU time of the stepping thread, and of all threads of the process."""

    num_steps: int
    clock_s: float
    thread_s: float
    process_s: float


@dataclass(frozen=True, slots=True)
class StepRatios:
    """Quartiles, over the rounds, of step times relative to free decoding in the same round.

    step_ms    wall-clock median
    num_steps  number of measured steps
    run        wall-clock ratio of whole runs, including prompts and the last steps
    """

    step_ms: float
    num_steps: int
    run: tuple[float, float, float]
    clock: tuple[float, float, float]
    thread: tuple[float, float, float]
    process: tuple[float, float, float]

    def describe(self) -> str:
        """Return the quartiles as text."""
        parts = (("run", self.run), ("clock", self.clock), ("its thread", self.thread), ("all threads", self.process))
        shown = ", ".join(f"{name} {middle:.3f} ({low:.3f} to {high:.3f})" for name, (low, middle, high) in parts)
        return f"{self.num_steps} steps of {self.step_ms:.2f} ms over free ones: {shown}"


@dataclass(frozen=True, slots=True)
class ConstrainedLine:
    """One way at one batch size; times are medians of whole runs, each of as many tokens as the constrained one.

    us_per_json_character  time per character of the constrained outputs; for free runs: what such text would take
    characters_per_token   of its own text
    forced_share           share of the tokens without a forward pass of their own
    steps                  steps with one token for every sequence, relative to free decoding; None if there are none
    """

    way: str
    batch_size: int
    us_per_token: float
    us_per_json_character: float
    characters_per_token: float
    forced_share: float
    share_ended: float
    steps: StepRatios | None


@dataclass(frozen=True, slots=True)
class ConstrainedRecord:
    """The results."""

    lines: list[ConstrainedLine]
    model: str
    temperature: float
    provenance: Provenance

    def describe(self) -> str:
        """Return the results as readable lines."""
        text = [f"{'way':<32}{'batch':>6}{'us/token':>11}{'us/JSON char':>14}{'char/token':>12}{'forced':>8}{'ended':>7}"]
        text += [
            f"{line.way:<32}{line.batch_size:>6}{line.us_per_token:>11.0f}{line.us_per_json_character:>14.0f}"
            f"{line.characters_per_token:>12.2f}{line.forced_share:>8.2f}{line.share_ended:>7.2f}"
            for line in self.lines
        ]
        text += [
            f"{line.way}, batch {line.batch_size}: {line.steps.describe()}" for line in self.lines if line.steps is not None
        ]
        return "\n".join(text)

    def to_json(self) -> str:
        """Return the results as JSON."""
        return json.dumps(asdict(self), indent=2)


@dataclass(frozen=True, slots=True)
class _Run:
    outputs: list[Any]
    duration_s: float
    num_accepted: int
    steps: StepTimes | None

    @property
    def num_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)


def measure_constrained(config: EngineConfig, trial: ConstrainedTrial, show_progress: bool = False) -> ConstrainedRecord:
    """Measure all ways at every batch size. Raises InvariantError if drafting forced tokens changes a token."""
    llm = LLM(config)
    lines: list[ConstrainedLine] = []
    num_runs = len(trial.batch_sizes) * (3 + len(_WAYS) * trial.num_rounds)
    with progress_bar(num_runs, "run", show_progress) as bar:
        for batch_size in trial.batch_sizes:
            bar.set_description(f"batch {batch_size}")
            first = [_run(llm, trial, batch_size, drafts_forced) for drafts_forced in (False, True)]
            bar.update(2)
            if [one.token_ids for one in first[0].outputs] != [one.token_ids for one in first[1].outputs]:
                raise InvariantError("drafting forced tokens changed the output")
            lengths = [len(output.token_ids) for output in first[0].outputs]
            _run(llm, trial, batch_size, False, lengths)
            bar.update()
            runs: dict[str, list[_Run]] = {way: [] for way in _WAYS}
            for number in range(trial.num_rounds):
                for way in _WAYS if number % 2 else reversed(_WAYS):
                    runs[way].append(_run(llm, trial, batch_size, way == _WAYS[2], lengths if way == _WAYS[0] else None))
                    bar.update()
            num_json = sum(len(output.text) for output in first[0].outputs)
            lines += [_line(way, batch_size, known, runs[_WAYS[0]], num_json) for way, known in runs.items()]
    llm.close()
    return ConstrainedRecord(lines, config.model, trial.temperature, find_provenance())


def _line(way: str, batch_size: int, runs: list[_Run], free: list[_Run], num_json_characters: int) -> ConstrainedLine:
    outputs = runs[0].outputs
    duration_s = statistics.median(run.duration_s for run in runs)
    return ConstrainedLine(
        way=way,
        batch_size=batch_size,
        us_per_token=1e6 * duration_s / runs[0].num_tokens,
        us_per_json_character=1e6 * duration_s / max(1, num_json_characters),
        characters_per_token=sum(len(output.text) for output in outputs) / runs[0].num_tokens,
        forced_share=runs[0].num_accepted / runs[0].num_tokens,
        share_ended=sum(output.finish_reason == "stop" for output in outputs) / len(outputs),
        steps=None if way == _WAYS[0] else _step_ratios(runs, free),
    )


def _step_ratios(runs: list[_Run], free: list[_Run]) -> StepRatios | None:
    pairs = [(one.steps, other.steps) for one, other in zip(runs, free, strict=True)]
    times = [(one, other) for one, other in pairs if one is not None and other is not None]
    if not times:
        return None
    return StepRatios(
        num_steps=sum(one.num_steps for one, _ in times),
        run=_quartiles([one.duration_s / other.duration_s for one, other in zip(runs, free, strict=True)]),
        step_ms=1e3 * statistics.median(one.clock_s for one, _ in times),
        clock=_quartiles([one.clock_s / other.clock_s for one, other in times]),
        thread=_quartiles([one.thread_s / other.thread_s for one, other in times]),
        process=_quartiles([one.process_s / other.process_s for one, other in times]),
    )


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _run(llm: LLM, trial: ConstrainedTrial, batch_size: int, drafts_forced: bool, lengths: list[int] | None = None) -> _Run:
    """Run the batch once: constrained, or freely to the given lengths."""
    wanted = None
    if lengths is None:
        wanted = StructuredOutputsParams(json=trial.schema, disable_any_whitespace=trial.is_compact)
    engine = llm.llm_engine
    engine.draft_forced(drafts_forced)
    before = engine.stats.num_accepted_tokens
    salt = str(engine.stats.num_steps)  # so that no run uses the cached prefixes of another
    begin = time.perf_counter()
    for index in range(batch_size):
        params = SamplingParams(
            temperature=trial.temperature,
            seed=index,
            max_tokens=trial.max_tokens if lengths is None else lengths[index],
            ignore_eos=lengths is not None,
            structured_outputs=wanted,
        )
        engine.add_request(f"{salt}-{index}", {"prompt": trial.prompts[index], "cache_salt": salt}, params, "final")
    found: dict[str, Any] = {}
    steps: list[tuple[float, ...]] = []
    while engine.has_unfinished_requests():
        num_alive, num_before, times = engine.num_unfinished_requests(), engine.stats.num_batched_tokens, _read_clocks()
        for output in engine.step():
            found[output.request_id] = output
        if engine.stats.num_batched_tokens - num_before == batch_size == num_alive:
            steps.append(tuple(after - earlier for after, earlier in zip(_read_clocks(), times, strict=True)))
    duration_s = time.perf_counter() - begin
    outputs = [found[f"{salt}-{index}"].outputs[0] for index in range(batch_size)]
    medians = [statistics.median(values) for values in zip(*steps, strict=True)]
    accepted = engine.stats.num_accepted_tokens - before
    return _Run(outputs, duration_s, accepted, StepTimes(len(steps), *medians) if medians else None)


def _read_clocks() -> tuple[float, float, float]:
    return time.perf_counter(), time.thread_time(), time.process_time()
