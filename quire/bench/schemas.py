"""A sample of JSON schemas: how many are accepted, how long they take to compile, what ends of outputs cost, and how many end.

The looks for an end are measured in outputs drawn without a model: of every token what the matcher computes beside its mask.
With a model every accepted schema gets outputs, and those that end by themselves are validated.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np

from quire.base.errors import ConfigError, InvariantError, RequestError, UnsupportedError
from quire.bench.progress import progress_bar
from quire.bench.provenance import Provenance, find_provenance
from quire.contracts.config import EngineConfig
from quire.contracts.constraint import Constraint, Grammar, StructuredOutputsParams
from quire.contracts.sampling_params import SamplingParams
from quire.engine.llm import LLM
from quire.grammar.compiler import GrammarCompiler, GrammarContext
from quire.grammar.matcher import MaskedMatcher
from quire.grammar.vocabulary import read_vocabulary
from quire.model.resolve import resolve_model
from quire.text.tokenizer import load_tokenizer

_TEXT_SHARE = 0.8
_NUM_TRIES = 60
_PROMPT = "As JSON: "


@dataclass(frozen=True, slots=True)
class SchemaTrial:
    """What is measured over the schemas.

    max_tokens   of an output, within which it is brought to an end
    num_outputs  of each schema by the model; 0: no model is loaded, only its tokenizer
    """

    schemas: tuple[Any, ...]
    max_tokens: int
    num_outputs: int
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution."""

    count: int
    median: float
    p90: float
    p99: float
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return what values there are; at least one."""
        ranked = sorted(values)
        p90, p99 = (ranked[min(len(ranked) - 1, int(share * len(ranked)))] for share in (0.9, 0.99))
        return cls(len(ranked), statistics.median(ranked), p90, p99, ranked[-1])

    def describe(self, unit: str) -> str:
        """Return it as text."""
        return f"median {self.median:.2f} {unit}, P90 {self.p90:.2f}, P99 {self.p99:.2f}, at most {self.maximum:.1f}"


@dataclass(frozen=True, slots=True)
class SchemaRecord:
    """The figures.

    compile_ms         of the accepted schemas, each for the first time
    look_ms            computing time per token of looks for an end
    look_ms_by_output  the same, summed over an output
    refusals           why schemas are refused, in their order
    num_ended          outputs of the model that ended by themselves; all of them were valid
    """

    num_schemas: int
    num_accepted: int
    refusals: list[str]
    vocabulary_size: int
    max_tokens: int
    compile_ms: Spread
    look_ms: Spread
    look_ms_by_output: Spread
    num_outputs: int
    num_ended: int
    model: str
    provenance: Provenance

    def describe(self) -> str:
        """Return the figures as lines for people."""
        lines = [
            f"accepted: {self.num_accepted} of {self.num_schemas} schemas, {self.vocabulary_size:,} tokens",
            f"compiled for the first time: {self.compile_ms.describe('ms')}",
            f"looks for an end, a token: {self.look_ms.describe('ms')}",
            f"looks for an end, an output of {self.max_tokens} tokens: {self.look_ms_by_output.describe('ms')}",
        ]
        if self.num_outputs:
            share = self.num_ended / self.num_outputs
            lines.append(
                f"ended by themselves: {self.num_ended} of {self.num_outputs} outputs ({share:.1%}), all of them valid"
            )
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the figures as JSON."""
        return json.dumps(asdict(self), indent=2)


def measure_schemas(config: EngineConfig, trial: SchemaTrial, show_progress: bool = False) -> SchemaRecord:
    """Measure all schemas. Raises ConfigError where all are refused, InvariantError where an output that ended is not valid."""
    if trial.num_outputs:
        _validator_of({})  # whether there is one is known before the model is loaded
    where = config.model if config.tokenizer is None else config.tokenizer
    tokenizer = load_tokenizer(resolve_model(where, config.revision if config.tokenizer is None else None))
    vocabulary = read_vocabulary(tokenizer, tokenizer.vocab_size)
    compiler = GrammarCompiler(lambda: vocabulary)
    compiler.warm()
    compile_ms: list[float] = []
    look_ms: list[list[float]] = []
    accepted: list[Any] = []
    refusals: list[str] = []
    texts = [token_id for token_id, token in enumerate(vocabulary.tokens) if token.replace(b" ", b"").isalnum()]
    bar = progress_bar(len(trial.schemas), "schema", show_progress)
    for index, schema in enumerate(trial.schemas):
        bar.update()
        begin = time.perf_counter()
        try:
            constraint = Constraint(kind="json_schema", source=json.dumps(schema), param="schema")
            grammar = compiler.start(constraint, (), GrammarContext((), trial.max_tokens)).result()
        except RequestError as error:
            refusals.append(str(error))
            continue
        compile_ms.append(1e3 * (time.perf_counter() - begin))
        accepted.append(schema)
        look_ms.append(_look_times(grammar, trial.max_tokens, random.Random(index), texts))
    bar.close()
    compiler.close()
    if not accepted:
        raise ConfigError(f"all {len(trial.schemas)} schemas are refused, the first one so: {refusals[0]}")
    num_outputs, num_ended = _write_outputs(config, trial, accepted, show_progress) if trial.num_outputs else (0, 0)
    return SchemaRecord(
        num_schemas=len(trial.schemas),
        num_accepted=len(accepted),
        refusals=refusals,
        vocabulary_size=vocabulary.size,
        max_tokens=trial.max_tokens,
        compile_ms=Spread.of(compile_ms),
        look_ms=Spread.of([value for values in look_ms for value in values]),
        look_ms_by_output=Spread.of([sum(values) for values in look_ms]),
        num_outputs=num_outputs,
        num_ended=num_ended,
        model=where if trial.num_outputs == 0 else config.model,
        provenance=find_provenance(),
    )


def _look_times(grammar: Grammar, max_tokens: int, draws: random.Random, texts: Sequence[int]) -> list[float]:
    """Return the milliseconds of computing by token, of an output that is drawn: mostly text, as long as it may be."""
    matcher = cast("MaskedMatcher", grammar.new_matcher())
    words = np.zeros(matcher.end_token_id // 32 + 1, dtype=np.int32)
    found: list[float] = []
    while len(found) < max_tokens and not matcher.is_complete:
        if matcher.source.fill(matcher, words) is not None:
            break
        begin = time.thread_time()
        matcher.narrow(words)
        taken = time.thread_time() - begin
        token_id = _draw(words.view(np.uint32), matcher.end_token_id, draws, texts)
        if token_id is None:
            break
        begin = time.thread_time()
        error = matcher.advance(token_id)
        found.append(1e3 * (taken + time.thread_time() - begin))
        if error is not None:
            raise InvariantError(f"a mask allows what its grammar does not take: {error}")
    return found or [0.0]


def _draw(words: Any, end_token_id: int, draws: random.Random, texts: Sequence[int]) -> int | None:
    """Return a token that is allowed, text where that is found in a few tries; None where only the end is."""
    if texts and draws.random() < _TEXT_SHARE:
        for _ in range(_NUM_TRIES):
            token_id = draws.choice(texts)
            if int(words[token_id // 32]) >> token_id % 32 & 1:
                return token_id
    allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:end_token_id])
    return int(draws.choice(allowed)) if len(allowed) else None


def _write_outputs(config: EngineConfig, trial: SchemaTrial, schemas: Sequence[Any], show_progress: bool) -> tuple[int, int]:
    """Return how many outputs the model wrote, and how many ended by themselves."""
    llm = LLM(config)
    params = [
        SamplingParams(
            structured_outputs=StructuredOutputsParams(json=json.dumps(schema)),
            n=trial.num_outputs,
            max_tokens=trial.max_tokens,
            temperature=trial.temperature,
            seed=index,
        )
        for index, schema in enumerate(schemas)
    ]
    outputs = llm.generate([_PROMPT] * len(params), params, use_tqdm=show_progress)
    llm.close()
    num_outputs = num_ended = 0
    for schema, output in zip(schemas, outputs, strict=True):
        validator = _validator_of(schema)
        for choice in output.outputs:
            num_outputs += 1
            if choice.finish_reason == "stop":
                num_ended += 1
                if not validator.is_valid(json.loads(choice.text)):
                    raise InvariantError(f"an output is not valid under its schema: {choice.text}")
    return num_outputs, num_ended


def _validator_of(schema: Any) -> Any:
    try:
        from jsonschema import validators
    except ImportError:
        raise UnsupportedError("outputs are validated by the package jsonschema, which is not installed") from None
    return validators.validator_for(schema)(schema)
