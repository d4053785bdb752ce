"""What the kernels on a device are told of a step."""

import torch

from quire.kernels.reference.attention import AttentionMetadata, TreeInput
from quire.kernels.triton.step import DeviceAttentionMetadata


def test_drafts_stand_at_their_depths_when_their_first_ones_are_cached():
    # A prompt's end; the third draft of two branches; all of a tree of two; one token that is no draft.
    trees = TreeInput(torch.tensor([0, 3, 2, 0], dtype=torch.int32), torch.tensor([0, 0, 0, 0, 0b101, 0b01, 0b10, 0]))
    step = AttentionMetadata(torch.arange(8), [0, 4, 5, 7, 8], [9, 20, 12, 3], torch.zeros(4, 2, dtype=torch.int64), trees)
    found = DeviceAttentionMetadata.of(step, torch.device("cpu"))
    assert found.positions is not None
    assert found.has_cached_drafts
    assert found.positions.tolist() == [5, 6, 7, 8, 18, 10, 10, 2]
