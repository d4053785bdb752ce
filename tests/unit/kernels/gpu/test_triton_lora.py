"""The products of LoRA adapters against torch: any grouping of rows, several parts, odd sizes."""

import pytest
import torch

from quire.kernels.triton.lora import add_low_rank, group_rows

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
ROWS = {
    "one": [2],
    "few": [1, -1, 0],
    "none": [-1] * 9,
    "grouped": [0] * 20 + [-1] * 3 + [2] * 17,
    "mixed": [0, 1, 2, -1, 2, 1, 0, 0, -1, 2, 2, 2] * 3,
}


def random(*shape, dtype, device, seed):
    return (0.3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype).to(device)


def sizes(device, dtype, rank=5, widths=(37, 70), num_columns=50, num_adapters=3):
    a = random(num_adapters, len(widths) * rank, num_columns, dtype=dtype, device=device, seed=1)
    return a, [random(num_adapters, width, rank, dtype=dtype, device=device, seed=2 + width) for width in widths]


def reference(y, x, a, b, adapters):
    out, rank = y.clone(), a.shape[1] // len(b)
    for row, adapter in enumerate(adapters):
        if adapter < 0:
            continue
        shrunk = a[adapter] @ x[row]
        parts = [part[adapter] @ shrunk[index * rank : (index + 1) * rank] for index, part in enumerate(b)]
        out[row] += torch.cat(parts)
    return out


@DTYPES
@pytest.mark.parametrize("adapters", ROWS.values(), ids=ROWS)
def test_products_are_those_of_torch(adapters, dtype, device):
    a, b = sizes(device, dtype)
    x = random(len(adapters), 50, dtype=dtype, device=device, seed=3)
    y = random(len(adapters), 107, dtype=dtype, device=device, seed=4)
    want = reference(y, x, a, b, adapters)
    found = y.clone()
    add_low_rank(found, x, a, b, group_rows(torch.tensor(adapters, dtype=torch.int32, device=device), 3))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, want, atol=tolerance, rtol=tolerance)
    base = torch.tensor(adapters) < 0
    assert torch.equal(found[base], y[base])


def test_a_row_has_the_same_bits_in_any_step(device):
    adapters = ROWS["mixed"]
    a, b = sizes(device, torch.bfloat16, rank=20, widths=(70,), num_columns=300)
    x = random(len(adapters), 300, dtype=torch.bfloat16, device=device, seed=3)
    found = torch.zeros(len(adapters), 70, dtype=torch.bfloat16, device=device)
    add_low_rank(found, x, a, b, group_rows(torch.tensor(adapters, dtype=torch.int32, device=device), 3))
    for row in (0, 3, 7, 35):
        alone = torch.zeros(1, 70, dtype=torch.bfloat16, device=device)
        groups = group_rows(torch.tensor(adapters[row : row + 1], dtype=torch.int32, device=device), 3)
        add_low_rank(alone, x[row : row + 1], a, b, groups)
        assert torch.equal(alone[0], found[row])
