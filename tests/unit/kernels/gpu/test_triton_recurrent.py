"""Convolutions and recurrent states of the GPU kernels are those of the reference, wherever sequences begin and end."""

import pytest
import torch

from quire.base.errors import InvariantError
from quire.kernels.reference import recurrent as reference
from quire.kernels.reference.recurrent import Recurrence, StateRows, place_saves
from quire.kernels.triton.recurrent import causal_conv, recur
from quire.kernels.triton.step import DeviceStateRows

STARTS = [0, 1, 6, 6, 9]
ROWS = StateRows([-1, 3, 0, 4], [[(1, 1)], [(4, 3), (5, 2), (5, 7)], [], [(2, 4), (3, 5)]])


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def on_device(device):
    return torch.tensor(STARTS, dtype=torch.int32, device=device), DeviceStateRows.of(ROWS, STARTS, device)


@pytest.mark.covering
@pytest.mark.parametrize("num_taps", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolution_is_that_of_the_reference(device, num_taps, dtype):
    x = drawn(9, 300).to(dtype)[:, :150]  # rows of a wider projection
    weight, pool = drawn(150, num_taps).to(dtype), drawn(8, 150, num_taps - 1).to(dtype)
    bias = drawn(150).to(dtype) if num_taps == 3 else None
    expected_pool = pool.clone()
    expected = reference.causal_conv(x, weight, bias, expected_pool, STARTS, ROWS)
    parts = [None if part is None else part.to(device) for part in (x, weight, bias, pool)]
    found = causal_conv(*parts, *on_device(device))
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0 if dtype == torch.bfloat16 else 1e-6)
    assert torch.equal(parts[3].cpu(), expected_pool)


def inputs_of(kind):
    """q, k, v, decay, beta and rates of 4 heads, of which two share keys; `rates` has one head."""
    heads, key_heads, k_dim, v_dim = (1, 1, 10, 70) if kind == "rates" else (4, 2, 12, 20)
    q, k, v = drawn(9, key_heads, k_dim), drawn(9, key_heads, k_dim, seed=1) / 4, drawn(9, heads, v_dim)
    decay = {"scalar": (9, heads), "rows": (9, heads, k_dim), "rates": (9, heads, v_dim)}[kind]
    rates = -drawn(heads, k_dim, v_dim).abs() if kind == "rates" else None
    beta = None if kind == "rates" else drawn(9, heads).sigmoid()
    return Recurrence(q, k, v, drawn(*decay).sigmoid(), beta, rates)


@pytest.mark.parametrize("kind", ["scalar", "rows", "rates", "without beta"])
def test_states_are_those_of_the_reference(device, kind):
    inputs = inputs_of("scalar" if kind == "without beta" else kind)
    parts = {name: getattr(inputs, name) for name in ("q", "k", "v", "decay", "beta", "rates")}
    parts["beta"] = None if kind == "without beta" else parts["beta"]
    pool = drawn(8, *inputs.state_shape)
    expected_pool = pool.clone()
    expected = reference.recur(Recurrence(**parts), expected_pool, STARTS, ROWS)
    moved = {name: None if part is None else part.to(device) for name, part in parts.items()}
    there = pool.to(device)
    found = recur(Recurrence(**moved), there, *on_device(device))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(there.cpu(), expected_pool, rtol=1e-5, atol=1e-5)


def test_cut_prompt_has_the_same_bits(device):
    names = ("q", "k", "v", "decay", "beta")
    inputs = inputs_of("rows")
    inputs = Recurrence(**{name: getattr(inputs, name).to(device) for name in names})
    whole = recur(inputs, torch.zeros(3, *inputs.state_shape, device=device), *_run(device, 9, -1, []))
    pool, found = torch.zeros(3, *inputs.state_shape, device=device), []
    for first, last in ((0, 2), (2, 3), (3, 9)):
        part = Recurrence(**{name: getattr(inputs, name)[first:last] for name in names})
        found.append(recur(part, pool, *_run(device, last - first, 1 if first else -1, [(last - first, 1)])))
    assert torch.equal(torch.cat(found), whole)


def _run(device, num_tokens, source, saves):
    starts = [0, num_tokens]
    return torch.tensor(starts, dtype=torch.int32, device=device), DeviceStateRows.of(
        StateRows([source], [saves]), starts, device
    )


def test_saves_that_the_kernels_cannot_do_are_refused():
    assert place_saves(ROWS, STARTS)[1:] == ([1, -1, -1, -1, 3, 2, -1, 4, 5], [-1, -1, -1, -1, -1, 7, -1, -1, -1])
    for saves in ([(0, 1)], [(2, 1), (2, 2), (2, 3)]):
        with pytest.raises(InvariantError, match="cannot do"):
            place_saves(StateRows([-1], [saves]), [0, 2])
