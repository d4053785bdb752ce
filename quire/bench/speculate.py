"""Speculation: acceptance by position, tokens per step and speed against plain decoding, by method and batch size.

The engines with and without drafts take turns on the same prompts, so that a machine that slows down slows both. That their
tokens are equal is checked on the way.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from quire.base.errors import ConfigError, InvariantError
from quire.bench.provenance import Provenance, find_provenance
from quire.contracts.config import EngineConfig
from quire.contracts.sampling_params import SamplingParams
from quire.contracts.speculative import SpeculativeConfig
from quire.engine.llm import LLM
from quire.speculate.replay import ReplayProposer

_REPLAY = "replay:"


@dataclass(frozen=True, slots=True)
class Trial:
    """What is measured: every method at every batch size.

    methods      JSON of a speculative_config each, or replay:P, drafts of which a share P is right, with num_tokens of them
    prompts      texts or token ids; a batch takes the first so many
    num_rounds   runs of each that are counted, after one that is not
    """

    methods: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    prompts: tuple[str | tuple[int, ...], ...]
    output_len: int
    temperature: float
    num_tokens: int
    num_rounds: int
    is_adaptive: bool

    def __post_init__(self) -> None:
        for name, value in (
            ("output_len", self.output_len),
            ("num_iters", self.num_rounds),
            ("batch sizes", min(self.batch_sizes)),
        ):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        for method in self.methods:
            if method.startswith(_REPLAY):
                _share_of(method)
        if max(self.batch_sizes) > len(self.prompts):
            raise ConfigError(f"there are {len(self.prompts)} prompts, too few for a batch of {max(self.batch_sizes)}")


@dataclass(frozen=True, slots=True)
class Line:
    """One method at one batch size; times are medians of whole runs.

    speed_up         median of the ratios of runs that followed each other, which a machine that slows down slows both
    acceptance       share of the drafts that were accepted, by position
    tokens_per_step  of a sequence
    """

    method: str
    batch_size: int
    speed_up: float
    plain_s: float
    speculative_s: float
    tokens_per_step: float
    drafts_per_step: float
    acceptance: list[float]


@dataclass(frozen=True, slots=True)
class SpeculationRecord:
    """The figures."""

    lines: list[Line]
    model: str
    output_len: int
    temperature: float
    provenance: Provenance

    def describe(self) -> str:
        """Return the figures as lines for people."""
        text = [f"{'method':<44}{'batch':>6}{'speed-up':>10}{'tok/step':>10}{'drafts':>8}  acceptance by position"]
        for line in self.lines:
            shares = " ".join(f"{share:.2f}" for share in line.acceptance)
            text.append(
                f"{line.method[:43]:<44}{line.batch_size:>6}{line.speed_up:>10.2f}{line.tokens_per_step:>10.2f}"
                f"{line.drafts_per_step:>8.2f}  {shares}"
            )
        return "\n".join(text)

    def to_json(self) -> str:
        """Return the figures as JSON."""
        return json.dumps(asdict(self), indent=2)


def _share_of(method: str) -> float:
    text = method.removeprefix(_REPLAY)
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise ConfigError(f"methods: the share of right drafts in {method!r} must be a number from 0 to 1, got {text!r}")
    return share


def measure_speculation(config: EngineConfig, trial: Trial) -> SpeculationRecord:
    """Measure every method at every batch size. Raises InvariantError where a token differs from plain decoding."""
    plain = LLM(replace(config, speculative_config=None))
    lines: list[Line] = []
    for method in trial.methods:
        is_replay = method.startswith(_REPLAY)
        text = json.dumps({"method": "ngram", "num_speculative_tokens": trial.num_tokens}) if is_replay else method
        wanted = replace(SpeculativeConfig.read(text), adaptive=trial.is_adaptive)
        speculating = LLM(replace(config, speculative_config=wanted))
        lines += [_measure(plain, speculating, method, size, trial) for size in trial.batch_sizes]
        speculating.close()
    plain.close()
    return SpeculationRecord(lines, config.model, trial.output_len, trial.temperature, find_provenance())


def _measure(plain: LLM, speculating: LLM, method: str, batch_size: int, trial: Trial) -> Line:
    prompts: list[dict[str, Any]] = [
        {"prompt": p} if isinstance(p, str) else {"prompt_token_ids": list(p)} for p in trial.prompts[:batch_size]
    ]
    expected, _ = _run(plain, prompts, trial)
    if method.startswith(_REPLAY):
        outputs = {tuple(output.prompt_token_ids): output.outputs[0].token_ids for output in expected}
        share = _share_of(method)
        speculating.llm_engine.draft_with(ReplayProposer(outputs, share, speculating.llm_engine.report.spec.vocab_size))
    _run(speculating, prompts, trial)
    stats = speculating.llm_engine.stats
    before = (stats.num_steps, stats.num_drafts, stats.num_draft_tokens, list(stats.accepted_per_pos))
    plain_s: list[float] = []
    speculative_s: list[float] = []
    for _ in range(trial.num_rounds):
        plain_s.append(_run(plain, prompts, trial)[1])
        found, duration_s = _run(speculating, prompts, trial)
        speculative_s.append(duration_s)
        if [o.outputs[0].token_ids for o in found] != [o.outputs[0].token_ids for o in expected]:
            raise InvariantError(f"{method} at batch size {batch_size} gave other tokens than plain decoding")
    num_steps = stats.num_steps - before[0]
    num_tokens = sum(len(output.outputs[0].token_ids) for output in expected) * trial.num_rounds
    old = before[3] + [0] * (len(stats.accepted_per_pos) - len(before[3]))
    accepted = [now - then for now, then in zip(stats.accepted_per_pos, old, strict=True)]
    times = statistics.median(plain_s), statistics.median(speculative_s)
    return Line(
        method=method,
        batch_size=batch_size,
        speed_up=statistics.median(plain / drafted for plain, drafted in zip(plain_s, speculative_s, strict=True)),
        plain_s=times[0],
        speculative_s=times[1],
        tokens_per_step=num_tokens / (num_steps * batch_size),
        drafts_per_step=(stats.num_draft_tokens - before[2]) / (num_steps * batch_size),
        acceptance=[count / max(1, stats.num_drafts - before[1]) for count in accepted],
    )


def _run(llm: LLM, prompts: Sequence[dict[str, Any]], trial: Trial) -> tuple[list[Any], float]:
    """Run the batch once; return its outputs and the seconds it took, in which every sequence went to its full length."""
    params = [
        SamplingParams(temperature=trial.temperature, seed=index, max_tokens=trial.output_len, ignore_eos=True)
        for index in range(len(prompts))
    ]
    # A salt of its own: no run finds the prefixes or the responses of another.
    salted = [{**prompt, "cache_salt": str(llm.llm_engine.stats.num_steps)} for prompt in prompts]
    begin = time.perf_counter()
    outputs = llm.generate(salted, params, use_tqdm=False)
    return outputs, time.perf_counter() - begin


def quoting_prompts(text: str, count: int, num_words: int) -> tuple[str, ...]:
    """Return prompts that quote: a passage of the text, and then its beginning again, to be gone on with."""
    words = text.split()
    prompts: list[str] = []
    for index in range(count):
        passage = words[index * num_words : (index + 1) * num_words]
        if len(passage) < num_words:
            raise ConfigError(f"the text has {len(words)} words, too few for {count} passages of {num_words}")
        quoted = " ".join(passage)
        prompts.append(f"{quoted}\n\n{quoted}\n\n{' '.join(passage[:8])}")
    return tuple(prompts)


def continuing_prompts(text: str, count: int, num_words: int) -> tuple[str, ...]:
    """Return passages of the text, to be gone on with."""
    words = text.split()
    if len(words) < count * num_words:
        raise ConfigError(f"the text has {len(words)} words, too few for {count} passages of {num_words}")
    return tuple(" ".join(words[index * num_words : (index + 1) * num_words]) for index in range(count))
