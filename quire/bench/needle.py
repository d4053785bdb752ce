"""Needle in a haystack: whether a model finds a few words that stand somewhere in a long prompt, by KV format."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from quire.base.errors import ConfigError
from quire.bench.perplexity import with_kv_format
from quire.bench.provenance import Provenance, find_provenance
from quire.contracts.config import EngineConfig
from quire.contracts.kv_compression import KvCompression
from quire.contracts.sampling_params import SamplingParams
from quire.engine.llm import LLM

INTRODUCTION = "\nRemember this. The secret words are"
_NUM_WORDS = 4
"""Words of a needle."""


@dataclass(frozen=True, slots=True)
class NeedleGrid:
    """The prompts: for every length and depth `num_prompts` of them. Raises ConfigError.

    lengths  tokens of a prompt
    depths   where the needle stands: 0 is the start of the prompt, 1 its end
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    num_prompts: int = 8

    def __post_init__(self) -> None:
        for length in self.lengths:
            if length < 1:
                raise ConfigError(f"lengths must be at least 1, got {length}")
        for depth in self.depths:
            if not 0.0 <= depth <= 1.0:
                raise ConfigError(f"depths must be from 0 to 1, got {depth}")
        if self.num_prompts < 1:
            raise ConfigError(f"num_prompts must be at least 1, got {self.num_prompts}")


@dataclass(frozen=True, slots=True)
class NeedleCell:
    """The prompts of one length and depth; num_found: those whose greedy output is the needle."""

    length: int
    depth: float
    num_prompts: int
    num_found: int


@dataclass(frozen=True, slots=True)
class NeedleResult:
    """The results of one KV format, or of one KV compression."""

    model: str
    dtype: str
    kv_cache_dtype: str
    cells: tuple[NeedleCell, ...]
    kv_compression: str | None = None

    @property
    def share_found(self) -> float:
        """The share of prompts whose needle was found."""
        return sum(cell.num_found for cell in self.cells) / sum(cell.num_prompts for cell in self.cells)

    def describe(self) -> str:
        """Return a table: a row for each length, a column for each depth."""
        depths = sorted({cell.depth for cell in self.cells})
        compression = "" if self.kv_compression is None else f", KV compression {self.kv_compression}"
        lines = [f"{self.model} ({self.dtype}, KV cache {self.kv_cache_dtype}{compression}): {self.share_found:.1%} found"]
        lines.append("length  " + "".join(f"{f'at {depth:g}':>10}" for depth in depths))
        for length in sorted({cell.length for cell in self.cells}):
            row = {cell.depth: f"{cell.num_found}/{cell.num_prompts}" for cell in self.cells if cell.length == length}
            lines.append(f"{length:<8}" + "".join(f"{row[depth]:>10}" for depth in depths))
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class NeedleRecord:
    """The results of a run and their provenance; `text` is the name of the text."""

    text: str
    results: tuple[NeedleResult, ...]
    provenance: Provenance

    def describe(self) -> str:
        """Return the results as readable tables."""
        return "\n\n".join(result.describe() for result in self.results)

    def to_json(self) -> str:
        """Return the record as JSON."""
        return json.dumps(asdict(self), indent=2)


@dataclass(frozen=True, slots=True)
class Needle:
    """A prompt, as token ids, and what is to follow it."""

    prompt: list[int]
    answer: list[int]


def measure_needles(
    config: EngineConfig,
    text: str,
    name: str,
    grid: NeedleGrid,
    against_kv: Sequence[str] = (),
    show_progress: bool = False,
    compressions: Sequence[KvCompression] = (),
) -> NeedleRecord:
    """Measure a KV format, and others and KV compressions on the same prompts.

    text        the haystack, of which each prompt has another part; name: its name in the record
    against_kv  each a value of kv_cache_dtype

    Raises ConfigError, before anything is measured, for a format that there is not, or a text that is too short.
    """
    variants = [config, *(with_kv_format(config, other) for other in against_kv)]
    results = [_measure(variant, None, text, grid, show_progress) for variant in variants]
    results += [_measure(config, compression, text, grid, show_progress) for compression in compressions]
    return NeedleRecord(name, tuple(results), find_provenance())


def _measure(
    config: EngineConfig, compression: KvCompression | None, text: str, grid: NeedleGrid, show_progress: bool
) -> NeedleResult:
    llm = LLM(config)
    try:
        report = llm.llm_engine.report
        encode = llm.get_tokenizer().encode
        words = [word for word in text.split() if word.isalpha()]
        haystack = encode(text, add_special_tokens=False)
        places = [(length, depth) for length in grid.lengths for depth in grid.depths for _ in range(grid.num_prompts)]
        needles = [
            make_needle(encode, haystack, words, length, depth, random.Random(index))
            for index, (length, depth) in enumerate(places)
        ]
        limit = report.memory.max_model_len
        for needle in needles:
            if len(needle.prompt) + len(needle.answer) > limit:
                raise ConfigError(
                    f"lengths must leave room for the answer below max_model_len ({limit}), got {max(grid.lengths)}"
                )
        prompts = [{"prompt_token_ids": needle.prompt} for needle in needles]
        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=len(needle.answer),
                ignore_eos=True,
                detokenize=False,
                kv_compression=compression,
            )
            for needle in needles
        ]
        outputs = llm.generate(prompts, params, use_tqdm=show_progress)
    finally:
        llm.close()
    is_found = [output.outputs[0].token_ids == needle.answer for output, needle in zip(outputs, needles, strict=True)]
    cells = [
        NeedleCell(*places[first], grid.num_prompts, sum(is_found[first : first + grid.num_prompts]))
        for first in range(0, len(places), grid.num_prompts)
    ]
    described = None if compression is None else compression.describe()
    return NeedleResult(config.model, report.spec.dtype, report.memory.kv.format_name, tuple(cells), described)


def make_needle(
    encode: Callable[..., list[int]], haystack: list[int], words: list[str], length: int, depth: float, draw: random.Random
) -> Needle:
    """Return a prompt of `length` tokens: a part of the text with a needle in it, and then the beginning of the needle."""
    if len(words) < _NUM_WORDS:
        raise ConfigError(f"the text has {len(words)} words of letters; at least {_NUM_WORDS} are needed for a needle")
    introduction = encode(INTRODUCTION, add_special_tokens=False)
    answer = encode(" " + " ".join(draw.sample(words, _NUM_WORDS)), add_special_tokens=False)
    needle = [*introduction, *answer, *encode(".\n", add_special_tokens=False)]
    num_tokens = length - len(needle) - len(introduction)
    if num_tokens < 0:
        raise ConfigError(f"lengths must be at least {length - num_tokens} for this needle and its question, got {length}")
    if num_tokens > len(haystack):
        raise ConfigError(
            f"the text has {len(haystack)} tokens, but a prompt of {length} takes {num_tokens} of it: give a longer one"
        )
    start = draw.randrange(len(haystack) - num_tokens + 1)
    hay, place = haystack[start : start + num_tokens], round(depth * num_tokens)
    return Needle([*hay[:place], *needle, *hay[place:], *introduction], answer)
