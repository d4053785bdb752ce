"""What GpuStepExecutor launches: its largest steps, the arrays of a step, and what is kept of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import InvariantError
from quire.contracts.kv_spec import KvSpec
from quire.kernels.triton.processors import NUM_BIASES
from quire.worker.device.block_table_updates import change_parts
from quire.worker.device.graphs import PromptCaptureSizes
from quire.worker.device.host_step import SAMPLINGS, Sampling
from quire.worker.device.mixed_step import MixedSizes, TileKind, padded_sizes
from quire.worker.device.row_processors import MAX_WORDS, processor_parts
from quire.worker.device.sampling_table import option_parts
from quire.worker.device.staging import Part, Staged, staged_bytes


class StepSizes(NamedTuple):
    """The largest step, and the longest sequence.

    max_num_drafts  drafts of a step at most; a token is sampled after each
    has_drafts      whether steps with drafts are to be expected, so that small ones are captured, too
    has_trees       whether some of these are trees
    has_processors  whether the device applies logits processors, and finds log probabilities
    num_stages      of a pipeline: steps in flight, each of other sequences; 1: there is none
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_num_drafts: int = 0
    has_drafts: bool = False
    has_trees: bool = False
    has_processors: bool = False
    num_stages: int = 1

    @property
    def num_slots(self) -> int:
        """Batch slots. With stages a sequence that ends while a step with it is in flight has its slot until that is
        collected."""
        return self.max_num_seqs if self.num_stages == 1 else 2 * self.max_num_seqs


class Launched(NamedTuple):
    """A step that was launched.

    num_sampled  next tokens that read_sampled will return
    num_rows     the same with padding
    logits       [R, vocab_size] in the model's dtype; of a CUDA graph until the next one runs; None: not kept
    hidden       [T, hidden_size] after the final norm; of a CUDA graph until the next one runs; None: not kept
    readback     where the tokens arrive
    adapters     of the tokens, see HostStep
    sampling     of the step
    is_processed [num_sampled] whether the logits were changed; None: they were not
    deferred     the batch slots and positions of tokens that are not sampled yet; None: there are none
    is_masked    indices of rows that were sampled with a token mask
    place        where other ranks keep `hidden`
    """

    num_sampled: int = 0
    num_rows: int = 0
    logits: Tensor | None = None
    hidden: Tensor | None = None
    readback: int = 0
    adapters: NDArray[np.int32] | None = None
    sampling: Sampling = "plain"
    is_processed: NDArray[np.bool_] | None = None
    deferred: tuple[NDArray[np.int32], NDArray[np.int64]] | None = None
    is_masked: Collection[int] = ()
    place: int = 0


class Kept(NamedTuple):
    """What is kept of a step, in addition to the next tokens."""

    logits: bool = False
    hidden: bool = False


class Frame(NamedTuple):
    """The arrays of one kind of step, at fixed addresses, and a function that launches its kernels."""

    staged: Staged
    run: Callable[[], None]


KEEP_NOTHING = Kept()


def sampled_parts(num_sampled: int, sampling: Sampling) -> list[Part]:
    """Return the staged arrays of the tokens that get a next one."""
    return [Part("logit_rows", torch.int64, num_sampled), *option_parts(num_sampled, sampling)]


def hidden_of(started: Launched) -> Tensor:
    """Return the hidden states that a step kept. Raises InvariantError if it kept none."""
    if started.hidden is None:
        raise InvariantError("the step did not keep its hidden states")
    return started.hidden


def table_width(max_model_len: int, kv: KvSpec) -> int:
    """Return the entries of a block table: with a window group, twice as many, the second half of which is of that group.

    Kernels are compiled for tables at multiples of 16 bytes, and so is the second half.
    """
    max_blocks = -(-max_model_len // kv.block_size)
    return max_blocks if kv.window_tokens is None else 2 * -(-max_blocks // 4) * 4


def masked_parts(num_rows: int, vocab_size: int) -> list[Part]:
    """Return the staged arrays of rows that are sampled after their step."""
    return [*option_parts(num_rows, "full"), Part("token_masks", torch.int32, num_rows * -(-vocab_size // 32))]


def most_staged_bytes(
    sizes: StepSizes,
    prompts: PromptCaptureSizes,
    tile_kinds: Sequence[TileKind],
    has_states: bool,
    table_width: int,
    has_windows: bool = False,
    vocab_size: int = 0,
    num_homes: int = 1,
) -> int:
    """Return the bytes of all staged arrays of the largest step; table_width: entries of a block table, of both groups."""
    num_seqs, num_tokens, num_drafts = sizes.max_num_seqs, sizes.max_num_batched_tokens, sizes.max_num_drafts
    tiles = tuple((num_seqs, num_tokens) for _ in tile_kinds)
    steps = [MixedSizes(num_tokens, num_seqs, tiles, num_drafts > 0, has_states, True, has_windows)]
    if num_homes > 1:  # each may have padding for as many sequences as all, and tokens have places among all
        num_rows = num_homes * num_seqs
        steps = [MixedSizes(2 * num_tokens + num_rows, num_seqs + num_rows, (), num_drafts > 0)]
    largest = [key._replace(has_adapters=True) for key in prompts.keys[:1]]
    steps += [padded_sizes(key, num_seqs, tile_kinds, has_states, has_windows) for key in largest]
    of_windows = (num_seqs, num_drafts) if has_windows else (0, 0)
    changes = change_parts(num_seqs * (table_width + 2), num_seqs, num_drafts, num_seqs, num_seqs, *of_windows)
    shared = [*sampled_parts(num_seqs + num_drafts, SAMPLINGS[0]), *changes]
    alone = [processor_parts(num_seqs, MAX_WORDS, num_seqs * NUM_BIASES), masked_parts(num_seqs, vocab_size)]
    of_processors = max(map(staged_bytes, alone)) if sizes.has_processors else 0
    return max(of_processors, *(staged_bytes([*own.parts, *shared]) for own in steps))
