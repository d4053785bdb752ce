"""Build the speculator that a configuration describes."""

from __future__ import annotations

from quire.contracts.speculative import SpeculativeConfig
from quire.speculate.ngram import NgramProposer
from quire.speculate.proposer import Proposer
from quire.speculate.speculator import Speculator
from quire.speculate.suffix import SuffixProposer


def build_speculator(config: SpeculativeConfig, vocab_size: int) -> Speculator:
    """Return a speculator with the proposer of the configuration's method."""
    proposer: Proposer = SuffixProposer(config) if config.method == "suffix" else NgramProposer(config)
    return Speculator(config, proposer, vocab_size)
