"""Copies to a device through buffers that the device empties late."""

import pytest
import torch

from quire.model.device_copies import DeviceCopies

CPU = torch.device("cpu")


class LateBuffer:
    """A buffer whose copies are made only when they are awaited."""

    def __init__(self, num_bytes):
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8)
        self._pending = None

    def send(self, source, out):
        assert self._pending is None
        self._pending = source, out

    def wait(self):
        if self._pending is not None:
            source, out = self._pending
            self._pending = None
            out.copy_(source)


@pytest.fixture
def copies():
    return DeviceCopies(CPU, LateBuffer, buffer_bytes=64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.int64])
def test_a_tensor_arrives_when_it_goes_through_more_buffers_than_there_are(copies, dtype):
    source = torch.randn(103, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = source.clone()
    found = copies.upload(source)
    source.view(torch.uint8).zero_()  # the copies no longer need it
    copies.finish()
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_numbers_are_rounded_to_the_dtype_of_their_place(copies):
    source = torch.randn(9, 4, generator=torch.Generator().manual_seed(2))
    out = torch.zeros(20, 4, dtype=torch.bfloat16)
    copies.fill(out[3:12], source)
    copies.finish()
    assert torch.equal(out[3:12], source.bfloat16())
    assert not out[:3].any()
    assert not out[12:].any()


@pytest.mark.parametrize(
    "source",
    [
        torch.arange(77.0),
        torch.arange(60.0).view(4, 15).t(),
        torch.arange(40.0).view(2, 20),
        torch.zeros(0, 7),
        torch.zeros(7, 0),
        torch.tensor(3.0),
    ],
    ids=["vector", "transposed", "rows-larger-than-a-buffer", "no-rows", "no-columns", "number"],
)
def test_any_shape_arrives(copies, source):
    found = copies.upload(source)
    copies.finish()
    assert torch.equal(found, source)


def test_several_tensors_share_the_buffers_in_any_order_of_waiting(copies):
    sources = [torch.full((3, 4), float(index)) for index in range(11)]
    found = [copies.upload(source) for source in sources]
    copies.finish()
    assert all(torch.equal(one, other) for one, other in zip(found, sources, strict=True))


def test_without_buffers_torch_copies():
    copies = DeviceCopies.to(CPU)
    source = torch.arange(6).view(2, 3)
    out = torch.zeros(2, 3)
    copies.fill(out, source)
    copies.finish()
    assert out.tolist() == source.tolist()
    assert copies.upload(source) is source
