"""Chooses the best tree for Medusa heads, based on the model's own outputs (Cai et al., arXiv 2401.10774, 3.3).

For every position of the outputs the rank of the actual token in each head is known. A path of a tree is accepted at the
positions whose ranks begin with it. The paths with most positions form the best tree of their number: no path has fewer than
one that begins with it.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import ConfigError, UnsupportedError
from quire.base.logging import get_logger
from quire.contracts.medusa_choices import Choices
from quire.contracts.speculative import MAX_SPECULATIVE_TOKENS
from quire.model.heads.build import read_parallel_head
from quire.model.heads.parallel_model import ParallelModel
from quire.model.resolve import resolve_model
from quire.training.config import DraftTraining
from quire.training.corpus import read_sequences
from quire.training.target import Target

logger = get_logger(__name__)

_MAX_RANK = 32
_NOWHERE = 1 << 20
"""Rank of a token that is not in a head's vocabulary."""


@dataclass(frozen=True, slots=True)
class MedusaTree:
    """A tree and its acceptance: `shares` are the shares of positions at which each path is accepted, descending."""

    choices: Choices
    shares: tuple[float, ...]
    num_places: int

    @property
    def tokens_per_step(self) -> float:
        """Average number of tokens of a greedy step, the model's own included."""
        return 1.0 + sum(self.shares)


def choose_tree(ranks: NDArray[np.int64], num_nodes: int) -> MedusaTree:
    """Return the best tree of at most num_nodes paths, the best path first.

    ranks  [N, K] of the actual token in each head
    """
    counts: Counter[tuple[int, ...]] = Counter()
    for line in ranks.tolist():
        for length in range(1, len(line) + 1):
            if line[length - 1] >= _MAX_RANK:
                break
            counts[tuple(line[:length])] += 1
    best = sorted(counts, key=lambda path: (-counts[path], len(path), path))[:num_nodes]
    return MedusaTree(tuple(best), tuple(counts[path] / len(ranks) for path in best), len(ranks))


@torch.inference_mode()
def measure_ranks(target: Target, folder: Path, sequences: NDArray[np.int32], prompt_tokens: int) -> NDArray[np.int64]:
    """Return the ranks [N, K] of the tokens that the model generated, in each of the K heads of a folder.

    sequences  [S, L], of which the first prompt_tokens are not generated
    """
    head = read_parallel_head(folder, target.spec)
    model = ParallelModel(head, None)
    places = None
    if head.vocabulary is not None:
        places = torch.full((target.spec.vocab_size,), -1)
        places[head.vocabulary.long()] = torch.arange(model.vocab_size)
    first, last = prompt_tokens - 1, sequences.shape[1] - 1 - model.num_heads
    if first >= last:
        raise ConfigError(
            f"sequences of {sequences.shape[1]} tokens hold no place with {model.num_heads} heads; make them longer"
        )
    found: list[Tensor] = []
    for line in sequences:
        token_ids = torch.from_numpy(np.asarray(line).astype(np.int64))
        hidden = target.compute(token_ids[None]).hidden[0, first:last].float()
        columns: list[Tensor] = []
        for index, logits in enumerate(model.logits(hidden, model.num_heads)):
            came = token_ids[first + 2 + index : last + 2 + index]
            own = came if places is None else places[came]
            score = logits.gather(1, own.clamp(min=0)[:, None])
            # Equal ones are ordered by id, as in the proposer.
            is_before = (logits == score) & (torch.arange(logits.shape[1]) < own[:, None])
            columns.append(((logits > score) | is_before).sum(1).masked_fill(own < 0, _NOWHERE))
        found.append(torch.stack(columns, 1))
    return torch.cat(found).numpy()


def calibrate_tree(options: DraftTraining, head: str, num_nodes: int, show_progress: bool = True) -> MedusaTree:
    """Generate text with a model, and return the best tree of a head for it. Raises ConfigError or ModelFormatError.

    options  of kind medusa: the model, its text and how much of it, and a folder for the generated text
    """
    if not 1 <= num_nodes <= MAX_SPECULATIVE_TOKENS:
        raise ConfigError(f"a tree has 1 to {MAX_SPECULATIVE_TOKENS} nodes, got {num_nodes}")
    if options.kind != "medusa":
        raise UnsupportedError(f"trees are chosen for heads of kind medusa, got {options.kind}")
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    options.out.mkdir(parents=True, exist_ok=True)
    sequences = read_sequences(options, options.out, show_progress)
    target = Target(options.model, options.sequence_tokens, ())
    ranks = measure_ranks(target, resolve_model(head), sequences, options.prompt_tokens)
    return choose_tree(ranks, num_nodes)


def store_tree(folder: Path, tree: MedusaTree) -> None:
    """Write a tree into the config.json of a head, which then drafts it. A tree without paths is not written: it is invalid."""
    if not tree.choices:
        logger.warning("%s: the heads have foreseen no token, so that no tree is stored with them", folder)
        return
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["medusa_choices"] = [list(path) for path in tree.choices]
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
