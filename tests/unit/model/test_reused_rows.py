"""Rows are reused, but never while they are referenced."""

import pytest
import torch

from quire.model.native_decoder import ReusedRows


def test_rows_that_nobody_holds_are_handed_out_again():
    rows = ReusedRows()
    first = rows.take(3, 8)
    assert first.dtype == torch.float32
    assert first.shape[0] >= 3
    assert first.shape[1] == 8
    address = first.data_ptr()
    del first
    assert rows.take(1, 8).data_ptr() == address


def test_rows_that_are_held_are_left_alone():
    rows = ReusedRows()
    held = [rows.take(2, 8).fill_(index) for index in range(5)]
    assert len({one.data_ptr() for one in held}) == 5
    assert [one[0, 0].item() for one in held] == [0, 1, 2, 3, 4]
    addresses = {one.data_ptr() for one in held[:2]}
    held.clear()
    again = [rows.take(2, 8), rows.take(2, 8)]
    assert {one.data_ptr() for one in again} == addresses


@pytest.mark.parametrize(("count", "width"), [(100, 8), (2, 24)])
def test_rows_of_another_size_come_from_other_memory(count, width):
    rows = ReusedRows()
    held = rows.take(2, 8).fill_(7.0)
    other = rows.take(count, width).fill_(1.0)
    assert other.shape[0] >= count
    assert other.shape[1] == width
    assert bool((held == 7.0).all())
