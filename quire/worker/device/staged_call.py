"""StagedCall: what an executor launches once a step's arrays are in its staging buffer; sent to all ranks of a group.

A message holds some numbers, the bytes of the staging buffer and, for a step without a graph, its lengths. So all ranks
launch the same, over the same inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import InvariantError
from quire.parallel.ring import RingMessage
from quire.worker.device.block_table_updates import BlockTableUpdates
from quire.worker.device.graphs import SHORT_RUNS, GraphKey, PromptKey
from quire.worker.device.host_step import SAMPLINGS, Sampling
from quire.worker.device.mixed_step import StepShape
from quire.worker.parallel_messages import Call, Encoded


class ChangeCounts(NamedTuple):
    """How many changes come before a step: entries of block tables, blocks to copy, tokens to move, their sequences, recurrent
    states to copy, blocks and tokens of the window group, and rows, words and biases of the tables of logits processors."""

    num_entries: int = 0
    num_copies: int = 0
    num_moves: int = 0
    num_moved: int = 0
    num_state_copies: int = 0
    num_window_copies: int = 0
    num_window_moves: int = 0
    num_processor_rows: int = 0
    num_processor_words: int = 0
    num_processor_biases: int = 0

    @classmethod
    def of(cls, changes: BlockTableUpdates) -> ChangeCounts:
        """Return the counts of changes."""
        return cls(*changes.counts)

    @property
    def is_empty(self) -> bool:
        """Whether nothing changes."""
        return not any(self)


class StagedCall(NamedTuple):
    """Changes, and a step if there is one.

    changes       are made first
    key           of a CUDA graph; None: it is launched one by one, or there is none
    shape         of a step that is launched one by one
    sampling      of a step
    num_sampled   tokens after which one is sampled; of a decode step that is captured, padding included
    keeps_hidden  whether logits of its tokens may be asked for later
    """

    changes: ChangeCounts = ChangeCounts()
    key: GraphKey | PromptKey | None = None
    shape: StepShape | None = None
    sampling: Sampling = SAMPLINGS[0]
    num_sampled: int = 0
    keeps_hidden: bool = False


_CHANGES, _DECODE, _PROMPTS, _ONE_BY_ONE = range(4)


def encode_staged(call: StagedCall, staged: NDArray[np.uint8]) -> Encoded:
    """Return the message of a call; staged: the bytes of the staging buffer that it needs."""
    kind, of_key, arrays = _CHANGES, [0, 0, 0, 0], list[NDArray[np.generic]]()
    has_adapters = any(each is not None and each.has_adapters for each in (call.key, call.shape))
    if isinstance(call.key, GraphKey):
        kind, of_key = _DECODE, [call.key.num_rows, SAMPLINGS.index(call.key.sampling), call.key.home_rows, 0]
    elif isinstance(call.key, PromptKey):
        runs = SHORT_RUNS.index(call.key.short_runs)
        kind, of_key = _PROMPTS, [call.key.num_tokens, call.key.max_context_len, runs, call.key.has_trees]
    elif call.shape is not None:
        kind, of_key = _ONE_BY_ONE, [call.shape.has_trees, 0, 0, 0]
        lengths = call.shape.counts, call.shape.context_lens, call.shape.home_sequences
        arrays = [np.array(each, np.int32) for each in lengths]
    sampled = [SAMPLINGS.index(call.sampling), call.num_sampled, call.keeps_hidden]
    return [Call.STAGED, kind, *of_key, has_adapters, *sampled], [staged, np.array(call.changes, np.int32), *arrays]


def decode_staged(message: RingMessage) -> tuple[StagedCall, NDArray[np.uint8]]:
    """Return what encode_staged was given; the bytes are a view of the message."""
    words = message.header.tolist()
    kind, of_key, has_adapters, (sampling, num_sampled, keeps_hidden) = words[1], words[2:6], bool(words[6]), words[7:10]
    key: GraphKey | PromptKey | None = None
    shape: StepShape | None = None
    if kind == _DECODE:
        key = GraphKey(of_key[0], SAMPLINGS[of_key[1]], has_adapters, of_key[2])
    elif kind == _PROMPTS:
        key = PromptKey(of_key[0], of_key[1], SHORT_RUNS[of_key[2]], bool(of_key[3]), has_adapters)
    elif kind == _ONE_BY_ONE:
        counts, lengths, homes = (tuple(array.tolist()) for array in message.arrays[2:])
        shape = StepShape(counts, lengths, bool(of_key[0]), has_adapters, homes)
    elif kind != _CHANGES:
        raise InvariantError(f"a message of the leader has a step of kind {kind}, which no worker knows")
    call = StagedCall(
        ChangeCounts(*message.arrays[1].tolist()), key, shape, SAMPLINGS[sampling], num_sampled, bool(keeps_hidden)
    )
    return call, message.arrays[0].view(np.uint8)
