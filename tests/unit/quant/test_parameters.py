"""Quantised parameters: stacks, rows and joined rows stand for the same numbers as their dense forms."""

import pytest
import torch

from quire.base.errors import InvariantError
from quire.quant.parameters import QuantizedStack, dense_parameters
from quire.quant.weight import QuantizedWeight, concatenate_rows


def _weight(rows, seed=0, has_offset=False, num_groups=2, **options):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 8, (rows, 8), generator=generator, dtype=torch.int8)
    offset = torch.randn(rows, num_groups, generator=generator) if has_offset else None
    return QuantizedWeight(codes, torch.rand(rows, num_groups, generator=generator), offset, **options)


def test_joined_rows_are_the_rows_when_only_some_have_offsets():
    parts = [_weight(3, 0), _weight(2, 1, has_offset=True), _weight(4, 2)]
    joined = concatenate_rows(parts)
    assert joined is not None
    assert torch.equal(joined.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert torch.equal(joined.rows(2, 5).dequantize(), joined.dequantize()[2:5])


def test_rows_are_not_joined_when_their_forms_differ():
    order = torch.tensor([1, 0, 2, 3, 4, 5, 6, 7])
    for other in (_weight(3, num_groups=4), _weight(3, columns=order), _weight(3, levels=tuple(range(-8, 8)))):
        assert concatenate_rows([_weight(3), other]) is None


def test_stack_is_dense_as_its_weights_are():
    weights = (_weight(3, 0), _weight(3, 1, num_groups=4))
    stack = QuantizedStack(weights)
    assert stack.shape == (2, 3, 8)
    assert torch.equal(stack.dequantize(), torch.stack([weight.dequantize() for weight in weights]))
    with pytest.raises(InvariantError, match="cannot be stacked"):
        QuantizedStack((_weight(3), _weight(4)))


def test_plain_tensors_stay_the_same_objects():
    plain, weight = torch.ones(2, dtype=torch.bfloat16), _weight(3)
    dense = dense_parameters({"a": plain, "b": weight, "c": QuantizedStack((weight,))}, torch.bfloat16)
    assert dense["a"] is plain
    assert torch.equal(dense["b"], weight.dequantize(torch.bfloat16))
    assert dense["c"].shape == (1, 3, 8)
