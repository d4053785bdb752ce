"""Speculation benchmark: acceptance by position, tokens per step and speedup over plain decoding, by method and batch size.

One engine runs the same prompts with and without drafts alternately, so that drift of the machine affects both, and both read
the same memory. It is checked that their tokens are equal. Each pair of runs has its own prompts if there are enough, because
the gain depends on the text. What the warm-up runs learn is kept: the steady state is measured.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePath
from typing import Any, NamedTuple

from tqdm import tqdm

from quire.base.errors import ConfigError, InvariantError
from quire.bench.progress import progress_bar
from quire.bench.provenance import Provenance, find_provenance
from quire.contracts.config import EngineConfig
from quire.contracts.sampling_params import SamplingParams
from quire.contracts.speculative import SpeculativeConfig
from quire.engine.engine_stats import EngineStats
from quire.engine.llm import LLM
from quire.speculate.oracle_proposer import OracleProposer
from quire.speculate.speculator import Speculator

_REPLAY = "replay:"


def num_requests(size: int, num_waves: int) -> int:
    """Return the number of requests of a run with this batch size."""
    return size if size == 1 else size * num_waves


@dataclass(frozen=True, slots=True)
class Trial:
    """What is measured: every method at every batch size.

    methods      JSON of a speculative_config each, or replay:P, num_tokens drafts of which a share P is right
    prompts      texts or token ids; consecutive batches take consecutive prompts, starting again when too few are left for one
    num_rounds   measured pairs of runs
    warm_up_len  minimum number of tokens that a sequence gets with drafts before; the runs needed for that are not measured
    forced_share  replace drafts after they are made, so that this share is right; None: do not
    num_waves    consecutive requests per place of a batch of several sequences: sequences with drafts do not end together, and
                 without refilling a smaller batch would be measured at the end
    task         kind of prompts; see speculate_tasks.py
    """

    methods: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    prompts: tuple[str | tuple[int, ...], ...]
    output_len: int
    temperature: float
    num_tokens: int
    num_rounds: int
    is_adaptive: bool
    warm_up_len: int = 0
    num_waves: int = 1
    forced_share: float | None = None
    task: str = "continue"

    @property
    def num_warm_up(self) -> int:
        """Number of warm-up runs with drafts, which are not measured."""
        return max(1, -(-self.warm_up_len // self.output_len))

    @property
    def num_runs(self) -> int:
        """Total number of runs: per method and batch size one of each batch without drafts, the warm-up runs, and the pairs."""
        num_batches = sum(len(self.batches(size)) for size in self.batch_sizes)
        return len(self.methods) * (num_batches + len(self.batch_sizes) * (self.num_warm_up + 2 * self.num_rounds))

    def batches(self, size: int) -> list[list[dict[str, Any]]]:
        """Return the prompts of the runs, which the rounds use in turn."""
        each = num_requests(size, self.num_waves)
        chosen = self.prompts[: min(self.num_rounds, len(self.prompts) // each) * each]
        prompts = [{"prompt": p} if isinstance(p, str) else {"prompt_token_ids": list(p)} for p in chosen]
        return [prompts[first : first + each] for first in range(0, len(prompts), each)]

    def __post_init__(self) -> None:
        for name, value, least in (
            ("output_len", self.output_len, 2),  # with one token nothing is decoded
            ("num_iters", self.num_rounds, 1),
            ("waves", self.num_waves, 1),
            ("batch sizes", min(self.batch_sizes), 1),
        ):
            if value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")
        if self.forced_share is not None and not 0 <= self.forced_share <= 1:
            raise ConfigError(f"force_acceptance must be from 0 to 1, got {self.forced_share}")
        for method in self.methods:
            if method.startswith(_REPLAY):
                if self.forced_share is not None:
                    raise ConfigError(f"methods: {method!r} sets its own share of right drafts; leave out force_acceptance")
                _share_of(method)
                continue
            SpeculativeConfig.read(method)  # so that an invalid one fails before the others have run
            if "adaptive" in json.loads(method):
                raise ConfigError(f"methods: --adaptive and --no-adaptive are for all of them, but {method} has `adaptive`")
        most = num_requests(max(self.batch_sizes), self.num_waves)
        if most > len(self.prompts):
            raise ConfigError(f"there are {len(self.prompts)} prompts, too few for a batch of {most}")


@dataclass(frozen=True, slots=True)
class Line:
    """One method at one batch size; times are medians of whole runs.

    num_batches      number of different batches of prompts that were run
    forced_share     see Trial
    speed_up         median of the ratios of paired runs, prompts included
    spread           lower and upper quartile of these ratios
    decoding         median of the ratios of the time after the first token of each run: of time per output token
    overall          ratio of the total times of all runs
    cpu              median of the ratios of the process's CPU time, which other programs hardly affect; with one thread, the
                     ratio on an idle machine, with more it includes how long these waited for each other
    acceptance       share of the drafts that were accepted, by position
    tokens_per_step  of a sequence
    same_outputs     share of the outputs with drafts that equal those of plain decoding: all, except with typical acceptance
                     and sampling, and on a GPU that is not deterministic, where sums of steps with drafts have other bits, and
                     near-ties may be decided differently
    """

    method: str
    batch_size: int
    num_batches: int
    speed_up: float
    spread: tuple[float, float]
    decoding: float
    overall: float
    cpu: float
    plain_s: float
    speculative_s: float
    tokens_per_step: float
    drafts_per_step: float
    acceptance: list[float]
    same_outputs: float = 1.0
    forced_share: float | None = None

    @staticmethod
    def header() -> str:
        """Return the header for the lines of `describe`."""
        ratios = f"{'speed-up':>10}{'quartiles':>12}{'decoding':>9}{'overall':>9}{'cpu':>6}"
        return f"{'method':<44}{'batch':>6}{ratios}{'tok/step':>10}{'drafts':>8}  acceptance by position"

    def describe(self) -> str:
        """Return the results as a readable line."""
        shares = " ".join(f"{share:.2f}" for share in self.acceptance)
        spread = f"{self.spread[0]:.2f} {self.spread[1]:.2f}"
        return (
            f"{_label(self.method)[:43]:<44}{self.batch_size:>6}{self.speed_up:>10.2f}{spread:>12}{self.decoding:>9.2f}"
            f"{self.overall:>9.2f}{self.cpu:>6.2f}"
            f"{self.tokens_per_step:>10.2f}{self.drafts_per_step:>8.2f}  {shares if self.drafts_per_step > 0 else '-'}"
            + (f"  (forced: {self.forced_share:g})" if self.forced_share is not None else "")
            + (f"  ({self.same_outputs:.0%} of the outputs are those without drafts)" if self.same_outputs < 1 else "")
        )


@dataclass(frozen=True, slots=True)
class SpeculationRecord:
    """The results."""

    lines: list[Line]
    model: str
    output_len: int
    temperature: float
    provenance: Provenance
    task: str = "continue"

    def to_json(self) -> str:
        """Return the results as JSON."""
        return json.dumps(asdict(self), indent=2)


def _label(method: str) -> str:
    """Return a short label of a method: the values of its JSON."""
    return method if method.startswith(_REPLAY) else " ".join([_short(value) for value in json.loads(method).values()])


def _short(value: Any) -> str:
    return PurePath(value).name if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _share_of(method: str) -> float:
    text = method.removeprefix(_REPLAY)
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise ConfigError(f"methods: the share of right drafts in {method!r} must be a number from 0 to 1, got {text!r}")
    return share


def measure_speculation(
    config: EngineConfig, trial: Trial, show_progress: bool = False, tell: Callable[[Line], None] | None = None
) -> SpeculationRecord:
    """Measure every method at every batch size; `tell` is called with each line when it is measured.

    Raises InvariantError if a token differs from plain decoding although acceptance is exact and sums have a fixed order;
    ConfigError if the configuration has speculation itself.
    """
    if config.speculative_config is not None:
        raise ConfigError("speculative_config cannot be set: --methods gives the configurations to measure; leave it out")
    lines: list[Line] = []
    with progress_bar(trial.num_runs, "run", show_progress) as bar:
        for method in trial.methods:
            is_replay = method.startswith(_REPLAY)
            text = json.dumps({"method": "ngram", "num_speculative_tokens": trial.num_tokens}) if is_replay else method
            wanted = replace(SpeculativeConfig.read(text), adaptive=trial.is_adaptive)
            for size in trial.batch_sizes:
                bar.set_description(f"{method[:40]}, batch {size}")
                llm = LLM(replace(config, speculative_config=wanted, max_num_seqs=min(size, config.max_num_seqs)))
                lines.append(_measure(llm, method, size, trial, bar))
                if tell is not None:
                    tell(lines[-1])
                llm.close()
    return SpeculationRecord(lines, config.model, trial.output_len, trial.temperature, find_provenance(), trial.task)


@dataclass(slots=True)
class _Counts:
    """Counts of the engine in runs with drafts."""

    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list[int])

    def add(self, before: EngineStats, after: EngineStats) -> None:
        """Add what was counted between two readings."""
        self.num_steps += after.num_steps - before.num_steps
        self.num_drafts += after.num_drafts - before.num_drafts
        self.num_draft_tokens += after.num_draft_tokens - before.num_draft_tokens
        now, then = after.accepted_per_pos, before.accepted_per_pos
        self.accepted_per_pos += [0] * (len(now) - len(self.accepted_per_pos))
        for position, count in enumerate(now):
            self.accepted_per_pos[position] += count - (then[position] if position < len(then) else 0)


def _measure(llm: LLM, method: str, batch_size: int, trial: Trial, bar: tqdm[Any]) -> Line:
    batches = trial.batches(batch_size)
    engine = llm.llm_engine
    # Like an engine without speculative_config: nothing is drafted, and the model keeps nothing for a proposer.
    drafting, undrafted = engine.speculator, engine.speculator.with_proposer(None)
    expected: list[list[Any]] = []
    for prompts in batches:
        expected.append(_run(llm, prompts, trial, undrafted)[0])
        bar.update()
    drafting = _with_oracle(drafting, method, trial, expected, engine.report.spec.vocab_size)
    for index in range(trial.num_warm_up):
        _run(llm, batches[index % len(batches)], trial, drafting)
        bar.update()
    plain: list[_Took] = []
    speculative: list[_Took] = []
    counts, num_tokens, num_same = _Counts(), 0, 0
    run_size = num_requests(batch_size, trial.num_waves)
    config = engine.config
    is_lossy = config.speculative_config is not None and config.speculative_config.is_typical
    is_exact = not (is_lossy and trial.temperature > 0) and (engine.report.device == "cpu" or config.deterministic)
    for index in range(trial.num_rounds):
        chosen = index % len(batches)
        for with_drafts in (index % 2 == 0, index % 2 == 1):
            before = replace(engine.stats, accepted_per_pos=list(engine.stats.accepted_per_pos))
            found, took = _run(llm, batches[chosen], trial, drafting if with_drafts else undrafted)
            bar.update()
            if not with_drafts:
                plain.append(took)
                continue
            speculative.append(took)
            counts.add(before, engine.stats)
            num_tokens += sum(len(output.outputs[0].token_ids) for output in found)
            num_same += sum(
                a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(found, expected[chosen], strict=True)
            )
            if is_exact and num_same < len(speculative) * run_size:
                raise InvariantError(f"{method} at batch size {batch_size} gave other tokens than plain decoding")
    ratios = [one.whole_s / other.whole_s for one, other in zip(plain, speculative, strict=True)]
    quarters = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Line(
        method=method,
        batch_size=batch_size,
        num_batches=len(batches),
        speed_up=quarters[1],
        spread=(quarters[0], quarters[2]),
        decoding=statistics.median(one.decoding_s / other.decoding_s for one, other in zip(plain, speculative, strict=True)),
        overall=sum(one.whole_s for one in plain) / sum(other.whole_s for other in speculative),
        cpu=statistics.median(one.cpu_s / other.cpu_s for one, other in zip(plain, speculative, strict=True)),
        plain_s=statistics.median(one.whole_s for one in plain),
        speculative_s=statistics.median(other.whole_s for other in speculative),
        tokens_per_step=num_tokens / (counts.num_steps * batch_size),
        drafts_per_step=counts.num_draft_tokens / (counts.num_steps * batch_size),
        acceptance=[count / max(1, counts.num_drafts) for count in counts.accepted_per_pos],
        same_outputs=num_same / (trial.num_rounds * run_size),
        forced_share=trial.forced_share,
    )


def _with_oracle(drafting: Speculator, method: str, trial: Trial, expected: list[list[Any]], vocab_size: int) -> Speculator:
    """Return a speculator whose drafts are right in a given share of cases, if the method or the trial has one."""
    is_replay = method.startswith(_REPLAY)
    share = _share_of(method) if is_replay else trial.forced_share
    if share is None:
        return drafting
    outputs = {tuple(output.prompt_token_ids): output.outputs[0].token_ids for batch in expected for output in batch}
    drafter = None if is_replay else drafting.proposer
    return drafting.with_proposer(OracleProposer(outputs, share, vocab_size, drafter))


class _Took(NamedTuple):
    """Seconds of a run, of the part after its first token, and CPU seconds of all of it."""

    whole_s: float
    decoding_s: float
    cpu_s: float


def _run(llm: LLM, prompts: Sequence[dict[str, Any]], trial: Trial, speculator: Speculator) -> tuple[list[Any], _Took]:
    """Run the requests once to full length with a speculator; return their outputs and times."""
    llm.llm_engine.use_speculator(speculator)
    params = [
        SamplingParams(temperature=trial.temperature, seed=index, max_tokens=trial.output_len, ignore_eos=True)
        for index in range(len(prompts))
    ]
    # A separate salt, so that no run uses the cached prefixes or the responses of another.
    salted = [{**prompt, "cache_salt": str(llm.llm_engine.stats.num_steps)} for prompt in prompts]
    begin, cpu_begin = time.perf_counter(), time.process_time()
    outputs = llm.generate(salted, params, use_tqdm=False)
    whole_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_begin
    first = min(output.metrics.first_token_time for output in outputs)
    return outputs, _Took(whole_s, max(output.metrics.finished_time for output in outputs) - first, cpu_s)
