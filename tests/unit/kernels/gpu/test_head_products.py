"""A matrix for each head: torch's product and the batch-invariant kernel."""

import pytest
import torch

from quire.base.errors import InvariantError
from quire.kernels.triton.head_products import multiply_heads


@pytest.mark.parametrize("is_in_order", [False, True])
@pytest.mark.parametrize("num_tokens, num_heads, num_inputs, num_outputs", [(5, 3, 20, 36), (33, 2, 100, 70)])
def test_each_head_is_multiplied_by_its_matrix(num_tokens, num_heads, num_inputs, num_outputs, is_in_order, device):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, num_heads, num_inputs + 4, generator=generator).to(device)[..., 4:]
    weights = torch.randn(num_heads, num_outputs, num_inputs, generator=generator).to(device).transpose(1, 2)
    expected = torch.einsum("thk,hkn->thn", x.double(), weights.double())
    torch.testing.assert_close(multiply_heads(x, weights, is_in_order).double(), expected, atol=1e-4, rtol=1e-4)


def test_a_row_has_the_same_bits_for_any_number_of_rows_in_order(device):
    generator = torch.Generator().manual_seed(1)
    x, weights = torch.randn(40, 2, 64, generator=generator).to(device), torch.randn(2, 64, 48, generator=generator).to(device)
    together = multiply_heads(x, weights, is_in_order=True)
    for first, last in ((0, 1), (7, 24), (39, 40)):
        assert torch.equal(multiply_heads(x[first:last], weights, is_in_order=True), together[first:last])


def test_weights_of_other_sizes_are_refused(device):
    with pytest.raises(InvariantError, match="2 heads of 8 inputs"):
        multiply_heads(torch.zeros(3, 2, 8, device=device), torch.zeros(2, 9, 4, device=device), is_in_order=True)
