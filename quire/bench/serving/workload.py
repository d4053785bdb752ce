"""The requests of a run: synthetic lengths, a recorded trace, or prompts of a file; created before the clock starts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from quire.base.errors import ConfigError
from quire.bench.serving.prompts import Alphabet, Prompt
from quire.bench.serving.traces import Trace, TraceRow, read_trace

DatasetName = Literal["random", "trace", "custom"]
_LENGTHS, _TOKENS, _PREFIX, _BLOCK = 0x10, 0x11, 0x12, 0x13  # streams of the seed


@dataclass(frozen=True, slots=True)
class Request:
    """One request: its prompt (token ids, text, or chat messages), lengths in tokens, and its recorded time (seconds)."""

    prompt: Prompt | list[dict[str, Any]]
    num_prompt_tokens: int
    num_output_tokens: int
    time_s: float | None = None


@dataclass(frozen=True, slots=True)
class Dataset:
    """The source of requests. Raises ConfigError.

    name                random, trace or custom
    path                the file of a trace, or JSON lines of custom prompts
    num_prompts         number of requests; None: 1000 random ones, or all of a file
    input_len, output_len, range_ratio  random lengths are uniform in [len * (1 - ratio), len * (1 + ratio)]
    prefix_len          tokens that all random prompts start with, in addition to input_len
    input_scale, output_scale, max_input_len, max_output_len  lengths are multiplied, then capped
    trace_duration_s    seconds of the trace's own time to use
    seed                of lengths and tokens
    """

    name: DatasetName = "random"
    path: Path | None = None
    num_prompts: int | None = None
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    input_scale: float = 1.0
    output_scale: float = 1.0
    max_input_len: int | None = None
    max_output_len: int | None = None
    trace_duration_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for option, value, least in (
            ("--num-prompts", self.num_prompts, 1),
            ("--random-input-len", self.input_len, 1),
            ("--random-output-len", self.output_len, 1),
            ("--random-prefix-len", self.prefix_len, 0),
            ("--max-input-len", self.max_input_len, 1),
            ("--max-output-len", self.max_output_len, 1),
            ("--seed", self.seed, 0),
        ):
            if value is not None and value < least:
                raise ConfigError(f"{option} must be at least {least}, got {value}")
        for option, number in (
            ("--input-scale", self.input_scale),
            ("--output-scale", self.output_scale),
            ("--trace-duration", self.trace_duration_s),
        ):
            if number is not None and not (number > 0 and math.isfinite(number)):
                raise ConfigError(f"{option} must be a number above 0, got {number}")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"--random-range-ratio must be at least 0 and below 1, got {self.range_ratio}")
        if (self.path is None) != (self.name == "random"):
            needs = "needs" if self.path is None else "takes no"
            raise ConfigError(f"--dataset-name {self.name} {needs} --dataset-path")
        if self.name == "custom" and (self.input_scale != 1 or self.max_input_len is not None):
            raise ConfigError("--input-scale and --max-input-len do not apply to --dataset-name custom: its prompts stay whole")

    def scaled_input(self, length: int) -> int:
        """Return a prompt's length after scale and cap, at least 1."""
        return _scaled(length, self.input_scale, self.max_input_len)

    def scaled_output(self, length: int) -> int:
        """Return an output's length after scale and cap, at least 1."""
        return _scaled(length, self.output_scale, self.max_output_len)


def _scaled(length: int, scale: float, cap: int | None) -> int:
    scaled = max(1, round(length * scale))
    return scaled if cap is None else min(scaled, cap)


def make_requests(dataset: Dataset, alphabet: Alphabet) -> list[Request]:
    """Return the requests of a dataset, deterministic for a seed. Raises ConfigError."""
    if dataset.name == "random":
        return random_requests(dataset, alphabet)
    if dataset.path is None:
        raise ConfigError(f"--dataset-name {dataset.name} needs --dataset-path")
    if dataset.name == "custom":
        return list(_custom_requests(dataset, dataset.path))
    trace = read_trace(dataset.path, dataset.trace_duration_s, dataset.num_prompts)
    return trace_requests(dataset, trace, alphabet)


def random_requests(dataset: Dataset, alphabet: Alphabet, first: int = 0) -> list[Request]:
    """Return requests of random lengths and tokens; other values of `first` give other requests of the same shape."""
    number = 1000 if dataset.num_prompts is None else dataset.num_prompts
    lengths = np.random.default_rng([dataset.seed, _LENGTHS, first])
    inputs = _lengths(lengths, dataset.input_len, dataset.range_ratio, number)
    outputs = _lengths(lengths, dataset.output_len, dataset.range_ratio, number)
    prefix = _draw(alphabet, dataset.prefix_len, dataset.seed, _PREFIX)
    requests = []
    for index, (num_input, num_output) in enumerate(zip(inputs, outputs, strict=True)):
        own = _draw(alphabet, dataset.scaled_input(num_input), dataset.seed, _TOKENS, first, index)
        symbols = np.concatenate([prefix, own])[: dataset.max_input_len]
        requests.append(Request(alphabet.render(symbols), len(symbols), dataset.scaled_output(num_output)))
    return requests


def _lengths(generator: np.random.Generator, length: int, ratio: float, number: int) -> list[int]:
    low, high = max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio))
    return generator.integers(low, high, number, endpoint=True).tolist()


def _draw(alphabet: Alphabet, length: int, *key: int) -> np.ndarray:
    return np.random.default_rng([*key]).integers(0, alphabet.size, length)


def trace_requests(dataset: Dataset, trace: Trace, alphabet: Alphabet) -> list[Request]:
    """Return requests with a trace's lengths and times; equal hash ids give equal blocks of tokens.

    Blocks are scaled with --input-scale, to at least one token, so that the share of equal prompt tokens is kept.
    """
    block = None if trace.block_tokens is None else max(1, round(trace.block_tokens * dataset.input_scale))
    requests = []
    for index, row in enumerate(trace.rows):
        length = dataset.scaled_input(row.num_input_tokens)
        symbols = _trace_symbols(dataset.seed, row, index, length, block, alphabet)
        outputs = dataset.scaled_output(row.num_output_tokens)
        requests.append(Request(alphabet.render(symbols), length, outputs, row.time_s))
    return requests


def _trace_symbols(seed: int, row: TraceRow, index: int, length: int, block: int | None, alphabet: Alphabet) -> np.ndarray:
    if block is None or not row.hash_ids:
        return _draw(alphabet, length, seed, _TOKENS, 0, index)
    ids = row.hash_ids[: -(-length // block)]
    parts = [_draw(alphabet, block, seed, _BLOCK, hash_id % 2**63) for hash_id in ids]
    missing = length - block * len(ids)
    if missing > 0:  # the rounded block size made the prompt too short: the last block grows
        parts.append(_draw(alphabet, missing, seed, _BLOCK, ids[-1] % 2**63, 1))
    return np.concatenate(parts)[:length]


def _custom_requests(dataset: Dataset, path: Path) -> Iterator[Request]:
    """Yield the requests of JSON lines {"prompt": text or token ids, or "messages": [...], "output_tokens": n, "timestamp": s}.

    output_tokens (or max_tokens) and timestamp are optional; by default random_output_len and no times are used.
    """
    rows = _json_lines(path)
    if not rows:
        raise ConfigError(f"--dataset-path {path} has no prompt")
    times = [row.get("timestamp") for _, row in rows]
    has_times = all(isinstance(time, int | float) and math.isfinite(time) for time in times)
    if has_times:
        rows.sort(key=lambda item: item[1]["timestamp"])
    for number, row in rows[: dataset.num_prompts]:
        prompt = row.get("prompt", row.get("messages"))
        if not prompt or not isinstance(prompt, str | list):
            raise ConfigError(f'--dataset-path {path}, line {number}: needs "prompt" (text or token ids) or "messages"')
        wanted = row.get("output_tokens", row.get("max_tokens", dataset.output_len))
        if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
            raise ConfigError(f"--dataset-path {path}, line {number}: output_tokens must be an integer >= 1, got {wanted!r}")
        is_ids = isinstance(prompt, list) and isinstance(prompt[0], int)
        length = len(prompt) if is_ids else 0
        yield Request(prompt, length, dataset.scaled_output(wanted), float(row["timestamp"]) if has_times else None)


def _json_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [(number, json.loads(line)) for number, line in enumerate(lines, 1) if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--dataset-path {path} cannot be read as JSON lines ({error})") from error
    for number, row in rows:
        if not isinstance(row, dict):
            raise ConfigError(f"--dataset-path {path}, line {number}: must be a JSON object, got {type(row).__name__}")
    return rows
