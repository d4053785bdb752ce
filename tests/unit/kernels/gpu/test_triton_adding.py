"""The sum of the parts of tensor-parallel ranks against torch, in the order of ranks."""

import pytest
import torch

from quire.base.errors import InvariantError
from quire.kernels.triton.adding import add_parts_launch
from tests.unit.kernels.gpu.conftest import draw

F16 = pytest.param(torch.float16, marks=pytest.mark.slow, id="f16")
DTYPES = pytest.mark.parametrize("dtype", [pytest.param(torch.float32, id="f32"), pytest.param(torch.bfloat16, id="bf16"), F16])


def sum_of(parts):
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts.dtype)


@DTYPES
@pytest.mark.covering
@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@pytest.mark.parametrize("width", [37, pytest.param(1500, marks=pytest.mark.slow)])
def test_sums_have_the_bits_of_the_reference(num_ranks, width, dtype, device):
    parts = draw(num_ranks, 3, width, dtype=dtype)
    out = torch.empty(3, width, dtype=dtype, device=device)
    add_parts_launch(out, parts.to(device)).run()
    assert torch.equal(out.cpu(), sum_of(parts))


@DTYPES
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_sums_are_added_to_the_residual_stream_with_every_step_rounded(scale, dtype, device):
    parts, x = draw(4, 3, 40, dtype=dtype), draw(3, 40, dtype=dtype, seed=1)
    out = x.clone().to(device)
    add_parts_launch(out, parts.to(device), scale).run()
    branch = sum_of(parts)
    branch = branch if scale == 1.0 else (branch.float() * torch.tensor(scale, dtype=torch.float32)).to(dtype)
    torch.testing.assert_close(out.cpu(), x + branch, atol=1e-6 if dtype == torch.float32 else 0, rtol=0)


def test_a_row_has_the_same_bits_at_any_number_of_rows(device):
    parts = draw(3, 9, 40).to(device)
    whole, one = torch.empty(9, 40, device=device), torch.empty(1, 40, device=device)
    add_parts_launch(whole, parts).run()
    for row in range(9):
        add_parts_launch(one, parts[:, row : row + 1].contiguous()).run()
        assert torch.equal(one[0], whole[row])


@pytest.mark.parametrize(
    "shape, parts, words",
    [
        ((3, 40), (2, 3, 41), "parts must be"),
        ((3, 40), (2, 4, 40), "parts must be"),
        ((3, 40), (0, 3, 40), "at least one part"),
    ],
)
def test_what_does_not_fit_is_refused(shape, parts, words):
    with pytest.raises(InvariantError, match=words):
        add_parts_launch(torch.empty(shape, device="meta"), torch.empty(parts, device="meta"))


def test_other_dtypes_and_strides_are_refused():
    out, parts = torch.empty(3, 40, device="meta"), torch.empty(2, 3, 40, device="meta")
    with pytest.raises(InvariantError, match="parts must be"):
        add_parts_launch(out, parts.to(torch.bfloat16))
    with pytest.raises(InvariantError, match="in one piece"):
        add_parts_launch(out, torch.empty(2, 3, 80, device="meta")[:, :, :40])
