"""A synthetic workload: prompts of random tokens and a fixed number of output tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.base.errors import ConfigError
from quire.contracts.memory import ModelReport
from quire.contracts.model_spec import ModelSpec
from quire.contracts.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Workload:
    """num_prompts prompts of input_len tokens, drawn from `seed`, with output_len tokens each (fewer at an end of sequence,
    unless ignore_eos). Raises ConfigError."""

    num_prompts: int
    input_len: int
    output_len: int
    seed: int
    ignore_eos: bool
    temperature: float

    def __post_init__(self) -> None:
        for name, value in (
            ("num_prompts (batch_size)", self.num_prompts),
            ("input_len", self.input_len),
            ("output_len", self.output_len),
        ):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")

    def check(self, report: ModelReport) -> None:
        """Raise ConfigError if a sequence would exceed max_model_len: it would end early, unnoticed."""
        longest, length = self.input_len + self.output_len, report.memory.max_model_len
        if longest > length:
            raise ConfigError(
                f"input_len {self.input_len} and output_len {self.output_len} make {longest} tokens, but max_model_len is "
                f"{length}; lower them or raise max_model_len"
            )

    def prompts(self, spec: ModelSpec, first: int = 0) -> list[dict[str, list[int]]]:
        """Return the prompts; other values of `first` give other prompts of the same shape."""
        draws = np.random.default_rng([self.seed, first]).integers(0, spec.vocab_size, (self.num_prompts, self.input_len))
        return [{"prompt_token_ids": row} for row in draws.tolist()]

    def sampling_params(self) -> SamplingParams:
        """Return the parameters of every request."""
        return SamplingParams(
            temperature=self.temperature,
            max_tokens=self.output_len,
            ignore_eos=self.ignore_eos,
            detokenize=False,
        )
