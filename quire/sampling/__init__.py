"""Sampling: from logits to tokens with logits processors, keyed noise, and log probabilities."""

from quire.sampling.logprobs import token_logprobs
from quire.sampling.row_state import SamplingRow
from quire.sampling.sampler import Sampled, sample

__all__ = ["Sampled", "SamplingRow", "sample", "token_logprobs"]
