"""Constrained decoding: what an output under a constraint takes per token and per character, against free decoding.

Three ways take turns on the same prompts: free; constrained, every token with a pass of its own; constrained, with the tokens
that the grammar forces drafted. The outputs of the last two are equal, which is checked.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

from quire.base.errors import ConfigError, InvariantError
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
"""What is asked for where no schema is given: an order in a shop."""


@dataclass(frozen=True, slots=True)
class ConstrainedTrial:
    """What is measured, at every batch size.

    schema      JSON schema of every output
    max_tokens  of an output that does not end before
    num_rounds  runs of each way that are counted, after one that is not
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
class ConstrainedLine:
    """One way at one batch size; times are medians of whole runs, each of as many tokens as the constrained one.

    us_per_json_character  time over the characters of the constrained outputs: free, what text of such tokens would take
    characters_per_token   of its own text
    forced_share           of the tokens that had no pass of their own
    """

    way: str
    batch_size: int
    us_per_token: float
    us_per_json_character: float
    characters_per_token: float
    forced_share: float
    share_ended: float


@dataclass(frozen=True, slots=True)
class ConstrainedRecord:
    """The figures."""

    lines: list[ConstrainedLine]
    model: str
    temperature: float
    provenance: Provenance

    def describe(self) -> str:
        """Return the figures as lines for people."""
        text = [f"{'way':<32}{'batch':>6}{'us/token':>11}{'us/JSON char':>14}{'char/token':>12}{'forced':>8}{'ended':>7}"]
        text += [
            f"{line.way:<32}{line.batch_size:>6}{line.us_per_token:>11.0f}{line.us_per_json_character:>14.0f}"
            f"{line.characters_per_token:>12.2f}{line.forced_share:>8.2f}{line.share_ended:>7.2f}"
            for line in self.lines
        ]
        return "\n".join(text)

    def to_json(self) -> str:
        """Return the figures as JSON."""
        return json.dumps(asdict(self), indent=2)


@dataclass(frozen=True, slots=True)
class _Run:
    outputs: list[Any]
    duration_s: float
    num_accepted: int

    @property
    def num_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)


def measure_constrained(config: EngineConfig, trial: ConstrainedTrial) -> ConstrainedRecord:
    """Measure all ways at every batch size. Raises InvariantError where drafting what is forced changes a token."""
    llm = LLM(config)
    lines: list[ConstrainedLine] = []
    for batch_size in trial.batch_sizes:
        runs: dict[str, list[_Run]] = {"free": [], "constrained": [], "constrained, forced drafted": []}
        for _ in range(trial.num_rounds + 1):
            constrained = [_run(llm, trial, batch_size, drafts_forced) for drafts_forced in (False, True)]
            if [one.token_ids for one in constrained[0].outputs] != [one.token_ids for one in constrained[1].outputs]:
                raise InvariantError("drafting what is forced gave other tokens")
            lengths = [len(output.token_ids) for output in constrained[0].outputs]
            found = (_run(llm, trial, batch_size, False, lengths), *constrained)
            for known, run in zip(runs.values(), found, strict=True):
                known.append(run)
        num_json = sum(len(output.text) for output in runs["constrained"][0].outputs)
        lines += [_line(way, batch_size, known[1:], num_json) for way, known in runs.items()]
    llm.close()
    return ConstrainedRecord(lines, config.model, trial.temperature, find_provenance())


def _line(way: str, batch_size: int, runs: list[_Run], num_json_characters: int) -> ConstrainedLine:
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
    )


def _run(llm: LLM, trial: ConstrainedTrial, batch_size: int, drafts_forced: bool, lengths: list[int] | None = None) -> _Run:
    """Run the batch once: constrained, or freely to the given lengths."""
    wanted = None
    if lengths is None:
        wanted = StructuredOutputsParams(json=trial.schema, disable_any_whitespace=trial.is_compact)
    params = [
        SamplingParams(
            temperature=trial.temperature,
            seed=index,
            max_tokens=trial.max_tokens if lengths is None else lengths[index],
            ignore_eos=lengths is not None,
            structured_outputs=wanted,
        )
        for index in range(batch_size)
    ]
    engine = llm.llm_engine
    engine.draft_forced(drafts_forced)
    before = engine.stats.num_accepted_tokens
    salt = str(engine.stats.num_steps)  # no run finds the prefixes of another
    begin = time.perf_counter()
    found = llm.generate(
        [{"prompt": prompt, "cache_salt": salt} for prompt in trial.prompts[:batch_size]], params, use_tqdm=False
    )
    duration_s = time.perf_counter() - begin
    return _Run([output.outputs[0] for output in found], duration_s, engine.stats.num_accepted_tokens - before)
