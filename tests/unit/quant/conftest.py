"""What tests of quantisation share."""

from contextlib import contextmanager

import pytest
import torch


@pytest.fixture
def divides_like_cuda(monkeypatch):
    """A context in which torch divides as on CUDA: by a number, or a tensor without dimensions, by way of its reciprocal."""
    divide = torch.Tensor.__truediv__

    def divide_like_cuda(x, other):
        if isinstance(other, torch.Tensor) and other.ndim > 0:
            return divide(x, other)
        return x * (1.0 / torch.as_tensor(other, dtype=x.dtype))

    @contextmanager
    def dividing():
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "__truediv__", divide_like_cuda)
            yield

    return dividing
