"""What the leader of a group of GPUs tells its workers arrives as it was sent."""

import numpy as np
import pytest

from quire.base.errors import InvariantError
from quire.kernels.native import load_native
from quire.parallel.ring import RingMessage, RingReader, RingWriter
from quire.worker.device.block_table_updates import BlockTableUpdates, change_parts
from quire.worker.device.graphs import GraphKey, PromptKey
from quire.worker.device.mixed_step import StepShape
from quire.worker.device.staged_call import ChangeCounts, StagedCall, decode_staged, encode_staged
from quire.worker.parallel_messages import Call
from quire.worker.step_executor import Moves
from tests.ranks import SharedGroup

CALLS = {
    "changes": StagedCall(ChangeCounts(3, 1, 2, 1, 0, 4, 2)),
    "decode": StagedCall(ChangeCounts(), GraphKey(8, "plain"), None, "plain", 8),
    "decode with cuts": StagedCall(ChangeCounts(1), GraphKey(384, "cuts"), None, "cuts", 384),
    "prompts": StagedCall(ChangeCounts(), PromptKey(256, 4096, "single"), None, "plain", 3, keeps_hidden=True),
    "processors": StagedCall(ChangeCounts(*[0] * 7, 3, 90000, 512), GraphKey(64, "full"), None, "full", 64),
    "trees": StagedCall(ChangeCounts(), PromptKey(64, 131072, "any", True), None, "cuts", 9),
    "one by one": StagedCall(ChangeCounts(0, 2), None, StepShape((5, 1), (70, 9)), "cuts", 2),
    "decode with adapters": StagedCall(ChangeCounts(), GraphKey(8, "plain", True), None, "plain", 8),
    "prompts with adapters": StagedCall(ChangeCounts(), PromptKey(64, 4096, "single", True, True), None, "plain", 1),
    "one by one with adapters": StagedCall(ChangeCounts(), None, StepShape((5, 1), (70, 9), False, True), "cuts", 2),
    "decode at homes": StagedCall(ChangeCounts(), GraphKey(8, "plain", False, 4), None, "plain", 8),
    "one by one at homes": StagedCall(
        ChangeCounts(), None, StepShape((5, 1, 1), (70, 0, 9), home_sequences=(1, 2)), "plain", 2
    ),
    "trees one by one": StagedCall(ChangeCounts(), None, StepShape((5,), (5,), True), "plain", 0, keeps_hidden=True),
}


@pytest.mark.skipif(load_native() is None, reason="messages are in shared memory, which needs the native extension")
@pytest.mark.parametrize("num_bytes", [0, 48, 600_000])
def test_calls_arrive_as_they_were_sent(num_bytes):
    group = SharedGroup(2)
    writer, reader = RingWriter(group.memory, group.barrier(0)), RingReader(group.memory, group.barrier(1))
    staged = np.random.default_rng(0).integers(0, 256, num_bytes).astype(np.uint8)
    for call in CALLS.values():
        writer.send(*encode_staged(call, staged))  # one of 600 kB takes three of the eight slots
        message = reader.receive(10)
        assert Call(int(message.header[0])) is Call.STAGED
        found, arrived = decode_staged(message)
        assert found == call
        assert np.array_equal(arrived, staged)


def test_a_step_of_another_kind_is_refused():
    message = RingMessage(np.array([1, 9, *[0] * 14], np.int32), (np.zeros(0, np.uint8),))
    with pytest.raises(InvariantError, match="a step of kind 9"):
        decode_staged(message)


def test_counts_of_changes_are_those_of_their_arrays():
    changes = BlockTableUpdates([(0, 2, [4, 5]), (3, 0, [9])], [(1, 2)], Moves([7, 8], [6, 7], [0, 2]), [(9, 1), (8, 2)])
    counts = ChangeCounts.of(changes)
    assert counts == (3, 1, 2, 1, 2, 0, 0, 0, 0, 0)
    assert change_parts(*counts) == changes.parts()
    assert ChangeCounts.of(BlockTableUpdates([])).is_empty
    assert not counts.is_empty
