"""Pages of mapped files: given back, read again, and nothing else touched."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from quire.kernels.cpu.pages import SpentPages, is_file_view

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not say what is in memory")

_BYTES = 20 << 20


def resident_kib(tensor: torch.Tensor) -> int:
    """Return how much of the mapping that begins a tensor's data is in memory."""
    address, is_in = tensor.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name:
            first, last = (int(part, 16) for part in name.split("-"))
            is_in = first <= address < last
        elif is_in and name == "Rss:":
            return int(rest.split()[0])
    raise AssertionError("the tensor lies in no mapping")


@pytest.fixture
def mapped(tmp_path):
    """A tensor in a mapped file, all of it read."""
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.arange(_BYTES // 4, dtype=torch.int32)}, path)
    with safe_open(path, framework="pt") as opened:
        tensor = opened.get_tensor("weight")
    assert int(tensor.sum()) >= 0
    return tensor


def test_pages_are_given_back_and_read_again_when_a_file_is_mapped(mapped):
    assert is_file_view(mapped)
    assert resident_kib(mapped) > 19 << 10
    SpentPages().add((mapped,))
    assert resident_kib(mapped) < 1 << 10
    assert torch.equal(mapped, torch.arange(_BYTES // 4, dtype=torch.int32))


def test_part_of_a_file_is_given_back_when_asked_for(mapped):
    spent = SpentPages()
    spent.add((mapped[: len(mapped) // 2],))
    assert resident_kib(mapped) > 19 << 10  # it waits for more
    spent.give_back()
    assert 9 << 10 < resident_kib(mapped) < 11 << 10


@pytest.mark.parametrize("make", [torch.ones, lambda n: torch.from_numpy(np.ones(n, np.float32))], ids=["torch", "numpy"])
def test_memory_of_its_own_is_kept(make):
    tensor = make(_BYTES)
    SpentPages().add((tensor,))
    assert float(tensor.sum()) == _BYTES


def test_strided_views_are_kept(mapped):
    columns = mapped.view(-1, 1024)[:, :1000]
    SpentPages().add((columns,))
    assert resident_kib(mapped) > 19 << 10
