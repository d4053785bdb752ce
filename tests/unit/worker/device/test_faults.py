"""What errors of a device mean."""

import pytest
import torch

from quire.worker.device.faults import is_lost, is_out_of_memory, release_pinned, release_unused


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"),  # torch.AcceleratorError says that
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_memory_has_ended_whoever_says_so(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: operation not permitted when stream is capturing"),
        RuntimeError("out of resource: shared memory, Required: 239616, Hardware limit: 232448"),
        MemoryError("out of memory"),  # the host's
        ValueError("out of memory"),
    ],
)
def test_other_errors_are_not_taken_for_the_end_of_memory(error):
    assert not is_out_of_memory(error)


def test_a_device_is_lost_when_nothing_can_be_waited_for_any_more(monkeypatch):
    def fail(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    assert is_lost(device)
    assert not is_lost(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert not is_lost(device)


def test_a_device_whose_memory_has_ended_is_not_lost(monkeypatch):
    def fail(device):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    assert not is_lost(torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("module", "name", "release"),
    [(torch.cuda, "empty_cache", release_unused), (torch.accelerator, "empty_host_cache", release_pinned)],
)
def test_unused_memory_is_given_back_on_a_gpu_alone(monkeypatch, module, name, release):
    calls = []
    monkeypatch.setattr(module, name, lambda: calls.append(1), raising=False)
    release(torch.device("cpu"))
    assert calls == []
    release(torch.device("cuda", 0))
    assert calls == [1]
